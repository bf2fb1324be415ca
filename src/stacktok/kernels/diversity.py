"""Max-min diversity by a running minimum: O(k n) after one look at all pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stacktok.kernels import Ints, Mask
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
