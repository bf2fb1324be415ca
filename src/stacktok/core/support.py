"""How much coverage a question asks for: strictness and target, Eqs. (beta) and (support-target)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stacktok.core.parameters import Parameters


def strictness(entropies: NDArray[np.float64], n: int, parameters: Parameters) -> float:
    """Beta of Eq. (beta), from the normalised mean entropy of the query's rows.

    Parameters
    ----------
    entropies
        Of the rows of A^qv, (m,). m = 0 gives beta_max, and n = 1 with a query gives beta_min.
    n
        Number of encoded positions.
    parameters
        Clipping range, or a fixed strictness.
    """
    if parameters.strictness is not None:
        return float(parameters.strictness)
    m = len(entropies)
    if m == 0:
        return float(parameters.beta_max)
    if n == 1:
        return float(parameters.beta_min)
    entropy = math.fsum(entropies.tolist()) / (m * math.log(n))
    return float(min(max(entropy, parameters.beta_min), parameters.beta_max))


def relevance_depth(parameters: Parameters, rows: int, budget: int) -> int | None:
    """How many kept tokens of a query row count; "auto" is a row's even share of the budget, ceil(k / m).

    So that relevance is not served before the budget is spent. Chosen among other rules on the embedded model's dev
    split (`benchmarks/depth_rule.py`, docs/results.md).

    Parameters
    ----------
    parameters
        Its ``relevance_depth`` is a number, None for all, or "auto".
    rows
        Rows of the query, m.
    budget
        Tokens to be kept in the end.
    """
    if parameters.relevance_depth == "auto":
        return max(1, -(-budget // max(1, rows)))
    return None if parameters.relevance_depth is None else int(parameters.relevance_depth)


def target_sums(reference_sums: NDArray[np.float64], beta: float) -> NDArray[np.float64]:
    """N theta_t, Eq. (support-target), for t = 0..k from the reference's n C^ref_t.

    Computed here once for all backends: the gate compares these very numbers with n C(S_t).
    """
    return beta * reference_sums
