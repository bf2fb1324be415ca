"""Backends: ways to run the same selection, with identical results on the same affinities.

A backend is a module-level object that satisfies `Backend`. A GPU kernel would be one more file here: it would walk
on matrices in device memory, given the targets that `stacktok.core` computes for every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity
from stacktok.core.inputs import Mask

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Rule(IntEnum):
    """What scores the candidates of a step. The numbers are part of compiled code on disk: never renumber."""

    GATED = 0
    RELEVANCE = 1
    COVERAGE = 2
    SCALARIZED = 3


CRITERIA = ("relevance", "coverage", "scalarized", "fill")
"""Names of the codes in `Walk.picks`."""


class Walk(Protocol):
    """A greedy selection in progress on one image: Algorithm 1, as far as it has been extended.

    Attributes
    ----------
    length
        Number of tokens, and of columns that are valid in ``picks`` (one more in ``sums``).
    sums
        m R(S_t) and n C(S_t), from t = 0 on, (2, ...).
    picks
        Tokens, the codes of their criteria, and 1 where the gate called for coverage, (3, ...).
    """

    length: int
    sums: Floats
    picks: Ints

    def extend(self, length: int, targets: Floats) -> None:
        """Continue to ``length`` tokens; ``targets[t]`` is n theta_t, needed for every t < length."""


class Backend(Protocol):
    """One way to run the selection."""

    name: str

    def ground(self, vision_affinity: Affinity, eligible: Mask) -> Any:
        """What no question changes, A^vv, (n, n), and the positions that may be kept, as suits this backend."""

    def walk(
        self,
        ground: Any,
        query_affinity: Affinity,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> Walk:
        """Begin a selection with the empty set.

        Parameters
        ----------
        ground
            From `ground`.
        query_affinity
            A^qv, (m, n), on its grid.
        rule
            What scores the candidates.
        depth
            Tokens per query row that count; None for all.
        alpha
            Exchange rate of `Rule.SCALARIZED`.
        """

    def extend(self, walks: Sequence[Any], lengths: Sequence[int], targets: Sequence[Floats]) -> None:
        """Continue several of this backend's walks, each as by `Walk.extend`: beside each other where that pays."""

    def refine(
        self,
        vision_affinity: Affinity,
        query_affinity: Affinity,
        kept: Ints,
        eligible: Mask,
        depth: int | None,
        target: float,
        epsilon: float,
        passes: int | None,
    ) -> tuple[Ints, list[tuple[int, int, float, float]]]:
        """Swap refinement, Eq. (swap).

        Parameters
        ----------
        kept
            Sorted indices of the retained set.
        target
            n theta_r, the support target at the set's size.
        epsilon, passes
            Smallest relative improvement; number of passes, None until one accepts nothing.

        Returns
        -------
        tuple
            Sorted indices after the swaps, and the swaps (out, into, J before, J after).
        """


def get_backend(name: str) -> Backend:
    """The backend of a checked name; "auto" is the compiled one."""
    if name == "reference":
        from stacktok.kernels.reference import REFERENCE

        return REFERENCE
    from stacktok.kernels.cpu import CPU

    return CPU
