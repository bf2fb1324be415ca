"""The merge of crops' nominees, Eq. (global): at every step the nominee with the largest gain wins."""

from __future__ import annotations

import numpy as np

from stacktok.kernels import Floats, Ints
from stacktok.kernels.compiled import Kernel


@Kernel
def _merge(gains, known, limits, sizes, winners, step):  # type: ignore[no-untyped-def]
    while step < len(winners):
        best, winner = -np.inf, -1
        for c in range(len(sizes)):
            t = sizes[c]
            if t < limits[c]:
                if t >= known[c]:
                    return step
                if gains[c, t] > best:
                    best = gains[c, t]
                    winner = c
        winners[step] = winner
        sizes[winner] += 1
        step += 1
    return step


def merge(gains: Floats, known: Ints, limits: Ints, sizes: Ints, winners: Ints, step: int) -> int:
    """Spend the budget from ``step`` on, as far as all nominees are known; equal gains go to the lowest crop.

    Parameters
    ----------
    gains
        h of every crop's nominees in the order of its own run, (L, ...); finite.
    known
        How many of them are known, (L,).
    limits
        How many tokens a crop may get; together at least the budget, (L,).
    sizes
        How many it has got; carried on, (L,).
    winners
        The crop that every step went to; filled in, (k,).
    step
        Steps that are done.

    Returns
    -------
    int
        Steps that are done now: the budget, or where the next nominee of a crop is not known.
    """
    done: int = _merge(gains, known, limits, sizes, winners, step)
    return done
