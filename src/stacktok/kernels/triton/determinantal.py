"""Greedy maximum a posteriori set of a determinantal point process (CDPruner), one program per set of tokens.

The kernel of the process is w_i s_ij w_j, from similarities s and weights w; its entries are made as they are needed.

State, in global memory:

- ``factors``, (n,): what each token would multiply the determinant by.
- ``rows``, (k, n): the rows of the incremental Cholesky factor, one per pick.

Invariants: after t picks, factor j is kernel_jj less the squares of column j of the rows. A factor below `ZERO` of the
token's own entry is rounding of 0, since the picks already span the token; where only such are left, the lowest index
fills the set and its row stays 0. Rows are taken away one after the other and products are not fused with differences,
so that float64 rounds as on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stacktok.kernels.transfer import upload
from stacktok.kernels.triton.launch import BLOCK, OPTIONS, check_device

DETERMINANTAL_FIELDS = tl.constexpr(8)
"""Integers per set, in the order in which the kernel loads them."""


@triton.jit
def determinantal(sets, factors, is_open, rows, order, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    """Pick every set's tokens; see `stacktok.kernels.triton.pick_determinantal`."""
    row = sets + tl.program_id(0) * DETERMINANTAL_FIELDS
    similarity = tl.load(row).to(tl.pointer_type(tl.float32))
    weights = tl.load(row + 1).to(tl.pointer_type(tl.float64))
    candidates = tl.load(row + 2).to(tl.pointer_type(tl.int8))
    n, k = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    factors += tl.load(row + 5)
    is_open += tl.load(row + 5)
    rows += tl.load(row + 6)
    order += tl.load(row + 7)

    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        w = tl.load(weights + j, mask=j < n, other=0.0)
        own = tl.load(similarity + j * (n + 1), mask=j < n, other=0.0).to(tl.float64)
        tl.store(factors + j, w * own * w, mask=j < n)
        tl.store(is_open + j, tl.load(candidates + j, mask=j < n, other=0), mask=j < n)
    tl.debug_barrier()
    for step in range(k):
        token, largest = tl.full((), -1, tl.int32), tl.full((), -1.0, tl.float64)
        for first in range(0, n, BLOCK):
            j = first + tl.arange(0, BLOCK)
            w = tl.load(weights + j, mask=j < n, other=0.0)
            own = tl.load(similarity + j * (n + 1), mask=j < n, other=0.0).to(tl.float64)
            factor = tl.load(factors + j, mask=j < n, other=0.0)
            gain = tl.where(factor > ZERO * (w * own * w), factor, 0.0)
            gain = tl.where(tl.load(is_open + j, mask=j < n, other=0) != 0, gain, -1.0)
            value, at = tl.max(gain, 0, return_indices=True)
            token = tl.where(value > largest, first + at, token)
            largest = tl.maximum(largest, value)
        tl.debug_barrier()
        tl.store(order + step, token.to(tl.int64))
        tl.store(is_open + token, tl.full((), 0, tl.int8))
        if largest > 0.0:
            root = tl.sqrt(largest)
            weight = tl.load(weights + token)
            for first in range(0, n, BLOCK):
                j = first + tl.arange(0, BLOCK)
                s = tl.load(similarity + token * n + j, mask=j < n, other=0.0).to(tl.float64)
                new = weight * s * tl.load(weights + j, mask=j < n, other=0.0)
                for earlier in range(step):
                    line = rows + earlier * n
                    new -= tl.load(line + token) * tl.load(line + j, mask=j < n, other=0.0)
                new = new / root
                tl.store(rows + step * n + j, new, mask=j < n)
                tl.store(factors + j, tl.load(factors + j, mask=j < n, other=0.0) - new * new, mask=j < n)
        tl.debug_barrier()


def pick_determinantal(
    similarities: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    candidates: Sequence[torch.Tensor],
    sizes: Sequence[int],
    zero: float,
) -> list[torch.Tensor]:
    """Greedy orders of several determinantal point processes in one launch.

    Parameters
    ----------
    similarities
        (n, n), float32.
    weights
        Factors of rows and columns, (n,), float64.
    candidates, sizes
        As in `pick_max_min`.
    zero
        Share of a token's own entry below which its factor is 0.
    """
    device = similarities[0].device
    check_device(device)
    matrices, factors = [one.contiguous() for one in similarities], [one.contiguous() for one in weights]
    masks = [mask.to(torch.int8) for mask in candidates]
    table, begin, rows, first = [], 0, 0, 0
    for matrix, weight, mask, k in zip(matrices, factors, masks, sizes, strict=True):
        n = len(matrix)
        table.append([matrix.data_ptr(), weight.data_ptr(), mask.data_ptr(), n, k, begin, rows, first])
        begin += n
        rows += k * n
        first += k
    order = torch.empty(first, dtype=torch.int64, device=device)
    determinantal[(len(matrices),)](
        upload(table, device, torch.int64),
        torch.empty(begin, dtype=torch.float64, device=device),
        torch.empty(begin, dtype=torch.int8, device=device),
        torch.zeros(rows, dtype=torch.float64, device=device),
        order,
        ZERO=zero,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return list(order.split(list(sizes)))
