"""Greedy facility location: Algorithm 1 with its gate, fallback and fill, one program per image or crop.

State, in global memory, (n,) unless said otherwise:

- ``coverage_gains``, ``relevance_gains``: what each token would add to n C(S) and m R(S); minus infinity once it is
  kept, and where it may not be.
- ``coverage_top`` and ``relevance_top``, (depth, rows): the largest kept affinities of every row in falling order,
  0 where fewer are kept. The last of them is the row's threshold, which another token must exceed to add to the row.
  Depth 0 stands for no limit: one line that stays 0.
- ``synced``: the thresholds that the gains account for. Rows in which they lag behind are in the list ``stale``.

Invariants, before every step:

1. A gain is the sum over rows of [a - synced]_+. A pick raises few thresholds, and a row whose threshold rises from
   low to high takes clamp(a, low, high) - low from the gain of every token. Nothing else changes.
2. Query rows are synced after every pick; image rows only when coverage next scores a step, since the first picks
   raise nearly all rows and one update then serves many picks.
3. Affinities are multiples of a grid step on which float64 sums and differences are exact. Gains therefore depend on
   the kept set alone, not on the order of summation: every backend compares the same bits.
4. A gain that is not a number wins no comparison and is not minus infinity: whatever the affinities hold, a step picks
   a token that may still be kept, and nothing is written elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stacktok.kernels import Problem, Steps
from stacktok.kernels.transfer import upload
from stacktok.kernels.triton.launch import BLOCK, ENTRIES, OPTIONS, ROWS, best, check_device, entry_type

FIELDS = tl.constexpr(15)
"""Integers per unit, in the order in which the kernel loads them."""


@triton.jit
def _keep_token(matrix, rows, n, token, depth, top, synced, stale, count, BLOCK: tl.constexpr):
    """Put a token's column into the rows' largest; returns what the token added and the number of stale rows."""
    added = tl.full((), 0.0, tl.float64)
    threshold_of = top + tl.maximum(depth - 1, 0) * rows
    for first in range(0, rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < rows
        a = tl.load(matrix + i * n + token, mask=inside, other=0.0).to(tl.float64)
        threshold = tl.load(threshold_of + i, mask=inside, other=0.0)
        before = tl.load(synced + i, mask=inside, other=0.0)
        added += tl.sum(tl.where(a > threshold, a - threshold, 0.0), 0)
        # An insertion into a falling list: each place keeps the larger and hands the smaller on.
        rest, raised = a, threshold
        for place in range(depth):
            value = tl.load(top + place * rows + i, mask=inside, other=0.0)
            raised = tl.maximum(value, rest)
            tl.store(top + place * rows + i, raised, mask=inside)
            rest = tl.minimum(value, rest)
        fresh = (raised > threshold) & (threshold == before)
        tl.store(stale + count + tl.cumsum(fresh.to(tl.int32), 0) - 1, i, mask=fresh)
        count += tl.sum(fresh.to(tl.int32), 0)
    tl.debug_barrier()
    return added, count


@triton.jit
def _sync_gains(
    matrix, n, raised, synced, stale, count, gains, BLOCK: tl.constexpr, ROWS: tl.constexpr, ENTRY: tl.constexpr
):
    """Take from all gains what the stale rows no longer offer. Thresholds are entries or 0, which ENTRY holds."""
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        lost = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, ROWS):
            q = start + tl.arange(0, ROWS)
            i = tl.load(stale + q, mask=q < count, other=0)
            low = tl.load(synced + i, mask=q < count, other=0.0).to(ENTRY)[:, None]
            high = tl.load(raised + i, mask=q < count, other=0.0).to(ENTRY)[:, None]
            inside = (q < count)[:, None] & (j < n)[None, :]
            a = tl.load(matrix + i[:, None] * n + j[None, :], mask=inside, other=0.0)
            kept = tl.minimum(tl.maximum(a, low), high)
            lost += tl.sum(kept.to(tl.float64) - low.to(tl.float64), 0)
        gain = tl.load(gains + j, mask=j < n, other=0.0)
        tl.store(gains + j, gain - lost, mask=j < n)
    tl.debug_barrier()
    for start in range(0, count, BLOCK):
        q = start + tl.arange(0, BLOCK)
        i = tl.load(stale + q, mask=q < count, other=0)
        tl.store(synced + i, tl.load(raised + i, mask=q < count, other=0.0), mask=q < count)
    tl.debug_barrier()


@triton.jit
def _best_sum(relevance_gains, coverage_gains, weights, m, n, alpha, BLOCK: tl.constexpr):
    """Lowest index of the largest positive Delta_R + alpha Delta_C, -1 if there is none."""
    token = tl.full((), -1, tl.int32)
    highest = tl.full((), 0.0, tl.float64)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        relevance = tl.load(relevance_gains + j, mask=j < n, other=-1.0)
        coverage = tl.load(coverage_gains + j, mask=j < n, other=0.0)
        score = relevance / tl.maximum(m, 1).to(tl.float64) + alpha * (coverage / n.to(tl.float64))
        score = tl.where(relevance >= 0.0, score * tl.load(weights + j, mask=j < n, other=0.0), 0.0)
        value, at = tl.max(score, 0, return_indices=True)
        token = tl.where(value > highest, first + at, token)
        highest = tl.maximum(highest, value)
    return token


@triton.jit
def _first_open(gains, n, BLOCK: tl.constexpr):
    """Lowest index that may still be kept."""
    token = n.to(tl.int32)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        is_open = tl.load(gains + j, mask=j < n, other=float("-inf")) != float("-inf")
        token = tl.minimum(token, tl.min(tl.where(is_open, j, token), 0))
    return token


@triton.jit
def facility_location(
    units, alphas, state, lists, order, criterion, bound, relevance, coverage,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Run every unit's k steps; see `stacktok.kernels.triton.greedy`.

    Codes are those of `Rule` and `CRITERIA`: rules 0 gated, 1 relevance, 2 coverage, 3 scalarized; criteria
    0 relevance, 1 coverage, 2 scalarized, 3 fill.
    """
    unit = tl.program_id(0)
    row = units + unit * FIELDS
    vision = tl.load(row).to(tl.pointer_type(ENTRY))
    query = tl.load(row + 1).to(tl.pointer_type(ENTRY))
    sums = tl.load(row + 2).to(tl.pointer_type(tl.float64))
    eligible = tl.load(row + 3).to(tl.pointer_type(tl.int8))
    targets = tl.load(row + 4).to(tl.pointer_type(tl.float64))
    weights = tl.load(row + 5).to(tl.pointer_type(tl.float64))
    n, m, k = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32), tl.load(row + 8).to(tl.int32)
    rule, depth = tl.load(row + 9).to(tl.int32), tl.load(row + 10).to(tl.int32)
    alpha = tl.load(alphas + unit)
    coverage_gains = state + tl.load(row + 11)
    relevance_gains = coverage_gains + n
    coverage_top, synced = relevance_gains + n, relevance_gains + 2 * n
    relevance_top = synced + n
    query_synced = relevance_top + tl.maximum(depth, 1) * m
    stale = lists + tl.load(row + 12)
    query_stale = stale + n
    order += tl.load(row + 13)
    criterion += tl.load(row + 13)
    bound += tl.load(row + 13)
    relevance += tl.load(row + 14)
    coverage += tl.load(row + 14)

    # The empty set: gains are column sums, thresholds 0 (the state comes zeroed).
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, m, ROWS):
            i = start + tl.arange(0, ROWS)
            inside = (i < m)[:, None] & (j < n)[None, :]
            a = tl.load(query + i[:, None] * n + j[None, :], mask=inside, other=0.0)
            total += tl.sum(a.to(tl.float64), 0)
        may = tl.load(eligible + j, mask=j < n, other=0) != 0
        tl.store(relevance_gains + j, tl.where(may, total, float("-inf")), mask=j < n)
        column = tl.load(sums + j, mask=j < n, other=0.0)
        tl.store(coverage_gains + j, tl.where(may, column, float("-inf")), mask=j < n)
    tl.debug_barrier()

    relevant, covered = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    tl.store(relevance, relevant)
    tl.store(coverage, covered)
    stale_rows = tl.full((), 0, tl.int32)
    saturated = tl.full((), 0, tl.int32)
    for t in range(k):
        deficit = (tl.load(targets + t) > covered).to(tl.int32)
        token, by = tl.full((), -1, tl.int32), tl.full((), 3, tl.int32)
        # Gains only fall: relevance that gains nothing at one step gains nothing at any later one.
        if (saturated == 0) & ((rule == 1) | ((rule == 0) & (deficit == 0))):
            token = best(relevance_gains, weights, n, BLOCK)
            by = by * 0
            saturated = (token < 0).to(tl.int32)
        if (token < 0) & (rule != 1):
            _sync_gains(vision, n, coverage_top, synced, stale, stale_rows, coverage_gains, BLOCK, ROWS, ENTRY)
            stale_rows = stale_rows * 0
            if rule == 3:
                token = _best_sum(relevance_gains, coverage_gains, weights, m, n, alpha, BLOCK)
                by = by * 0 + 2
            else:
                token = best(coverage_gains, weights, n, BLOCK)
                by = by * 0 + 1
                if (token < 0) & (rule == 0) & (deficit == 1):
                    token = best(relevance_gains, weights, n, BLOCK)
                    by = by * 0
        if token < 0:
            token = _first_open(relevance_gains, n, BLOCK)
            by = by * 0 + 3
        # All threads have read the gains before one of them marks the token.
        tl.debug_barrier()
        added, stale_rows = _keep_token(vision, n, n, token, 1, coverage_top, synced, stale, stale_rows, BLOCK)
        covered += added
        added, changed = _keep_token(
            query, m, n, token, depth, relevance_top, query_synced, query_stale, tl.full((), 0, tl.int32), BLOCK
        )
        relevant += added
        _sync_gains(
            query, n, relevance_top + tl.maximum(depth - 1, 0) * m, query_synced, query_stale, changed, relevance_gains,
            BLOCK, ROWS, ENTRY,
        )  # fmt: skip
        tl.store(coverage_gains + token, float("-inf"))
        tl.store(relevance_gains + token, float("-inf"))
        tl.store(order + t, token.to(tl.int64))
        tl.store(criterion + t, by.to(tl.int64))
        tl.store(bound + t, (deficit * (rule == 0).to(tl.int32)).to(tl.int8))
        tl.store(relevance + t + 1, relevant)
        tl.store(coverage + t + 1, covered)
        tl.debug_barrier()


