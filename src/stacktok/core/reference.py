"""The paper's selection, equation by equation: coverage, strictness, Algorithms 1 and 2, swaps.

This file is the `reference` backend; `stacktok.kernels.cpu` is a faster way to the same bits. Names in brackets are the
labels of the paper's source. F, R and C are kept as sums over rows and divided by the number of rows only in R + C and
in what is reported: on grid affinities (`stacktok.core.affinity`) sums are exact, so every comparison below is too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stacktok.core.parameters import Parameters
from stacktok.kernels import CRITERIA, Floats, Ints, Mask, Matrix, Problem, Rule, Steps, Swap

# Entries of a large matrix that are turned into float64 at a time.
_ENTRIES = 1 << 22


def row_thresholds(affinity: torch.Tensor, kept: Sequence[int], depth: int | None = 1) -> torch.Tensor:
    """The affinity that a token must exceed to add to a row, (p,): c_i(S; A) of Eq. (coverage), or 0.

    With relevance depth r it is the r-th largest affinity of the row over ``kept``; None never fills a row.
    """
    if depth is None or len(kept) < depth:
        return torch.zeros(len(affinity), dtype=torch.float64, device=affinity.device)
    return affinity[:, list(kept)].double().topk(depth, dim=1).values[:, -1]


def coverage_sum(affinity: torch.Tensor, kept: Sequence[int], depth: int | None = 1) -> float:
    """P F_A(S), Eq. (coverage): the sum over the p rows of the ``depth`` largest affinities over the set."""
    if len(affinity) == 0 or not kept:
        return 0.0
    counted = len(kept) if depth is None else min(depth, len(kept))
    return float(affinity[:, list(kept)].double().topk(counted, dim=1).values.sum())


def gain_sums(affinity: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """P Delta_F(s | S) of every token s, (n,), Eq. (marginal), from the rows' thresholds, (p,)."""
    rows, n = affinity.shape
    gains = torch.zeros(n, dtype=torch.float64, device=affinity.device)
    step = max(1, _ENTRIES // n)
    for start in range(0, rows, step):
        block = affinity[start : start + step].double()
        gains += (block - thresholds[start : start + step, None]).clamp_(min=0).sum(0)
    return gains


def strictness(query_affinity: Matrix | torch.Tensor, parameters: Parameters) -> float | torch.Tensor:
    """Beta of Eq. (beta): the mean entropy of the rows of A^qv, (m, n), over log n, clipped.

    Of a matrix on an accelerator it is a tensor, (), made there, so that nothing waits for it.
    """
    m, n = query_affinity.shape
    if parameters.strictness is not None:
        return float(parameters.strictness)
    if m == 0:
        return float(parameters.beta_max)
    if n == 1:
        return float(parameters.beta_min)
    if isinstance(query_affinity, torch.Tensor):
        if query_affinity.device.type != "cpu":
            return _tensor_strictness(query_affinity, parameters)
        query_affinity = query_affinity.numpy()
    a = query_affinity.astype(np.float64)
    entropies = -(a * np.log(np.maximum(a, parameters.entropy_floor))).sum(axis=1)
    mean = math.fsum(entropies.tolist()) / (m * math.log(n))
    return float(min(max(mean, parameters.beta_min), parameters.beta_max))


def _tensor_strictness(query_affinity: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Eq. (beta) where the affinities lie; logarithm and sum may round otherwise than on the host."""
    m, n = query_affinity.shape
    a = query_affinity.double()
    mean = -(a * a.clamp_min(parameters.entropy_floor).log()).sum() / (m * math.log(n))
    return mean.clamp(parameters.beta_min, parameters.beta_max)


def target_sums(reference: Any, beta: float | torch.Tensor) -> Any:
    """N theta_t, Eq. (support-target), from n C^ref_t."""
    return beta * reference


def precompute(vision_affinity: Matrix, eligible: Mask) -> tuple[Matrix, Mask]:
    """Query-independent state: nothing is computed ahead here."""
    return vision_affinity, eligible


def greedy(problems: Sequence[Problem]) -> list[Steps]:
    """Algorithm 1 on every problem. With `Rule.COVERAGE` it is the chain of Eq. (reference)."""
    return [_greedy(problem) for problem in problems]


def _greedy(problem: Problem) -> Steps:
    (vision_affinity, eligible), query_affinity, targets, rule, depth, alpha, weights = problem
    vision, query = torch.from_numpy(vision_affinity), torch.from_numpy(query_affinity)
    candidates, k = torch.from_numpy(eligible.copy()), len(targets)
    factors = 1.0 if weights is None else torch.from_numpy(weights)
    order: list[int] = []
    criterion, bound, relevance, coverage = (
        np.empty(k, np.int64),
        np.empty(k, np.bool_),
        np.zeros(k + 1),
        np.zeros(k + 1),
    )
    for t in range(k):
        # Eq. (deficit): d_t > 0.
        deficit = bool(targets[t] > coverage[t])
        relevance_gain = gain_sums(query, row_thresholds(query, order, depth))
        coverage_gain = gain_sums(vision, row_thresholds(vision, order))
        # Eq. (gate), and the ablations that do without it.
        if rule == Rule.SCALARIZED:
            scores = [("scalarized", relevance_gain / max(1, len(query)) + alpha * (coverage_gain / len(vision)))]
        elif rule == Rule.RELEVANCE:
            scores = [("relevance", relevance_gain)]
        elif rule == Rule.COVERAGE:
            scores = [("coverage", coverage_gain)]
        elif deficit:
            scores = [("coverage", coverage_gain), ("relevance", relevance_gain)]
        else:
            scores = [("relevance", relevance_gain), ("coverage", coverage_gain)]
        # Eq. (selection): the first criterion that gains anything; the lowest index if none does.
        token, name = int(candidates.nonzero()[0]), "fill"
        for criterion_name, unweighted in scores:
            score = unweighted * factors
            best = score[candidates].max()
            if best > 0:
                token, name = int((candidates & (score == best)).nonzero()[0]), criterion_name
                break
        candidates[token] = False
        order.append(token)
        criterion[t], bound[t] = CRITERIA.index(name), deficit and rule == Rule.GATED
        relevance[t + 1] = relevance[t] + float(relevance_gain[token])
        coverage[t + 1] = coverage[t] + float(coverage_gain[token])
    return Steps(np.array(order, dtype=np.int64), criterion, bound, relevance, coverage)


def nominee_gains(steps: Steps, m: int, n: int) -> Floats:
    """H_c of a crop's nominees in the order of its run, (k,), Eq. (crop-nominee).

    A crop's nominee depends on its own set alone, so its nominees are the picks of its own run of Algorithm 1.
    """
    gains: Floats = np.diff(steps.relevance) / max(1, m) + np.diff(steps.coverage) / n
    return gains


def allocate(gains: Sequence[Floats], total: int) -> tuple[Ints, Ints]:
    """Algorithm 2 from the nominees' gains: how a shared budget is spent, Eq. (global).

    Parameters
    ----------
    gains
        H_c of every crop's nominees, as many as the crop may get.
    total
        K_tot, at most the number of all nominees.

    Returns
    -------
    tuple
        The crop that wins each step, (K_tot,), and the sizes of all crops before each step, (K_tot, L).
    """
    heads = [float(own[0]) if len(own) else -math.inf for own in gains]
    winners, sizes, taken = np.empty(total, np.int64), np.empty((total, len(gains)), np.int64), [0] * len(gains)
    for step in range(total):
        sizes[step] = taken
        winner = heads.index(max(heads))
        winners[step] = winner
        taken[winner] += 1
        # Only the winner nominates again; a crop that is exhausted drops out.
        heads[winner] = float(gains[winner][taken[winner]]) if taken[winner] < len(gains[winner]) else -math.inf
    return winners, sizes


def refine(
    vision_affinity: Matrix,
    query_affinity: Matrix,
    kept: Ints,
    eligible: Mask,
    depth: int | None,
    target: float,
    epsilon: float,
    passes: int | None,
) -> tuple[Ints, list[Swap]]:
    """Support-preserving swaps, Eq. (swap); parameters and result as in `stacktok.kernels.cpu.refine`."""
    vision, query = torch.from_numpy(vision_affinity), torch.from_numpy(query_affinity)
    m, n = max(1, len(query)), len(vision)
    current = sorted(kept.tolist())
    swaps: list[Swap] = []
    done, accepted = 0, True
    while accepted and done != passes:
        accepted = False
        for out in list(current):
            coverage = coverage_sum(vision, current)
            before = coverage_sum(query, current, depth) / m + coverage / n
            floor = min(target, coverage)
            rest = [token for token in current if token != out]
            relevance_after = coverage_sum(query, rest, depth) + gain_sums(query, row_thresholds(query, rest, depth))
            coverage_after = coverage_sum(vision, rest) + gain_sums(vision, row_thresholds(vision, rest))
            objective = relevance_after / m + coverage_after / n
            outside = torch.from_numpy(eligible.copy())
            outside[current] = False
            admissible = outside & (objective > (1.0 + epsilon) * before) & (coverage_after >= floor)
            if not bool(admissible.any()):
                continue
            into = int((admissible & (objective == objective[admissible].max())).nonzero()[0])
            swaps.append(Swap(out, into, before, float(objective[into])))
            current = sorted([*rest, into])
            accepted = True
        done += 1
    return np.array(current, dtype=np.int64), swaps
