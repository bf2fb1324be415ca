"""The retained set of every image or crop, refined by swaps, Eq. (swap): one program per unit.

State, in global memory:

- ``kept``, (r,): the retained tokens; one that is swapped in takes the place of the one that goes.
- ``scan``, (r,): the retained tokens in ascending order at the beginning of a pass.
- ``mask``, (n,): which tokens are retained, the result.

Invariants:

1. ``covered`` and ``relevant`` are n C and m R of the retained set.
2. For each token of ``scan`` the rows' thresholds are recomputed without it, then what every other token would add
   above them. Sets are small, at most the swap limit, so that this costs one look at the matrix per token.
3. On the grid these sums are exact, so both conditions and the best replacement are those of every other backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stacktok.kernels.transfer import upload
from stacktok.kernels.triton.facility_location import State
from stacktok.kernels.triton.launch import BLOCK, ENTRIES, OPTIONS, ROWS, entry_type

SWAP_FIELDS = tl.constexpr(15)
"""Integers per unit, in the order in which the kernel loads them."""


@triton.jit
def _fill_top(matrix, rows, n, kept, r, left_out, places, top, BLOCK: tl.constexpr):
    """The ``places`` largest affinities of every row over the retained tokens but one, in falling order; their sum."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        for place in range(places):
            tl.store(top + place * rows + i, tl.zeros((BLOCK,), tl.float64), mask=i < rows)
        for at in range(r):
            token = tl.load(kept + at)
            column = tl.load(matrix + i * n + token, mask=i < rows, other=0.0)
            rest = tl.where(token == left_out, 0.0, column.to(tl.float64))
            for place in range(places):
                value = tl.load(top + place * rows + i, mask=i < rows, other=0.0)
                tl.store(top + place * rows + i, tl.maximum(value, rest), mask=i < rows)
                rest = tl.minimum(value, rest)
        for place in range(places):
            total += tl.sum(tl.load(top + place * rows + i, mask=i < rows, other=0.0), 0)
    tl.debug_barrier()
    return total


