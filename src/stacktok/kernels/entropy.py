"""Entropies of a query's rows, H_i of Eq. (beta)."""

from __future__ import annotations

import numpy as np

from stacktok.core.affinity import Affinity
from stacktok.kernels import Floats
from stacktok.kernels.compiled import Kernel, compiled


@compiled
def entropy(row, floor):  # type: ignore[no-untyped-def]
    """-sum a log max(a, floor) over a row."""
    total = 0.0
    for a in row:
        total -= np.float64(a) * np.log(max(np.float64(a), floor))
    return total


@Kernel
def _row_entropies(affinity, floor, entropies):  # type: ignore[no-untyped-def]
    for i in range(affinity.shape[0]):
        entropies[i] = entropy(affinity[i], floor)


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
