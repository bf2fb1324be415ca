"""A selection as a small drawing for notebooks: plain SVG, since the core depends on no drawing library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

RELEVANCE, COVERAGE, OTHER = "#e8731a", "#006964", "#5c5c5c"
_CELL = 10


def grid_of(n: int) -> tuple[int, int]:
    """Rows and columns for n tokens whose layout is not known: a square, or the most nearly square filled grid."""
    columns = max(1, math.isqrt(n))
    while n % columns and columns * columns < 4 * n:
        columns += 1
    return math.ceil(n / columns), columns


def kept_svg(grid: tuple[int, int], indices: Sequence[int], criteria: Sequence[str]) -> str:
    """Kept tokens on their grid: a circle for relevance, a triangle for coverage, a square for the others.

    Parameters
    ----------
    grid
        Rows and columns.
    indices, criteria
        Kept tokens in raster numbering, and what scored each.
    """
    rows, columns = grid
    width, height = columns * _CELL, rows * _CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{min(360, 2 * width)}" viewBox="0 0 {width} {height}">'
        f'<rect width="{width}" height="{height}" fill="#eceff0"/>'
    ]
    for index, criterion in zip(indices, criteria, strict=True):
        x, y = _CELL * (index % columns), _CELL * (index // columns)
        note = f"<title>token {index}: {html.escape(criterion or 'kept')}</title>"
        if criterion == "relevance":
            parts.append(f'<circle cx="{x + 5}" cy="{y + 5}" r="4" fill="{RELEVANCE}">{note}</circle>')
        elif criterion == "coverage":
            corners = f"{x + 5},{y + 1} {x + 9},{y + 9} {x + 1},{y + 9}"
            parts.append(f'<polygon points="{corners}" fill="{COVERAGE}">{note}</polygon>')
        else:
            parts.append(f'<rect x="{x + 1.5}" y="{y + 1.5}" width="7" height="7" fill="{OTHER}">{note}</rect>')
    return "".join([*parts, "</svg>"])


def figure_html(drawings: Sequence[str], caption: str) -> str:
    """Drawings side by side over a caption."""
    inner = "".join(f'<div style="margin:4px">{drawing}</div>' for drawing in drawings)
    return (
        f'<figure style="margin:0"><div style="display:flex;flex-wrap:wrap">{inner}</div>'
        f'<figcaption style="font-size:90%">{html.escape(caption)}</figcaption></figure>'
    )