@triton.jit
def _fill_gains(matrix, rows, n, thresholds, gains, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The gain of every token over the rows' thresholds."""
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        gain = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, rows, ROWS):
            i = start + tl.arange(0, ROWS)
            low = tl.load(thresholds + i, mask=i < rows, other=0.0)[:, None]
            inside = (i < rows)[:, None] & (j < n)[None, :]
            a = tl.load(matrix + i[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float64)
            gain += tl.sum(tl.where(a > low, a - low, 0.0), 0)
        tl.store(gains + j, gain, mask=j < n)
    tl.debug_barrier()


@triton.jit
def _ascending(source, r, n, result, BLOCK: tl.constexpr):
    """Sort distinct tokens: the place of one is the number of smaller ones."""
    for at in range(r):
        token = tl.load(source + at)
        place = tl.full((), 0, tl.int32)
        for first in range(0, r, BLOCK):
            q = first + tl.arange(0, BLOCK)
            place += tl.sum((tl.load(source + q, mask=q < r, other=n) < token).to(tl.int32), 0)
        tl.store(result + place, token)
    tl.debug_barrier()


@triton.jit
def swaps(
    units, epsilons, masks, tokens, numbers, counts, exchanges, objectives, finals,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Refine every unit's retained set; see `stacktok.kernels.triton.refine`."""
    unit = tl.program_id(0)
    row = units + unit * SWAP_FIELDS
    vision = tl.load(row).to(tl.pointer_type(ENTRY))
    query = tl.load(row + 1).to(tl.pointer_type(ENTRY))
    eligible = tl.load(row + 2).to(tl.pointer_type(tl.int8))
    order = tl.load(row + 3).to(tl.pointer_type(tl.int64))
    targets = tl.load(row + 4).to(tl.pointer_type(tl.float64))
    r = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.int64))).to(tl.int32)
    n, m = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    depth, limit = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
    passes, capacity = tl.load(row + 10).to(tl.int32), tl.load(row + 11).to(tl.int32)
    mask = masks + tl.load(row + 12)
    kept = tokens + tl.load(row + 13)
    scan = kept + limit
    coverage_gains = numbers + tl.load(row + 14)
    relevance_gains, vision_top = coverage_gains + n, coverage_gains + 2 * n
    query_top = vision_top + n
    exchanges += unit * 2 * limit * passes
    objectives += unit * 2 * limit * passes
    epsilon = tl.load(epsilons + unit)
    query_rows, vision_rows = tl.maximum(m, 1).to(tl.float64), n.to(tl.float64)

    for first in range(0, r, BLOCK):
        q = first + tl.arange(0, BLOCK)
        token = tl.load(order + q, mask=q < r, other=0)
        tl.store(mask + token, tl.full((BLOCK,), 1, tl.int8), mask=q < r)
        tl.store(kept + q, token.to(tl.int32), mask=(q < r) & (q < limit))
    tl.debug_barrier()
    # Only small sets that leave something out are refined.
    todo = tl.where((r > 0) & (r <= limit) & (r < capacity), passes, 0)
    places = tl.where((depth == 0) | (depth > r), r, depth)
    found = tl.full((), 0, tl.int32)
    covered, relevant = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if todo > 0:
        covered = _fill_top(vision, n, n, kept, r, -1, 1, vision_top, BLOCK)
        relevant = _fill_top(query, m, n, kept, r, -1, places, query_top, BLOCK)
    while todo > 0:
        accepted = tl.full((), 0, tl.int32)
        _ascending(kept, r, n, scan, BLOCK)
        for at in range(r):
            out = tl.load(scan + at)
            before = relevant / query_rows + covered / vision_rows
            floor = tl.minimum(tl.load(targets + r), covered)
            coverage_left = _fill_top(vision, n, n, kept, r, out, 1, vision_top, BLOCK)
            relevance_left = _fill_top(query, m, n, kept, r, out, places, query_top, BLOCK)
            _fill_gains(vision, n, n, vision_top, coverage_gains, BLOCK, ROWS)
            _fill_gains(query, m, n, query_top + (places - 1) * m, relevance_gains, BLOCK, ROWS)
            into, highest = tl.full((), -1, tl.int32), tl.full((), float("-inf"), tl.float64)
            for first in range(0, n, BLOCK):
                j = first + tl.arange(0, BLOCK)
                coverage = coverage_left + tl.load(coverage_gains + j, mask=j < n, other=0.0)
                relevance = relevance_left + tl.load(relevance_gains + j, mask=j < n, other=0.0)
                after = relevance / query_rows + coverage / vision_rows
                open_ = tl.load(eligible + j, mask=j < n, other=0) > tl.load(mask + j, mask=j < n, other=0)
                allowed = open_ & (coverage >= floor) & (after > (1.0 + epsilon) * before)
                value, position = tl.max(tl.where(allowed, after, float("-inf")), 0, return_indices=True)
                into = tl.where(value > highest, first + position, into)
                highest = tl.maximum(highest, value)
            # All threads have read mask and sums before they change.
            tl.debug_barrier()
            if into >= 0:
                accepted += 1
                covered = coverage_left + tl.load(coverage_gains + into)
                relevant = relevance_left + tl.load(relevance_gains + into)
                tl.store(exchanges + 2 * found, out)
                tl.store(exchanges + 2 * found + 1, into)
                tl.store(objectives + 2 * found, before)
                tl.store(objectives + 2 * found + 1, highest)
                found += 1
                tl.store(mask + out, tl.full((), 0, tl.int8))
                tl.store(mask + into, tl.full((), 1, tl.int8))
                for first in range(0, r, BLOCK):
                    q = first + tl.arange(0, BLOCK)
                    token = tl.load(kept + q, mask=q < r, other=-1)
                    tl.store(kept + q, into, mask=(q < r) & (token == out))
                tl.debug_barrier()
        todo = tl.where(accepted > 0, todo - 1, 0)
    tl.store(counts + unit, found)
    tl.store(finals + 2 * unit, relevant)
    tl.store(finals + 2 * unit + 1, covered)


