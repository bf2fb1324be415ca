"""The demonstration's picture: a row per question, a column per budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from stacktok.figures.image import Panel, draw_image
from stacktok.figures.kept import legend_handles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Shown:
    """One answer as it is drawn.

    Attributes
    ----------
    title
        Above it.
    pictures, panels
        Per crop, what the encoder saw and what was kept; no panels draw the first picture as it is.
    """

    title: str
    pictures: Sequence[NDArray[Any]]
    panels: Sequence[Panel]


def demo_figure(questions: Sequence[str], rows: Sequence[Sequence[Shown]], tiles: tuple[int, int] | None) -> Figure:
    """Draw the answers to every question.

    Parameters
    ----------
    questions
        One per row.
    rows
        Per question, per budget.
    tiles
        Rows and columns of tiles; None for one crop.
    """
    from matplotlib.figure import Figure

    columns = len(rows[0])
    wide = 1.0 if tiles is None else 1.7
    figure = Figure(figsize=(3.2 * wide * columns, 3.3 * len(rows) + 0.4), layout="constrained")
    spots = figure.subfigures(len(rows), columns, squeeze=False)
    for question, spot_row, row in zip(questions, spots, rows, strict=True):
        for spot, shown in zip(spot_row, row, strict=True):
            if shown.panels:
                draw_image(spot, shown.pictures, shown.panels, tiles=tiles, title=shown.title)
                continue
            spot.suptitle(shown.title, fontsize=9)
            axes = spot.subplots()
            axes.imshow(shown.pictures[0])
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_ylabel(question, fontsize=10)
    marks = legend_handles(by for row in rows for shown in row for panel in shown.panels for by in panel.criteria)
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    return figure
