"""Kept tokens on the image: what a method left of the picture, and what made it keep each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stacktok.core.inputs import Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RELEVANCE, COVERAGE, OTHER, MERGED = "#e8731a", "#006964", "#5c5c5c", "#7b4fa3"
"""The paper's colours: orange for relevance, teal for coverage; grey for neither, purple for tokens made of several."""

MARKS = {"relevance": ("o", RELEVANCE), "coverage": ("^", COVERAGE)}
"""Shape and colour by criterion; tokens of any other, or of none, are grey squares."""

_LABELS = {
    "relevance": "picked by relevance to the question",
    "coverage": "picked to cover the image",
    "swap": "swapped in",
}


def draw_kept(
    axes: Axes,
    picture: NDArray[Any],
    grid: tuple[int, int],
    indices: Sequence[int] | NDArray[np.int64],
    criteria: Sequence[str],
    *,
    eligible: Mask | None = None,
    lit: Sequence[int] | None = None,
) -> None:
    """Draw a picture in which dropped tokens are dimmed and kept ones marked by what scored them.

    Shapes carry the same meaning as colours: a circle is a pick by relevance, a triangle one by coverage, a square
    neither.

    Parameters
    ----------
    axes
        Where to draw.
    picture
        The image as the encoder saw it, (H, W, 3), in [0, 1] or uint8.
    grid
        Rows and columns of tokens.
    indices
        Kept tokens, in raster numbering, (k,).
    criteria
        What scored each of them, (k,).
    eligible
        Tokens that may be kept, (h w,); the others are hatched as padding.
    lit
        Tokens that are shown as they are; the kept ones if not given.
    """
    rows, columns = grid
    shown = picture.astype(np.float64) / (255 if picture.dtype == np.uint8 else 1)
    height, width = shown.shape[:2]
    kept = np.zeros(rows * columns, dtype=np.bool_)
    kept[np.asarray(indices if lit is None else lit, dtype=np.int64)] = True
    line, column = np.arange(height) * rows // height, np.arange(width) * columns // width
    bright = kept.reshape(rows, columns)[line][:, column][..., None]
    grey = shown.mean(axis=2, keepdims=True)
    axes.imshow(np.where(bright, shown, 0.78 + 0.17 * grey + 0.05 * shown), extent=(0, columns, rows, 0))
    for name in dict.fromkeys(criteria):
        marker, colour = MARKS.get(name, ("s", OTHER))
        places = np.array([index for index, by in zip(indices, criteria, strict=True) if by == name])
        size = min(64.0, 5000.0 / max(rows, columns) ** 1.6)
        axes.scatter(
            places % columns + 0.5, places // columns + 0.5, s=size, marker=marker, c=colour, edgecolors="white", lw=0.6
        )
    if eligible is not None and not eligible.all():
        for row, column in np.argwhere(~eligible.reshape(grid)).tolist():
            axes.fill(
                [column, column + 1, column + 1, column],
                [row, row, row + 1, row + 1],
                fill=False,
                hatch="////",
                edgecolor=OTHER,
                lw=0,
                zorder=2,
            )
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])


def criteria_of(selection: Any) -> list[str]:
    """The criterion of each kept token of a `Selection`, in the order of its indices; "swap" for those swapped in."""
    scored = dict(zip(selection.order.tolist(), selection.criterion, strict=True))
    return [scored.get(index, "swap") for index in selection.indices.tolist()]


def legend_handles(criteria: Iterable[str], *, merged: bool = False, padding: bool = False) -> list[Any]:
    """Entries of a legend for what is drawn, and for nothing else.

    Parameters
    ----------
    criteria
        Those of all tokens drawn.
    merged, padding
        Whether merged regions and hatched padding are drawn.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = set(criteria)
    handles: list[Any] = [
        Line2D([], [], marker=marker, color=colour, ls="", label=_LABELS[name])
        for name, (marker, colour) in MARKS.items()
        if name in names
    ]
    squares = [_LABELS["swap"]] if "swap" in names else []
    squares += ["kept by another rule"] if names - set(_LABELS) else []
    if squares:
        handles.append(Line2D([], [], marker="s", color=OTHER, ls="", label=" or ".join(squares)))
    if merged:
        handles.append(Patch(facecolor="none", edgecolor="tab:blue", lw=1.6, label="merged into one token"))
    if padding:
        handles.append(Patch(facecolor="white", edgecolor=OTHER, hatch="///", label="padding"))
    return handles


def outline(tokens: Sequence[int], columns: int) -> list[list[tuple[int, int]]]:
    """The edges between some tokens' cells and all others, each as two (x, y) corners.

    Parameters
    ----------
    tokens
        In raster numbering.
    columns
        Of the grid.
    """
    cells = {(token // columns, token % columns) for token in tokens}
    edges = []
    for row, column in sorted(cells):
        if (row - 1, column) not in cells:
            edges.append([(column, row), (column + 1, row)])
        if (row + 1, column) not in cells:
            edges.append([(column, row + 1), (column + 1, row + 1)])
        if (row, column - 1) not in cells:
            edges.append([(column, row), (column, row + 1)])
        if (row, column + 1) not in cells:
            edges.append([(column + 1, row), (column + 1, row + 1)])
    return edges
