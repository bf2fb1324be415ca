"""Quality against end-to-end time, with intervals: what a search found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stacktok.figures.kept import COVERAGE, OTHER, RELEVANCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A setting.

    Attributes
    ----------
    name
        Beside its mark.
    seconds
        End to end.
    kept, low, high
        Share of the full model's quality, with its interval.
    best
        Whether it is the recommendation.
    """

    name: str
    seconds: float
    kept: float
    low: float
    high: float
    best: bool = False


def pareto_figure(points: Sequence[Point], full_seconds: float, keep: float, quality: str) -> Figure:
    """Kept quality over time: the finalists, the full model, and the promise.

    Parameters
    ----------
    points
        The finalists.
    full_seconds
        Time of the full model.
    keep
        The promise.
    quality
        What is kept.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.axhline(100 * keep, color=OTHER, lw=1, ls="--")
    axes.annotate(
        f"promised: {100 * keep:g} %",
        (1, 100 * keep),
        (-4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=OTHER,
    )
    axes.plot([full_seconds], [100], marker="s", color="black", ls="")
    axes.annotate("full model", (full_seconds, 100), (-6, 6), textcoords="offset points", ha="right", fontsize=8)
    for number, point in enumerate(sorted(points, key=lambda own: own.kept)):
        colour, marker = (RELEVANCE, "o") if point.best else (COVERAGE, "^")
        spread = [[100 * max(0.0, point.kept - point.low)], [100 * max(0.0, point.high - point.kept)]]
        axes.errorbar(
            [point.seconds], [100 * point.kept], yerr=spread, color=colour, marker=marker, capsize=3, lw=1.2, ms=6
        )
        above = number % 2 == 1
        axes.annotate(
            point.name + (" (recommended)" if point.best else ""),
            (point.seconds, 100 * (point.high if above else point.low)),
            (0, 6 if above else -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
    axes.margins(x=0.25, y=0.2)
    axes.set_xlim(left=0, right=1.12 * max(full_seconds, *(point.seconds for point in points)))
    axes.set_xlabel("seconds per answer, from picture to last word (median)")
    axes.set_ylabel(f"{quality} kept, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