class State(NamedTuple):
    """Query-independent state of an image or crop, on its device.

    Attributes
    ----------
    matrix
        A^vv, (n, n).
    sums
        Its column sums, (n,), float64.
    eligible
        Positions that may be kept, (n,), int8.
    """

    matrix: torch.Tensor
    sums: torch.Tensor
    eligible: torch.Tensor


def precompute(vision_affinity: torch.Tensor, eligible: torch.Tensor) -> State:
    """Query-independent state from A^vv, (n, n), and the positions that may be kept, (n,), bool."""
    check_device(vision_affinity.device)
    sums = vision_affinity.sum(0, dtype=torch.float64)
    return State(vision_affinity.contiguous(), sums, eligible.to(torch.int8))


def greedy(problems: Sequence[Problem]) -> list[Steps]:
    """Run several greedy selections in one launch; the fields of the results are views of tensors on the device.

    Parameters
    ----------
    problems
        As in `stacktok.kernels.cpu.greedy`, with tensors of one device in place of arrays.
    """
    device = problems[0].state.matrix.device
    kind = entry_type([matrix for problem in problems for matrix in (problem.state.matrix, problem.query_affinity)])
    ones = torch.ones(max(len(problem.state.sums) for problem in problems), dtype=torch.float64, device=device)
    # Converted arrays live until the launch is queued; the allocator keeps their memory in order on the stream.
    held: list[torch.Tensor] = [ones]
    table, sizes = [], []
    state = lists = steps = curves = 0
    for problem in problems:
        n, m, k = len(problem.state.sums), len(problem.query_affinity), len(problem.targets)
        # A depth that no set reaches is an unlimited one.
        depth = 0 if problem.depth is None or problem.depth > k else int(problem.depth)
        weights = ones if problem.weights is None else problem.weights
        arrays = [
            problem.state.matrix.to(kind),
            problem.query_affinity.to(kind).contiguous(),
            problem.state.sums,
            problem.state.eligible,
            problem.targets.contiguous(),
            weights.contiguous(),
        ]
        held += arrays
        addresses = [array.data_ptr() for array in arrays]
        table.append([*addresses, n, m, k, int(problem.rule), depth, state, lists, steps, curves])
        sizes.append(k)
        state += 4 * n + (max(1, depth) + 1) * m
        lists += n + m
        steps += k
        curves += k + 1
    order, criterion = torch.empty((2, steps), dtype=torch.int64, device=device)
    bound = torch.empty(steps, dtype=torch.bool, device=device)
    relevance, coverage = torch.empty((2, curves), dtype=torch.float64, device=device)
    facility_location[(len(problems),)](
        upload(table, device, torch.int64),
        upload([problem.alpha for problem in problems], device, torch.float64),
        torch.zeros(state, dtype=torch.float64, device=device),
        torch.empty(lists, dtype=torch.int32, device=device),
        order,
        criterion,
        bound.view(torch.int8),
        relevance,
        coverage,
        BLOCK=BLOCK,
        ROWS=ROWS,
        ENTRY=ENTRIES[kind],
        **OPTIONS,
    )
    parts = [array.split(sizes) for array in (order, criterion, bound)]
    parts += [array.split([k + 1 for k in sizes]) for array in (relevance, coverage)]
    return [Steps(*own) for own in zip(*parts, strict=True)]
