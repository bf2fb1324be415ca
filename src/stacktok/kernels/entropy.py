"""Entropies of a query's rows, H_i of Eq. (beta)."""

from __future__ import annotations

import numpy as np

from stacktok.core.affinity import Affinity
from stacktok.kernels import Floats
from stacktok.kernels.compiled import Kernel


@Kernel
def _row_entropies(affinity, floor, entropies):  # type: ignore[no-untyped-def]
    for i in range(affinity.shape[0]):
        total = 0.0
        for j in range(affinity.shape[1]):
            a = np.float64(affinity[i, j])
            total -= a * np.log(max(a, floor))
        entropies[i] = total


def row_entropies(affinity: Affinity, floor: float) -> Floats:
    """H_i for every row, (m,).

    Parameters
    ----------
    affinity
        A^qv, (m, n).
    floor
        Lower bound of what the logarithm is taken of.
    """
    entropies = np.empty(len(affinity))
    _row_entropies(affinity, float(floor), entropies)
    return entropies
