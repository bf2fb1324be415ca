"""From a walk's sums and picks to the arrays of its record."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from stacktok.core.inputs import Mask
from stacktok.kernels import Floats, Ints, Walk
from stacktok.kernels.compiled import Kernel


@partial(Kernel, error_model="numpy")
def _report(sums, picks, reference, targets, m, n, curves, tokens, bound):  # type: ignore[no-untyped-def]
    for t in range(curves.shape[1]):
        curves[0, t] = sums[0, t] / m
        curves[1, t] = sums[1, t] / n
        curves[2, t] = reference[t] / n
        curves[3, t] = targets[t] / n
    kept = np.zeros(n, np.bool_)
    for t in range(len(bound)):
        tokens[0, t] = picks[0, t]
        kept[picks[0, t]] = True
        bound[t] = picks[2, t] != 0
    t = 0
    for token in range(n):
        if kept[token]:
            tokens[1, t] = token
            t += 1


class Report(NamedTuple):
    """Arrays of a record; see `stacktok.core.record.Selection`."""

    relevance: Floats
    coverage: Floats
    reference: Floats
    target: Floats
    order: Ints
    indices: Ints
    bound: Mask


def report(walk: Walk, reference: Floats, targets: Floats, k: int, m: int, n: int) -> Report:
    """The first k steps of a walk, in one call.

    Parameters
    ----------
    walk
        Which has come that far.
    reference, targets
        n C^ref_t and n theta_t, for t = 0..k at least.
    k
        Number of steps.
    m, n
        Rows of A^qv and A^vv.
    """
    curves, tokens, bound = np.empty((4, k + 1)), np.empty((2, k), dtype=np.int64), np.empty(k, dtype=np.bool_)
    _report(walk.sums, walk.picks, reference, targets, max(1, m), n, curves, tokens, bound)
    (relevance, coverage, on_reference, target), (order, indices) = curves, tokens
    return Report(relevance, coverage, on_reference, target, order, indices, bound)
