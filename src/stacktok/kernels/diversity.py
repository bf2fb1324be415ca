"""Diverse sets: max-min by a running minimum, and the most likely set of a determinantal point process, greedily."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stacktok.kernels import Floats, Ints, Mask
from stacktok.kernels.compiled import compiled


@compiled
def _max_min(distance, candidates, order):  # type: ignore[no-untyped-def]
    n = distance.shape[0]
    nearest = np.full(n, np.inf, dtype=distance.dtype)
    for i in range(n):
        if candidates[i]:
            for j in range(n):
                if candidates[j] and j != i and distance[i, j] < nearest[i]:
                    nearest[i] = distance[i, j]
    open_ = candidates.copy()
    for step in range(len(order)):
        chosen = -1
        for i in range(n):
            if open_[i] and (chosen < 0 or nearest[i] > nearest[chosen]):
                chosen = i
        order[step] = chosen
        open_[chosen] = False
        row = distance[chosen]
        if step == 0:
            nearest[:] = row
        else:
            for i in range(n):
                if row[i] < nearest[i]:
                    nearest[i] = row[i]


def max_min(distance: NDArray[np.floating], candidates: Mask, k: int) -> Ints:
    """Greedy max-min order, (k,): ties to the lowest index.

    The first pick is the candidate farthest from its nearest fellow candidate; each further one the candidate farthest
    from its nearest pick.

    Parameters
    ----------
    distance
        Pairwise distances, (n, n), C order.
    candidates
        Which tokens may be picked, (n,).
    k
        Number of picks, at most the number of candidates.
    """
    order = np.empty(k, dtype=np.int64)
    _max_min(np.ascontiguousarray(distance), candidates, order)
    return order


@compiled
def _greedy_map(similarity, weights, candidates, zero, order):  # type: ignore[no-untyped-def]
    """See `greedy_map`; ``rows`` are those of the Cholesky factor of the kernel over the picks."""
    n, used = len(weights), 0
    factor, rows, left = np.empty(n), np.empty((len(order), n)), candidates.copy()
    for j in range(n):
        factor[j] = weights[j] * np.float64(similarity[j, j]) * weights[j]
    floor = zero * factor
    for step in range(len(order)):
        token, best, first = -1, 0.0, -1
        for j in range(n):
            if left[j]:
                if first < 0:
                    first = j
                if factor[j] > best and factor[j] > floor[j]:
                    token, best = j, factor[j]
        order[step] = token if token >= 0 else first
        left[order[step]] = False
        if token < 0:
            continue
        row, products, weight, root = rows[used], similarity[token], weights[token], np.sqrt(best)
        for j in range(n):
            row[j] = weight * np.float64(products[j]) * weights[j]
        for t in range(used):
            earlier, share = rows[t], rows[t, token]
            for j in range(n):
                row[j] -= share * earlier[j]
        for j in range(n):
            row[j] /= root
            factor[j] -= row[j] * row[j]
        used += 1


def greedy_map(similarity: NDArray[np.floating], weights: Floats, candidates: Mask, k: int, zero: float = 0.0) -> Ints:
    """Greedy order, (k,), by the factor that each token brings to the determinant of w_i s_ij w_j over the picks.

    Ties go to the lowest index, and so does a token that the picks span already.

    Parameters
    ----------
    similarity
        Positive semidefinite, (n, n), C order.
    weights
        The factors w, (n,).
    candidates
        Which tokens may be picked, (n,).
    k
        Number of picks, at most the number of candidates.
    zero
        Relative to a token's own entry: a factor of at most this is rounding of 0.
    """
    order = np.empty(k, dtype=np.int64)
    _greedy_map(np.ascontiguousarray(similarity), weights, candidates, zero, order)
    return order
