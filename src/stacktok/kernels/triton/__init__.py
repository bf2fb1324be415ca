"""Kernels for GPUs, in Triton: all images and crops of a batch in one launch, results that stay on the device.

The functions are those of `stacktok.kernels.cpu`, on tensors of one device; on the same affinities they return the same
bits. With ``TRITON_INTERPRET=1`` in the environment Triton runs them on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from stacktok.kernels import Problem, Steps
from stacktok.kernels.triton.determinantal import determinantal
from stacktok.kernels.triton.facility_location import facility_location
from stacktok.kernels.triton.launch import BLOCK, OPTIONS, ROWS, check_device, upload
from stacktok.kernels.triton.max_min import max_min
from stacktok.kernels.triton.merge import merge
from stacktok.kernels.triton.swaps import swaps

_ENTRY = {torch.float32: tl.float32, torch.float64: tl.float64}


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
    kind = _kind([matrix for problem in problems for matrix in (problem.state.matrix, problem.query_affinity)])
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
        upload(table, torch.int64, device),
        upload([problem.alpha for problem in problems], torch.float64, device),
        torch.zeros(state, dtype=torch.float64, device=device),
        torch.empty(lists, dtype=torch.int32, device=device),
        order,
        criterion,
        bound.view(torch.int8),
        relevance,
        coverage,
        BLOCK=BLOCK,
        ROWS=ROWS,
        ENTRY=_ENTRY[kind],
        **OPTIONS,
    )
    parts = [array.split(sizes) for array in (order, criterion, bound)]
    parts += [array.split([k + 1 for k in sizes]) for array in (relevance, coverage)]
    return [Steps(*own) for own in zip(*parts, strict=True)]


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
    kind = _kind([matrix for one in sets for matrix in (one.state.matrix, one.query_affinity)])
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
        upload(table, torch.int64, device),
        upload([epsilon] * len(sets), torch.float64, device),
        masks.view(torch.int8),
        torch.empty(len(sets) * 2 * max(1, limit), dtype=torch.int32, device=device),
        torch.empty(numbers, dtype=torch.float64, device=device),
        counts,
        exchanges,
        objectives,
        finals,
        BLOCK=BLOCK,
        ROWS=ROWS,
        ENTRY=_ENTRY[kind],
        **OPTIONS,
    )
    return [Refined(*own) for own in zip(masks.split(lengths), counts, exchanges, objectives, finals, strict=True)]


class Runs(NamedTuple):
    """The runs of the crops of one image.

    Attributes
    ----------
    steps
        One per crop, each as far as the crop may get.
    rows
        Query rows m and tokens n of every crop.
    budget
        Tokens to share, at most the number of all steps.
    """

    steps: Sequence[Steps]
    rows: Sequence[tuple[int, int]]
    budget: int


def allocate(images: Sequence[Runs]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Algorithm 2 for every image in one launch: the winner of each step, (budget,), and the crops' sizes, (L,)."""
    device = images[0].steps[0].coverage.device
    table, crops, first, begin = [], [], 0, 0
    for image in images:
        table.append([first, len(image.steps), image.budget, begin])
        for steps, (m, n) in zip(image.steps, image.rows, strict=True):
            crops.append([steps.relevance.data_ptr(), steps.coverage.data_ptr(), m, n, len(steps.order)])
        first += len(image.steps)
        begin += image.budget
    winners = torch.empty(begin, dtype=torch.int64, device=device)
    sizes = torch.empty(first, dtype=torch.int64, device=device)
    block = 1 << max(len(image.steps) for image in images).bit_length()
    merge[(len(images),)](
        upload(table, torch.int64, device), upload(crops, torch.int64, device), winners, sizes, CROPS=block,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    budgets, counts = [image.budget for image in images], [len(image.steps) for image in images]
    return list(zip(winners.split(budgets), sizes.split(counts), strict=True))


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
        upload(table, torch.int64, device),
        torch.empty(begin, dtype=torch.float32, device=device),
        torch.empty(begin, dtype=torch.int8, device=device),
        order,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return list(order.split(list(sizes)))


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
        upload(table, torch.int64, device),
        torch.empty(begin, dtype=torch.float64, device=device),
        torch.empty(begin, dtype=torch.int8, device=device),
        torch.zeros(rows, dtype=torch.float64, device=device),
        order,
        ZERO=zero,
        BLOCK=BLOCK,
        **OPTIONS,
    )
    return list(order.split(list(sizes)))


def _kind(matrices: Sequence[torch.Tensor]) -> torch.dtype:
    """One type of entries for a launch."""
    return torch.float64 if any(matrix.dtype == torch.float64 for matrix in matrices) else torch.float32


__all__ = [
    "Refined",
    "Retained",
    "Runs",
    "State",
    "allocate",
    "greedy",
    "pick_determinantal",
    "pick_max_min",
    "precompute",
    "refine",
]
