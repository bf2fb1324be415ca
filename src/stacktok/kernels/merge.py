"""The merge of crops' nominees, Eq. (global): at every step the nominee with the largest gain wins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stacktok.kernels import Floats, Ints
from stacktok.kernels.compiled import Kernel


@Kernel
def _gains(sums, rows, n, gains, first, last):  # type: ignore[no-untyped-def]
    for t in range(first, last):
        gains[t] = (sums[0, t + 1] - sums[0, t]) / rows + (sums[1, t + 1] - sums[1, t]) / n


@Kernel
def _merge(tokens, gains, known, limits, sizes, winners, chosen, nominees, nominee_gain, step):  # type: ignore[no-untyped-def]
    while step < len(winners):
        best, winner = -np.inf, -1
        for c in range(len(sizes)):
            t = sizes[c]
            if t < limits[c]:
                if t >= known[c]:
                    return step
                nominees[step, c] = tokens[c, t]
                nominee_gain[step, c] = gains[c, t]
                if gains[c, t] > best:
                    best = gains[c, t]
                    winner = c
            else:
                nominees[step, c] = -1
                nominee_gain[step, c] = np.nan
        winners[step] = winner
        chosen[step] = nominees[step, winner]
        sizes[winner] += 1
        step += 1
    return step


def nominee_gains(sums: Floats, m: int, n: int, gains: Floats, first: int, last: int) -> None:
    """The gains h = Delta_R + Delta_C of nominees first to last of a crop's run, Eq. (crop-nominee).

    Parameters
    ----------
    sums
        Of relevance and coverage along the run, (2, ...).
    m, n
        Rows of the query and of A^vv, by which the sums are divided.
    gains
        Where they go.
    first, last
        Which.
    """
    _gains(sums, max(1, m), n, gains, first, last)


class Merge(NamedTuple):
    """A budget of k tokens on its way to L crops.

    Attributes
    ----------
    tokens, gains
        Every crop's nominees in the order of its own run, and their h, finite, (L, ...).
    known
        How many of them are known, (L,).
    limits
        How many tokens a crop may get; together at least the budget, (L,).
    sizes
        How many it has got, (L,).
    winners, chosen
        The crop that every step went to, and its token, (k,).
    nominees, nominee_gain
        What every crop nominated at every step, and its h; -1 and NaN where it nominated nothing, (k, L).
    """

    tokens: Ints
    gains: Floats
    known: Ints
    limits: Ints
    sizes: Ints
    winners: Ints
    chosen: Ints
    nominees: Ints
    nominee_gain: Floats

    @classmethod
    def of(cls, total: int, limits: list[int]) -> Merge:
        """Nothing spent yet."""
        count, most = len(limits), max(limits)
        return cls(
            tokens=np.empty((count, most), dtype=np.int64),
            gains=np.empty((count, most)),
            known=np.zeros(count, dtype=np.int64),
            limits=np.array(limits),
            sizes=np.zeros(count, dtype=np.int64),
            winners=np.empty(total, dtype=np.int64),
            chosen=np.empty(total, dtype=np.int64),
            nominees=np.empty((total, count), dtype=np.int64),
            nominee_gain=np.empty((total, count)),
        )

    def spend(self, step: int) -> int:
        """Spend from ``step`` on, as far as all nominees are known; equal gains go to the lowest crop.

        Returns the steps that are done now: the budget, or where the next nominee of a crop is not known.
        """
        done: int = _merge(*self, step)
        return done
