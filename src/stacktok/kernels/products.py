"""Products of many rows with a few: a question's rows with the tokens of an image.

For this shape a general matrix product takes about twice as long per core; and here a token's products do not depend on
its place or on the number of threads.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.kernels.compiled import Kernel
from stacktok.kernels.threads import over_ranges

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
def _squares(rows, sums):  # type: ignore[no-untyped-def]
    for i in range(rows.shape[0]):
        total = rows.dtype.type(0)
        for j in range(rows.shape[1]):
            total += rows[i, j] * rows[i, j]
        sums[i] = total


def few_row_norms(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    """Euclidean norm of every row of a small matrix, (m,), in the calling thread; not finite where squares overflow."""
    sums = np.empty(len(rows), dtype=rows.dtype)
    _squares(rows, sums)
    return np.sqrt(sums)


def products(many: NDArray[np.floating], few: NDArray[np.floating]) -> NDArray[np.floating]:
    """``few @ many.T``, (m, n), in the precision of the factors.

    Parameters
    ----------
    many, few
        (n, d) and (m, d), in C order, both float32 or both float64.
    """
    n, m = len(many), len(few)
    many, few = _padded(many, max(n, 4)), _padded(few, -(-m // 3) * 3)
    result = np.empty((len(few), len(many)), dtype=many.dtype)
    if many.size < _WORTH_SPLITTING or n < 8 * torch.get_num_threads():
        _multiply(many, few, result, 0, len(many))
    else:
        over_ranges(len(many), _multiply, many, few, result)
    return np.ascontiguousarray(result[:m, :n])


def _padded(rows: NDArray[np.floating], count: int) -> NDArray[np.floating]:
    """The rows, and rows of zeros up to a count."""
    missing = count - len(rows)
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), dtype=rows.dtype)]) if missing else rows
