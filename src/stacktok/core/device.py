"""The `triton` backend as the core sees it: affinities and results are tensors on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stacktok.core.affinity import Affinity, QueryAffinity
from stacktok.core.inputs import Mask
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
