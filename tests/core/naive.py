"""The paper, evaluated as it is written: slow, in float64, without a single shortcut.

On affinities whose sums are exact (grid values, or small multiples of a power of two) every comparison here is exact
too, so that picks can be compared one by one.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def affinity(left, right, tau, eps=1e-8):
    """Eq. (affinity): row softmax of cosines over tau."""
    left, right = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    left = left / np.maximum(np.linalg.norm(left, axis=1, keepdims=True), eps)
    right = right / np.maximum(np.linalg.norm(right, axis=1, keepdims=True), eps)
    logits = left @ right.T / tau
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def total(a, kept, depth=1):
    """Rows times F_A(S), Eq. (coverage); every row counts its ``depth`` largest entries."""
    if len(kept) == 0 or len(a) == 0:
        return 0.0
    values = np.sort(np.asarray(a, dtype=np.float64)[:, list(kept)], axis=1)[:, ::-1]
    return float((values if depth is None else values[:, :depth]).sum())


def gain(a, s, kept, depth=1):
    """Rows times Delta_F(s | S), by its definition as a difference."""
    return total(a, [*kept, s], depth) - total(a, kept, depth)


def reference(a_vv, eligible, k):
    """Eq. (reference): n C^ref_t for t = 0..k."""
    kept, curve = [], [0.0]
    for _ in range(k):
        best = max((s for s in eligible if s not in kept), key=lambda s: (gain(a_vv, s, kept), -s))
        kept.append(best)
        curve.append(total(a_vv, kept))
    return curve


def weighted_coverage(a_vv, eligible, k, weights):
    """Greedy facility location whose candidates have weights: argmax of w_s Delta(s | S), the lowest index on ties."""
    kept = []
    for _ in range(k):
        score = {s: float(weights[s]) * gain(a_vv, s, kept) for s in eligible if s not in kept}
        kept.append(min(score, key=lambda s: (-score[s], s)))
    return kept


def strictness(a_qv, beta_min=0.3, beta_max=0.9, floor=1e-12):
    """Eq. (beta) with its edge cases."""
    m, n = np.shape(a_qv)
    if m == 0:
        return beta_max
    if n == 1:
        return beta_min
    entropy = -sum(float(x) * math.log(max(float(x), floor)) for row in a_qv for x in row) / (m * math.log(n))
    return min(max(entropy, beta_min), beta_max)


def score(a_qv, a_vv, kept, candidates, deficit, depth=1):
    """Eqs. (gate) and (selection): the pick and what scored it."""
    relevance = {s: gain(a_qv, s, kept, depth) for s in candidates}
    coverage = {s: gain(a_vv, s, kept) for s in candidates}
    order = [("relevance", relevance), ("coverage", coverage)]
    if len(a_qv) == 0:
        order = [("coverage", coverage)]
    elif deficit:
        order.reverse()
    for name, gains in order:
        best = max(gains.values())
        if best > 0:
            return min(s for s in candidates if gains[s] == best), name
    return min(candidates), "fill"


def select(a_qv, a_vv, k, eligible, beta, depth=1):
    """Algorithm 1: order, criteria, and whether the gate called for coverage."""
    theta = [beta * value for value in reference(a_vv, eligible, k)]
    kept, criteria, bound = [], [], []
    for t in range(k):
        deficit = theta[t] > total(a_vv, kept) and len(a_qv) > 0
        candidates = [s for s in eligible if s not in kept]
        pick, name = score(a_qv, a_vv, kept, candidates, deficit, depth)
        kept.append(pick)
        criteria.append(name)
        bound.append(deficit)
    return kept, criteria, bound


def select_crops(crops, k, betas, depth=1):
    """Algorithm 2 without caches: every crop nominates again at every step."""
    sets = [[] for _ in crops]
    total_k = min(k, sum(len(eligible) for _, _, eligible in crops))
    thetas = [
        [beta * value for value in reference(a_vv, eligible, min(total_k, len(eligible)))]
        for (_, a_vv, eligible), beta in zip(crops, betas, strict=True)
    ]
    order, history = [], []
    for _ in range(total_k):
        nominees = {}
        for c, (a_qv, a_vv, eligible) in enumerate(crops):
            candidates = [s for s in eligible if s not in sets[c]]
            if not candidates:
                continue
            deficit = thetas[c][len(sets[c])] > total(a_vv, sets[c]) and len(a_qv) > 0
            pick, _ = score(a_qv, a_vv, sets[c], candidates, deficit, depth)
            h = gain(a_qv, pick, sets[c], depth) / max(1, len(a_qv)) + gain(a_vv, pick, sets[c]) / len(a_vv)
            nominees[c] = (pick, h)
        best = max(h for _, h in nominees.values())
        winner = min(c for c, (_, h) in nominees.items() if h == best)
        sets[winner].append(nominees[winner][0])
        order.append((winner, nominees[winner][0]))
        history.append(nominees)
    return order, sets, history


def objective(a_qv, a_vv, kept, depth=1):
    """J = R + C."""
    return total(a_qv, kept, depth) / max(1, len(a_qv)) + total(a_vv, kept) / len(a_vv)


def admissible(a_qv, a_vv, kept, out, into, target, epsilon, depth=1):
    """Both conditions of Eq. (swap); ``target`` is n beta C^ref_r."""
    after = [s for s in kept if s != out] + [into]
    improves = objective(a_qv, a_vv, after, depth) > (1 + epsilon) * objective(a_qv, a_vv, kept, depth)
    return improves and total(a_vv, after) >= min(target, total(a_vv, kept))


def refine(a_qv, a_vv, kept, eligible, target, epsilon, passes, depth=1):
    """Swap refinement that recomputes everything for every pair."""
    kept, swaps, completed = sorted(kept), [], 0
    while passes is None or completed < passes:
        accepted = False
        for out in list(kept):
            options = [
                (objective(a_qv, a_vv, [s for s in kept if s != out] + [into], depth), -into)
                for into in eligible
                if into not in kept and admissible(a_qv, a_vv, kept, out, into, target, epsilon, depth)
            ]
            if options:
                after, negative = max(options)
                swaps.append((out, -negative, objective(a_qv, a_vv, kept, depth), after))
                kept = sorted([s for s in kept if s != out] + [-negative])
                accepted = True
        completed += 1
        if not accepted:
            break
    return kept, swaps


def optimum(a_vv, eligible, t):
    """OPT_t by trying every set."""
    return max(total(a_vv, kept) for kept in itertools.combinations(eligible, min(t, len(eligible))))
