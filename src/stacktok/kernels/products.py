"""Products of many rows with a few: a question's rows with the tokens of an image.

For this shape a general matrix product takes about twice as long per core; and here a token's products do not depend on
its place or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.kernels.compiled import Kernel
from stacktok.kernels.threads import beside, ranges

# Columns of four rows that stay in a core's first-level cache while all of the few rows pass by.
_COLUMNS = 1024
# Entries of the large factor from which on starting a thread pays.
_WORTH_SPLITTING = 1 << 20


@partial(Kernel, fastmath={"reassoc", "contract", "nsz"})
def _multiply(many, few, result, first, last):  # type: ignore[no-untyped-def]
    """Columns first to last, four or more, of few @ many.T; the number of few rows is a multiple of three.

    Four rows by three at a time, whose twelve sums leave a core without AVX-512 four registers for what it reads. A
    row's products are the same wherever it stands: what is left at the end is done as four rows that overlap the ones
    before.
    """
    width = many.shape[1]
    for block in range(first, last, 4):
        j = min(block, last - 4)
        for i in range(few.shape[0]):
            result[i, j : j + 4] = 0
        for start in range(0, width, _COLUMNS):
            stop = min(start + _COLUMNS, width)
            x0, x1 = many[j, start:stop], many[j + 1, start:stop]
            x2, x3 = many[j + 2, start:stop], many[j + 3, start:stop]
            for i in range(0, few.shape[0], 3):
                y0, y1, y2 = few[i, start:stop], few[i + 1, start:stop], few[i + 2, start:stop]
                zero = many.dtype.type(0)
                s00, s01, s02 = zero, zero, zero
                s10, s11, s12 = zero, zero, zero
                s20, s21, s22 = zero, zero, zero
                s30, s31, s32 = zero, zero, zero
                for p in range(stop - start):
                    s00 += x0[p] * y0[p]
                    s01 += x0[p] * y1[p]
                    s02 += x0[p] * y2[p]
                    s10 += x1[p] * y0[p]
                    s11 += x1[p] * y1[p]
                    s12 += x1[p] * y2[p]
                    s20 += x2[p] * y0[p]
                    s21 += x2[p] * y1[p]
                    s22 += x2[p] * y2[p]
                    s30 += x3[p] * y0[p]
                    s31 += x3[p] * y1[p]
                    s32 += x3[p] * y2[p]
                result[i, j] += s00
                result[i + 1, j] += s01
                result[i + 2, j] += s02
                result[i, j + 1] += s10
                result[i + 1, j + 1] += s11
                result[i + 2, j + 1] += s12
                result[i, j + 2] += s20
                result[i + 1, j + 2] += s21
                result[i + 2, j + 2] += s22
                result[i, j + 3] += s30
                result[i + 1, j + 3] += s31
                result[i + 2, j + 3] += s32


@partial(Kernel, fastmath={"reassoc", "contract", "nsz"})
def _normalise(rows, floor, norms, unit):  # type: ignore[no-untyped-def]
    for i in range(rows.shape[0]):
        squares = rows.dtype.type(0)
        for j in range(rows.shape[1]):
            squares += rows[i, j] * rows[i, j]
        norms[i] = np.sqrt(squares)
        length = max(norms[i], floor)
        for j in range(rows.shape[1]):
            unit[i, j] = rows[i, j] / length


def unit_rows(rows: NDArray[np.floating], floor: float) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """A few rows, (m, d), divided by their norms, and the norms, (m,), which are not finite where squares overflow.

    Parameters
    ----------
    rows
        In C order.
    floor
        Lower bound of what is divided by.
    """
    norms, unit = np.empty(len(rows), dtype=rows.dtype), np.empty_like(rows)
    _normalise(rows, rows.dtype.type(floor), norms, unit)
    return unit, norms


def products(many: Sequence[NDArray[np.floating]], few: NDArray[np.floating]) -> list[NDArray[np.floating]]:
    """``few @ many[c].T``, (m, n_c), for every c, in the precision of the factors.

    Parameters
    ----------
    many, few
        (n_c, d) each and (m, d), in C order, all float32 or all float64.
    """
    m = len(few)
    few = _padded(few, -(-m // 3) * 3)
    tokens = [_padded(rows, max(len(rows), 4)) for rows in many]
    results = [np.empty((len(few), len(rows)), dtype=rows.dtype) for rows in tokens]
    tasks = [
        partial(_multiply, rows, few, result, *ends)
        for rows, result in zip(tokens, results, strict=True)
        for ends in _parts(*rows.shape)
    ]
    beside(tasks)
    return [np.ascontiguousarray(result[:m, : len(rows)]) for rows, result in zip(many, results, strict=True)]


def _parts(n: int, width: int) -> list[tuple[int, int]]:
    """Ranges of n rows that are worth a thread's while, four or more rows each."""
    workers = torch.get_num_threads()
    if n * width < _WORTH_SPLITTING or n < 8 * workers:
        return [(0, n)]
    return ranges(n, workers)


def _padded(rows: NDArray[np.floating], count: int) -> NDArray[np.floating]:
    """The rows, and rows of zeros up to a count."""
    missing = count - len(rows)
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), dtype=rows.dtype)]) if missing else rows
