"""Learning curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from training.config import TrainConfig


def draw_curves(log: Path, picture: Path, config: TrainConfig) -> None:
    """Draw losses and dev accuracy over the minutes of a run."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5))
    for name in ("align", "language"):
        points = [(r["minutes"], r[name]) for r in records if name in r]
        if points:
            left.plot(*zip(*points, strict=True), label=name)
    left.set(title="training loss", xlabel="minutes", yscale="log")
    _lines(middle, records, "align/", {"align/box", "align/cls"})
    middle.set(title="patches that choose the right word", xlabel="minutes", ylim=(0, 1))
    _lines(right, records, "dev/", set())
    right.set(title="dev questions answered", xlabel="minutes", ylim=(0, 1))
    for stage in range(1, len(config.stages)):
        starts = [r["minutes"] for r in records if r["stage"] == stage]
        for axes in (left, middle, right):
            if starts:
                axes.axvline(starts[0], color="grey", linewidth=0.5)
    for axes in (left, middle, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def _lines(axes: plt.Axes, records: list[dict[str, float]], prefix: str, hidden: set[str]) -> None:
    names = dict.fromkeys(k for r in records for k in r if k.startswith(prefix) and k not in hidden)
    for name in names:
        points = [(r["minutes"], r[name]) for r in records if name in r]
        axes.plot(*zip(*points, strict=True), label=name.removeprefix(prefix))
