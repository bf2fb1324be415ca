"""The `triton` backend as the core sees it: affinities and results are tensors on one device.

`precompute`, `greedy` and `refine` are the backend's; `keep` decides a batch of images without a look at the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from stacktok.core.affinity import Affinity, QueryAffinity
from stacktok.core.crops import apportion
from stacktok.core.greedy import CoverageReference, GreedyRun
from stacktok.core.inputs import Mask
from stacktok.core.parameters import Parameters
from stacktok.core.reference import allocate as allocate
from stacktok.kernels import Ints, Problem, Steps, Swap, triton
from stacktok.kernels.transfer import upload


def precompute(vision_affinity: Affinity, eligible: Mask) -> triton.State:
    """Query-independent state from A^vv, (n, n), and the positions that may be kept, (n,)."""
    matrix = torch.as_tensor(vision_affinity)
    return triton.precompute(matrix, upload(eligible, matrix.device))


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


Unit = tuple[CoverageReference, QueryAffinity]
"""A crop, and the affinities of a question to it."""


def keep(images: Sequence[Sequence[Unit]], parameters: Parameters, budgets: Sequence[int]) -> list[list[torch.Tensor]]:
    """Which tokens of every crop of several images are kept, (n_c,), bool, on their device; nothing waits for it.

    All images take each step in one launch: the reference chain, the run, the merge of crops, and the swaps.

    Parameters
    ----------
    images
        The crops of every image.
    parameters
        Checked parameters, of which `keeps` is true.
    budgets
        Tokens to keep of every image, at most as many as are eligible.
    """
    totals, lengths, horizons = [], [], []
    for units, budget in zip(images, budgets, strict=True):
        capacities = [unit.capacity for unit, _ in units]
        own = [min(budget, capacity) for capacity in capacities]
        uniform = parameters.allocation == "uniform"
        totals += [budget] * len(units)
        horizons += own
        lengths += apportion(budget, [Fraction(1)] * len(units), capacities) if uniform else own
    flat = [unit for units in images for unit in units]
    runs = GreedyRun.run(flat, parameters, totals, lengths, horizons)
    sets = [
        Chosen(run.reference.state, run.query_affinity, run.steps, run.targets, run.depth, run.reference.capacity)
        for run in runs
    ]
    limit = parameters.swap_limit if parameters.criterion == "gated" else 0
    return retain(sets, [len(units) for units in images], budgets, replace(parameters, swap_limit=limit))


class Chosen(NamedTuple):
    """A crop's run, as far as it may get.

    Attributes
    ----------
    state, query_affinity, depth
        As in `Problem`.
    steps
        The picks.
    targets
        n theta_t for t = 0..k, (k + 1,).
    capacity
        Positions that may be kept.
    """

    state: triton.State
    query_affinity: torch.Tensor
    steps: Steps
    targets: torch.Tensor
    depth: int | None
    capacity: int


def retain(
    runs: Sequence[Chosen], crops: Sequence[int], budgets: Sequence[int], parameters: Parameters
) -> list[list[torch.Tensor]]:
    """Which tokens of every crop are kept after the merge of an image's runs and the swaps, (n_c,), bool.

    Parameters
    ----------
    runs
        Of all crops of all images, in order.
    crops
        Number of every image's crops.
    budgets
        Tokens to keep of every image.
    parameters
        Limit, passes and least gain of the swaps.
    """
    images = _split(list(runs), crops)
    merged = [
        triton.Runs([run.steps for run in own], [(len(run.query_affinity), len(run.state.sums)) for run in own], budget)
        for own, budget in zip(images, budgets, strict=True)
    ]
    several = [one for one in merged if len(one.steps) > 1]
    shares = iter(triton.allocate(several) if several else [])
    whole = upload(np.array(budgets, dtype=np.int64), runs[0].steps.order.device)
    sizes = [next(shares)[1] if len(one.steps) > 1 else whole[i : i + 1] for i, one in enumerate(merged)]
    sets = [
        triton.Retained(run.state, run.query_affinity, run.steps.order, size, run.targets, run.depth, run.capacity)
        for own, counts in zip(images, sizes, strict=True)
        for run, size in zip(own, counts[:, None], strict=True)
    ]
    refined = triton.refine(sets, parameters.swap_limit, parameters.swap_epsilon, parameters.swap_passes or 0)
    return _split([one.mask for one in refined], crops)


def _split(values: list[Any], counts: Sequence[int]) -> list[list[Any]]:
    ends = accumulate(counts)
    return [values[end - count : end] for count, end in zip(counts, ends, strict=True)]


def read_swaps(refined: triton.Refined) -> list[Swap]:
    """The accepted swaps."""
    count = int(refined.accepted)
    pairs = zip(refined.exchanges[:count].tolist(), refined.objectives[:count].tolist(), strict=True)
    return [Swap(out, into, before, after) for (out, into), (before, after) in pairs]


def _on_device(problem: Problem) -> Problem:
    device = problem.state.matrix.device

    def tensor(values: Any) -> torch.Tensor:
        return values if isinstance(values, torch.Tensor) and values.device == device else upload(values, device)

    weights = None if problem.weights is None else tensor(problem.weights)
    return problem._replace(
        query_affinity=tensor(problem.query_affinity), targets=tensor(problem.targets), weights=weights
    )
