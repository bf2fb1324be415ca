"""A grid of tokens cut into a given number of cells, as even as they can be."""

from __future__ import annotations

import numpy as np

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints


def cells(grid: tuple[int, int], eligible: Mask, k: int) -> list[Ints]:
    """Cut the eligible tokens into ``k`` cells that are not empty.

    The rectangle of eligible tokens is cut into bands of rows, each band into columns; the number of bands follows the
    rectangle's shape, so that cells are about square. Eligible tokens that form no rectangle are cut as one line.

    Parameters
    ----------
    grid
        Rows and columns.
    eligible
        Which tokens take part, (rows columns,).
    k
        Number of cells, at most the number of eligible tokens.

    Returns
    -------
    list
        Tokens of each cell in raster order; the cells themselves go in raster order of their bands.
    """
    mask = eligible.reshape(grid)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    tokens = np.arange(eligible.size, dtype=np.int64).reshape(grid)[np.ix_(rows, columns)]
    if tokens.size != int(eligible.sum()):
        return [np.sort(part) for part in _parts(np.flatnonzero(eligible), k)]
    height, width = tokens.shape
    bands = min(max(round((k * height / width) ** 0.5), 1), height, k)
    # Every band needs room for its share of the cells.
    bands = max(bands, -(-k // width))
    shares = np.diff(np.arange(bands + 1) * k // bands)
    return [
        np.sort(part.reshape(-1))
        for band, share in zip(_parts(tokens, bands), shares.tolist(), strict=True)
        for part in (np.ascontiguousarray(cell.T) for cell in _parts(band.T, share))
    ]


def centre(cell: Ints, grid: tuple[int, int]) -> int:
    """The token of a cell that lies nearest to its middle, ties to the lowest index."""
    rows, columns = np.divmod(cell, grid[1])
    distance = (rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2
    return int(cell[int(distance.argmin())])


def _parts(values: Ints, count: int) -> list[Ints]:
    """Cut along the first axis into parts whose lengths differ by at most one."""
    bounds = np.arange(count + 1) * len(values) // count
    return [values[bounds[i] : bounds[i + 1]] for i in range(count)]