class Retained(NamedTuple):
    """A set that is to be refined by swaps, or only to be marked.

    Attributes
    ----------
    state, query_affinity
        As in `Problem`.
    order
        Picks of the unit's run, (k,).
    size
        How many of them are retained, (1,), int64: a tensor, since a merge of crops decides it on the device.
    targets
        n theta_t for t = 0..k, (k + 1,).
    depth
        As in `Problem`.
    capacity
        Positions that may be kept.
    """

    state: State
    query_affinity: torch.Tensor
    order: torch.Tensor
    size: torch.Tensor
    targets: torch.Tensor
    depth: int | None
    capacity: int


class Refined(NamedTuple):
    """A retained set after its swaps.

    Attributes
    ----------
    mask
        The retained tokens, (n,), bool.
    accepted
        Number of accepted swaps, (), int32.
    exchanges, objectives
        Token out and token in, and J before and after, (swaps, 2); only the first ``accepted`` rows mean something.
    finals
        m R and n C of the set, (2,); only where it was small enough to be refined.
    """

    mask: torch.Tensor
    accepted: torch.Tensor
    exchanges: torch.Tensor
    objectives: torch.Tensor
    finals: torch.Tensor


def refine(sets: Sequence[Retained], limit: int, epsilon: float, passes: int) -> list[Refined]:
    """Mark the retained tokens of all sets and refine the small ones, in one launch.

    Parameters
    ----------
    sets
        Of one device.
    limit
        Largest size that is refined; 0 for none.
    epsilon, passes
        As in `stacktok.kernels.cpu.refine`; the number of passes is finite.
    """
    device = sets[0].order.device
    limit = min(limit, max(len(one.order) for one in sets))
    kind = entry_type([matrix for one in sets for matrix in (one.state.matrix, one.query_affinity)])
    held: list[torch.Tensor] = []
    table: list[list[int]] = []
    lengths: list[int] = []
    numbers = 0
    for number, one in enumerate(sets):
        n, m = len(one.state.sums), len(one.query_affinity)
        depth = 0 if one.depth is None or one.depth > limit else int(one.depth)
        arrays = [one.state.matrix.to(kind), one.query_affinity.to(kind).contiguous(), one.state.eligible]
        arrays += [one.order, one.targets.contiguous(), one.size]
        held += arrays
        addresses = [array.data_ptr() for array in arrays]
        sizes = [n, m, depth, limit, passes, one.capacity]
        table.append([*addresses, *sizes, sum(lengths), number * 2 * limit, numbers])
        lengths.append(n)
        numbers += 3 * n + max(1, limit if depth == 0 else depth) * m
    most = max(1, limit * passes)
    masks = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
    counts = torch.zeros(len(sets), dtype=torch.int32, device=device)
    exchanges = torch.empty((len(sets), most, 2), dtype=torch.int32, device=device)
    objectives = torch.empty((len(sets), most, 2), dtype=torch.float64, device=device)
    finals = torch.empty((len(sets), 2), dtype=torch.float64, device=device)
    swaps[(len(sets),)](
        upload(table, device, torch.int64),
        upload([epsilon] * len(sets), device, torch.float64),
        masks.view(torch.int8),
        torch.empty(len(sets) * 2 * max(1, limit), dtype=torch.int32, device=device),
        torch.empty(numbers, dtype=torch.float64, device=device),
        counts,
        exchanges,
        objectives,
        finals,
        BLOCK=BLOCK,
        ROWS=ROWS,
        ENTRY=ENTRIES[kind],
        **OPTIONS,
    )
    return [Refined(*own) for own in zip(masks.split(lengths), counts, exchanges, objectives, finals, strict=True)]
