"""Time to the first token as stacked stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stacktok.figures.kept import COVERAGE, RELEVANCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"vision": "#888888", "selection": RELEVANCE, "prefill": COVERAGE}


def bench_figure(title: str, rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """One bar per row, each with its speed-up over the first.

    Parameters
    ----------
    title
        Above it.
    rows
        Seconds by row and stage; the first row is full tokens.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.1 * len(rows), 3.4), layout="constrained")
    axes = figure.subplots()
    names, below = list(rows), [0.0] * len(rows)
    for stage, colour in _COLOURS.items():
        heights = [row[stage] for row in rows.values()]
        axes.bar(names, heights, bottom=below, label=stage, color=colour)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for x, top in enumerate(below):
        axes.annotate(f"{below[0] / top:.2f}x", (x, top), ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.12 * max(below))
    axes.set_xlabel("tokens kept per image")
    axes.set_ylabel("seconds to the first token")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure
