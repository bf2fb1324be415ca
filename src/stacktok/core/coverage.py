"""Facility-location coverage and its gains, Eqs. (coverage) to (marginal), as they are defined.

These are sums over rows; the means of the paper are sums divided by the number of rows. On grid affinities
(`stacktok.core.affinity`) every number here is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Entries of a large matrix that are turned into float64 at a time.
_ENTRIES = 1 << 22


def row_thresholds(affinity: torch.Tensor, kept: Sequence[int], depth: int | None = 1) -> torch.Tensor:
    """The affinity that a token must exceed to add to a row: its ``depth``-th largest over ``kept``, or 0.

    Parameters
    ----------
    affinity
        (p, n), non-negative.
    kept
        Indices of the set S.
    depth
        1 gives c_i(S; A) of Eq. (coverage); None never fills a row.

    Returns
    -------
    torch.Tensor
        (p,), float64.
    """
    if depth is None or len(kept) < depth:
        return torch.zeros(len(affinity), dtype=torch.float64, device=affinity.device)
    columns = affinity[:, list(kept)].double()
    return columns.topk(depth, dim=1).values[:, -1]


def coverage_sum(affinity: torch.Tensor, kept: Sequence[int], depth: int | None = 1) -> float:
    """P F_A(S): the sum over rows of the ``depth`` largest affinities over the set (Eq. coverage at depth 1)."""
    if len(affinity) == 0 or not kept:
        return 0.0
    columns = affinity[:, list(kept)].double()
    counted = len(kept) if depth is None else min(depth, len(kept))
    return float(columns.topk(counted, dim=1).values.sum())


def gain_sums(affinity: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """P Delta_F(s | S) of every token s, Eq. (marginal).

    Parameters
    ----------
    affinity
        (p, n), non-negative.
    thresholds
        (p,), float64, from `row_thresholds`.

    Returns
    -------
    torch.Tensor
        (n,), float64.
    """
    rows, n = affinity.shape
    gains = torch.zeros(n, dtype=torch.float64, device=affinity.device)
    step = max(1, _ENTRIES // n)
    for start in range(0, rows, step):
        block = affinity[start : start + step].double()
        gains += (block - thresholds[start : start + step, None]).clamp_(min=0).sum(0)
    return gains
