"""Greedy max-min diversity (DivPrune), one program per set of tokens.

State, in global memory: ``nearest``, (n,), each token's distance to the nearest pick; before the first pick, to the
nearest other candidate. Tokens that are picked or may not be hold minus infinity in ``score``, which is ``nearest``
otherwise.

Invariant: the pick is the lowest index of the largest score. Numbers are compared and never added, so that every
backend returns the same picks. A distance that is not a number counts as 0, so that every pick is a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stacktok.kernels.transfer import upload
from stacktok.kernels.triton.launch import BLOCK, OPTIONS, check_device

MAX_MIN_FIELDS = tl.constexpr(6)
"""Integers per set, in the order in which the kernel loads them."""


@triton.jit
def max_min(sets, nearest, is_open, order, BLOCK: tl.constexpr):
    """Pick every set's tokens; see `stacktok.kernels.triton.pick_max_min`."""
    row = sets + tl.program_id(0) * MAX_MIN_FIELDS
    distance = tl.load(row).to(tl.pointer_type(tl.float32))
    candidates = tl.load(row + 1).to(tl.pointer_type(tl.int8))
    n, k = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    nearest += tl.load(row + 4)
    is_open += tl.load(row + 4)
    order += tl.load(row + 5)

    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(is_open + i, tl.load(candidates + i, mask=i < n, other=0), mask=i < n)
        # Distances are the same both ways, so that columns can be read along rows.
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        for j in range(n):
            if tl.load(candidates + j) != 0:
                d = tl.load(distance + j * n + i, mask=i < n, other=float("inf"))
                least = tl.where((i != j) & (d < least), d, least)
        tl.store(nearest + i, least, mask=i < n)
    tl.debug_barrier()
    for step in range(k):
        token, farthest = tl.full((), -1, tl.int32), tl.full((), float("-inf"), tl.float32)
        for first in range(0, n, BLOCK):
            i = first + tl.arange(0, BLOCK)
            open_ = tl.load(is_open + i, mask=i < n, other=0) != 0
            score = tl.where(open_, tl.load(nearest + i, mask=i < n, other=0.0), float("-inf"))
            value, at = tl.max(score, 0, return_indices=True)
            token = tl.where(value > farthest, first + at, token)
            farthest = tl.maximum(farthest, value)
        tl.debug_barrier()
        tl.store(order + step, token.to(tl.int64))
        tl.store(is_open + token, tl.full((), 0, tl.int8))
        for first in range(0, n, BLOCK):
            i = first + tl.arange(0, BLOCK)
            d = tl.load(distance + token * n + i, mask=i < n, other=0.0)
            d = tl.where(d == d, d, 0.0)
            old = tl.load(nearest + i, mask=i < n, other=0.0)
            tl.store(nearest + i, tl.where((step == 0) | (d < old), d, old), mask=i < n)
        tl.debug_barrier()


def pick_max_min(
    distances: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Greedy max-min orders of several sets in one launch; see `stacktok.kernels.diversity.max_min`.

    Parameters
    ----------
    distances
        Pairwise distances, (n, n), float32, the same both ways.
    candidates
        Which tokens may be picked, (n,), bool.
    sizes
        Number of picks, at most the number of candidates.
    """
    device = distances[0].device
    check_device(device)
    matrices = [matrix.contiguous() for matrix in distances]
    masks = [mask.to(torch.int8) for mask in candidates]
    table, begin, first = [], 0, 0
    for matrix, mask, k in zip(matrices, masks, sizes, strict=True):
        table.append([matrix.data_ptr(), mask.data_ptr(), len(matrix), k, begin, first])
        begin += len(matrix)
        first += k
    order = torch.empty(first, dtype=torch.int64, device=device)
    max_min[(len(matrices),)](
        upload(table, device, torch.int64),
        torch.empty(begin, dtype=torch.float32, device=device),
        torch.empty(begin, dtype=torch.int8, device=device),
        order,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return list(order.split(list(sizes)))
