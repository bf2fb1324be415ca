"""Products of many rows with a few: a question's rows with the tokens of an image.

A matrix product of this shape is bound by reading the tokens, and torch takes about as long for it. This one runs in
the calling thread for small images, so that several crops can have theirs beside each other, and in threads of its own
for large ones; and a token's products do not depend on its place or on the number of threads, which torch's do.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.kernels.compiled import Kernel, helpers, over_ranges

# Columns of four rows that stay in a core's first-level cache while all of the few rows pass by.
_COLUMNS = 1024
# Entries of the large factor from which on starting a thread pays.
_WORTH_SPLITTING = 1 << 23


@partial(Kernel, fastmath={"reassoc", "contract", "nsz"})
def _multiply(many, few, result, first, last):  # type: ignore[no-untyped-def]
    """Columns first to last, four or more, of few @ many.T; the number of few rows is a multiple of four.

    Four rows of either side at a time. A row's products are the same wherever it stands: what is left at the end is
    done as four rows that overlap the ones before.
    """
    width = many.shape[1]
    for block in range(first, last, 4):
        j = min(block, last - 4)
        for i in range(few.shape[0]):
            result[i, j : j + 4] = 0
        for start in range(0, width, _COLUMNS):
            stop = min(start + _COLUMNS, width)
            x0, x1, x2, x3 = (
                many[j, start:stop],
                many[j + 1, start:stop],
                many[j + 2, start:stop],
                many[j + 3, start:stop],
            )
            for i in range(0, few.shape[0], 4):
                y0, y1, y2, y3 = (
                    few[i, start:stop],
                    few[i + 1, start:stop],
                    few[i + 2, start:stop],
                    few[i + 3, start:stop],
                )
                zero = many.dtype.type(0)
                s00, s01, s02, s03 = zero, zero, zero, zero
                s10, s11, s12, s13 = zero, zero, zero, zero
                s20, s21, s22, s23 = zero, zero, zero, zero
                s30, s31, s32, s33 = zero, zero, zero, zero
                for p in range(stop - start):
                    s00 += x0[p] * y0[p]
                    s01 += x0[p] * y1[p]
                    s02 += x0[p] * y2[p]
                    s03 += x0[p] * y3[p]
                    s10 += x1[p] * y0[p]
                    s11 += x1[p] * y1[p]
                    s12 += x1[p] * y2[p]
                    s13 += x1[p] * y3[p]
                    s20 += x2[p] * y0[p]
                    s21 += x2[p] * y1[p]
                    s22 += x2[p] * y2[p]
                    s23 += x2[p] * y3[p]
                    s30 += x3[p] * y0[p]
                    s31 += x3[p] * y1[p]
                    s32 += x3[p] * y2[p]
                    s33 += x3[p] * y3[p]
                result[i, j] += s00
                result[i + 1, j] += s01
                result[i + 2, j] += s02
                result[i + 3, j] += s03
                result[i, j + 1] += s10
                result[i + 1, j + 1] += s11
                result[i + 2, j + 1] += s12
                result[i + 3, j + 1] += s13
                result[i, j + 2] += s20
                result[i + 1, j + 2] += s21
                result[i + 2, j + 2] += s22
                result[i + 3, j + 2] += s23
                result[i, j + 3] += s30
                result[i + 1, j + 3] += s31
                result[i + 2, j + 3] += s32
                result[i + 3, j + 3] += s33


def products(many: NDArray[np.floating], few: NDArray[np.floating]) -> NDArray[np.floating]:
    """``few @ many.T``, (m, n), in the precision of the factors.

    Parameters
    ----------
    many, few
        (n, d) and (m, d), in C order, both float32 or both float64.
    """
    (n, width), m = many.shape, len(few)
    if n < 4:
        many = np.concatenate([many, np.zeros((4 - n, width), dtype=many.dtype)])
    padded = np.zeros((-(-m // 4) * 4, width), dtype=few.dtype)
    padded[:m] = few
    result = np.empty((len(padded), len(many)), dtype=many.dtype)
    if many.size < _WORTH_SPLITTING or n < 8 * torch.get_num_threads():
        _multiply(many, padded, result, 0, len(many))
    else:
        with helpers() as pool:
            over_ranges(pool, len(many), _multiply, many, padded, result)
    return np.ascontiguousarray(result[:m, :n])
