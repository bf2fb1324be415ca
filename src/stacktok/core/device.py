"""The `triton` backend as the core sees it: affinities and results are tensors on one device.

`precompute`, `greedy` and `refine` are the backend's; `keep` decides an image without a look at the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from stacktok.core.affinity import Affinity, QueryAffinity
from stacktok.core.crops import apportion
from stacktok.core.greedy import CoverageReference, GreedyRun
from stacktok.core.inputs import Mask
from stacktok.core.parameters import Parameters
from stacktok.core.reference import allocate as allocate
from stacktok.core.tokens import ImageLayout
from stacktok.kernels import Ints, Problem, Steps, Swap, triton


def precompute(vision_affinity: Affinity, eligible: Mask) -> triton.State:
    """Query-independent state from A^vv, (n, n), and the positions that may be kept, (n,)."""
    matrix = torch.as_tensor(vision_affinity)
    return triton.precompute(matrix, torch.from_numpy(eligible).to(matrix.device))


def greedy(problems: Sequence[Problem]) -> list[Steps]:
    """Algorithm 1 on every problem, in one launch; nothing waits for it."""
    return triton.greedy([_on_device(problem) for problem in problems])


def refine(
    vision_affinity: Affinity,
    query_affinity: QueryAffinity,
    kept: Ints,
    eligible: Mask,
    depth: int | None,
    target: float,
    epsilon: float,
    passes: int | None,
) -> tuple[Ints, list[Swap]]:
    """Swap refinement, Eq. (swap); parameters and result as in `stacktok.kernels.cpu.refine`."""
    state, swaps = precompute(vision_affinity, eligible), []
    device, size, capacity = state.matrix.device, len(kept), int(eligible.sum())
    query = torch.as_tensor(query_affinity).to(device)
    targets = torch.full((size + 1,), target, dtype=torch.float64, device=device)
    while passes is None or passes:
        order = torch.from_numpy(kept.astype(np.int64)).to(device)
        retained = triton.Retained(state, query, order, torch.tensor([size], device=device), targets, depth, capacity)
        # Unlimited passes are launched one by one, and each is waited for.
        (found,) = triton.refine([retained], size, epsilon, 1 if passes is None else passes)
        swaps += read_swaps(found)
        kept = np.flatnonzero(found.mask.cpu().numpy())
        if passes is not None or not int(found.accepted):
            break
    return np.sort(kept), swaps


def keeps(units: Sequence[CoverageReference], parameters: Parameters) -> bool:
    """Whether `keep` can decide: not where quotas or unlimited swap passes need a look at the numbers in between."""
    finite = parameters.swap_passes is not None or not parameters.swap_limit or parameters.criterion != "gated"
    return finite and parameters.allocation != "proportional" and all(unit.backend == "triton" for unit in units)


def keep(
    units: Sequence[tuple[CoverageReference, QueryAffinity]], parameters: Parameters, budget: int
) -> list[torch.Tensor]:
    """Which tokens of every crop of an image are kept, (n_c,), bool, on their device; nothing waits for it.

    Parameters
    ----------
    units
        Crops, with the affinities of the question to each.
    parameters
        Checked parameters, of which `keeps` is true.
    budget
        Tokens to keep over all crops, at most as many as are eligible.
    """
    capacities = [unit.capacity for unit, _ in units]
    horizons = [min(budget, capacity) for capacity in capacities]
    lengths = horizons
    if parameters.allocation == "uniform":
        lengths = apportion(budget, [Fraction(1)] * len(units), capacities)
    runs = GreedyRun.run(units, parameters, budget, lengths, horizons)
    if len(units) == 1:
        sizes = torch.full((1,), budget, device=runs[0].steps.order.device)
    else:
        shapes = [(len(query), unit.n) for unit, query in units]
        ((_, sizes),) = triton.allocate([triton.Runs([run.steps for run in runs], shapes, budget)])
    sets = [
        triton.Retained(
            run.reference.state, run.query_affinity, run.steps.order, size, run.targets, run.depth, capacity
        )
        for run, size, capacity in zip(runs, sizes[:, None], capacities, strict=True)
    ]
    limit = parameters.swap_limit if parameters.criterion == "gated" else 0
    refined = triton.refine(sets, limit, parameters.swap_epsilon, parameters.swap_passes or 0)
    return [one.mask for one in refined]


def kept_offsets(layout: ImageLayout, masks: Sequence[torch.Tensor], budget: int) -> torch.Tensor:
    """Offsets of the kept tokens of all crops, ascending, (budget,), on their device."""
    device = masks[0].device
    # The last place takes the tokens that the model drops, which are never kept.
    fed = torch.zeros(layout.length + 1, dtype=torch.uint8, device=device)
    for crop, mask in zip(layout.crops, masks, strict=True):
        places = np.where(crop.offsets >= 0, crop.offsets, layout.length)
        fed.scatter_(0, torch.from_numpy(places).to(device), mask.to(torch.uint8))
    # A stable sort in place of a search for ones, whose number the host would wait for.
    return fed[:-1].sort(descending=True, stable=True).indices[:budget]


def read_swaps(refined: triton.Refined) -> list[Swap]:
    """The accepted swaps."""
    count = int(refined.accepted)
    pairs = zip(refined.exchanges[:count].tolist(), refined.objectives[:count].tolist(), strict=True)
    return [Swap(out, into, before, after) for (out, into), (before, after) in pairs]


def _on_device(problem: Problem) -> Problem:
    device = problem.state.matrix.device

    def tensor(values: Any) -> torch.Tensor:
        return torch.as_tensor(values).to(device, non_blocking=True)

    weights = None if problem.weights is None else tensor(problem.weights)
    return problem._replace(
        query_affinity=tensor(problem.query_affinity), targets=tensor(problem.targets), weights=weights
    )
