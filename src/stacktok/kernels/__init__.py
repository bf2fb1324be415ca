"""Kernels: functions from arrays to arrays, which know nothing of the rest of the package.

A backend offers `precompute`, `greedy` and `refine` as in `stacktok.kernels.cpu`; on the same affinities every backend
returns the same bits. `stacktok.core.reference` is the one to read.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.floating]
"""Non-negative affinities on a grid that makes float64 sums exact; host memory, C order, float32 or float64."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Rule(IntEnum):
    """The rule that scores the candidates of a step. The numbers are part of compiled code: never renumber."""

    GATED = 0
    RELEVANCE = 1
    COVERAGE = 2
    SCALARIZED = 3


CRITERIA = ("relevance", "coverage", "scalarized", "fill")
"""Names of the codes in `Steps.criterion`."""


class Problem(NamedTuple):
    """A greedy run over one image or crop, in arrays, or in tensors of one device for `stacktok.kernels.triton`.

    Attributes
    ----------
    state
        Query-independent state of the backend, from its `precompute`.
    query_affinity
        A^qv, (m, n); m may be 0.
    targets
        n theta_t for t = 0..k-1, (k,): the run takes k steps, at most as many as tokens are eligible.
    rule
        The rule that scores the candidates.
    depth
        Kept tokens per query row that count towards relevance; None for all.
    alpha
        Weight of coverage under `Rule.SCALARIZED`.
    weights
        Factor of every candidate's score, (n,), not negative; None for 1. `Steps` has unweighted gains all the same.
    """

    state: Any
    query_affinity: Any
    targets: Any
    rule: Rule
    depth: int | None = 1
    alpha: float = 0.0
    weights: Any = None


class Steps(NamedTuple):
    """The k steps of a greedy run, in arrays or tensors as the problem was.

    Attributes
    ----------
    order
        Tokens in order of selection, (k,).
    criterion
        What scored each pick, an index into `CRITERIA`, (k,).
    bound
        Whether the gate called for coverage, (k,).
    relevance, coverage
        m R(S_t) and n C(S_t) for t = 0..k, (k + 1,).
    """

    order: Any
    criterion: Any
    bound: Any
    relevance: Any
    coverage: Any


class Swap(NamedTuple):
    """An accepted exchange of swap refinement, with J = R + C before and after."""

    out: int
    into: int
    before: float
    after: float
