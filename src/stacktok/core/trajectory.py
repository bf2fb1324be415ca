"""Algorithm 1 on one unit, an image or a crop: reference curve, gate, walk, swaps, record."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity, QuerySide
from stacktok.core.coverage import coverage_sum
from stacktok.core.inputs import Mask
from stacktok.core.parameters import Parameters
from stacktok.core.record import Selection, Swap
from stacktok.core.support import relevance_depth, strictness, target_sums
from stacktok.kernels import CRITERIA, Backend, Rule, Walk

Floats = NDArray[np.float64]

_CRITERIA = np.array(CRITERIA, dtype=object)


class Support:
    """The side of a unit that no question changes: its coverage affinities and reference curve.

    Parameters
    ----------
    vision_affinity
        A^vv, (n, n), on its grid.
    eligible
        Positions that may be kept, (n,).
    backend
        How to run.
    """

    def __init__(self, vision_affinity: Affinity, eligible: Mask, backend: Backend) -> None:
        self.vision_affinity, self.eligible, self.backend = vision_affinity, eligible, backend
        self.n = len(vision_affinity)
        self.capacity = int(eligible.sum())
        self.ground = backend.ground(vision_affinity, eligible)
        no_query = np.zeros((0, self.n), dtype=vision_affinity.dtype)
        self._chain = backend.walk(self.ground, no_query, Rule.COVERAGE, 1, 0.0)
        self._extending = threading.Lock()

    def reference(self, k: int) -> Floats:
        """N C^ref_t for t = 0..k, Eq. (reference); the greedy chain is extended when k is larger than before."""
        with self._extending:
            if k > self._chain.length:
                self._chain.extend(k, np.zeros(k))
            return self._chain.sums[1, : k + 1]

    @staticmethod
    def extend_references(units: Sequence[Support], sizes: Sequence[int]) -> None:
        """Extend the chains of several units beside each other, for `reference` to read."""
        short = [(unit, k) for unit, k in zip(units, sizes, strict=True) if k > unit._chain.length]
        if short:
            with ExitStack() as held:
                for unit, _ in short:
                    held.enter_context(unit._extending)
                chains, lengths = [unit._chain for unit, _ in short], [k for _, k in short]
                units[0].backend.extend(chains, lengths, [np.zeros(k) for k in lengths])


class Trajectory:
    """One question's walk over a unit, extended as far as anyone asks.

    Parameters
    ----------
    support
        The unit.
    query
        The question's side; m = 0 selects by coverage throughout.
    parameters
        Checked parameters.
    budget
        How many tokens are to be kept in the end, over all crops if the unit is one of several.
    """

    def __init__(self, support: Support, query: QuerySide, parameters: Parameters, budget: int) -> None:
        self.support, self.query_affinity, self.parameters = support, query.affinity, parameters
        self.m, self.n = query.affinity.shape
        self.budget = budget
        self.depth = relevance_depth(parameters, self.m, budget)
        self.strictness = strictness(query.entropies, self.n, parameters)
        self._walk: Walk = support.backend.walk(
            support.ground,
            query.affinity,
            _rule(self.m, parameters),
            self.depth,
            parameters.alpha,
        )
        # N theta_t, Eq. (support-target), from t = 0 to where it has walked.
        self._targets = np.zeros(0)

    def advance(self, k: int, horizon: int | None = None) -> None:
        """Walk to at least k tokens; ``horizon`` is the size whose target `target="final"` holds throughout."""
        self._walk.extend(k, self._aim(k, k if horizon is None else horizon))

    @staticmethod
    def advance_together(walks: Sequence[Trajectory], lengths: Sequence[int], horizons: Sequence[int]) -> None:
        """`advance` several units beside each other."""
        final = walks[0].parameters.target == "final"
        Support.extend_references([walk.support for walk in walks], horizons if final else lengths)
        targets = [walk._aim(*ends) for walk, *ends in zip(walks, lengths, horizons, strict=True)]
        walks[0].support.backend.extend([walk._walk for walk in walks], lengths, targets)

    def _aim(self, k: int, horizon: int) -> Floats:
        """The targets of a walk to k tokens or, where it has been, further."""
        if k < len(self._targets):
            return self._targets
        if self.parameters.criterion == "relevance":
            # Nothing is asked of coverage: it only takes over where relevance has saturated.
            self._targets = np.zeros(k + 1)
        elif self.parameters.target == "final":
            self._targets = np.full(k + 1, target_sums(self.support.reference(horizon), self.strictness)[-1])
        else:
            self._targets = target_sums(self.support.reference(k), self.strictness)
        return self._targets

    @property
    def length(self) -> int:
        """Tokens walked so far."""
        return self._walk.length

    def nominate(self, tokens: NDArray[np.int64], gains: Floats, first: int) -> None:
        """Write the tokens walked, from ``first`` on, and their gains h, Eq. (crop-nominee), to their places."""
        from stacktok.kernels.merge import nominee_gains

        walk, last = self._walk, self._walk.length
        tokens[first:last] = walk.picks[0, first:last]
        nominee_gains(walk.sums, self.m, self.n, gains, first, last)

    def record(self, k: int) -> Selection:
        """The record at k tokens, with swaps if the parameters ask for them."""
        from stacktok.kernels.report import report

        found = report(self._walk, self.support.reference(k), self._targets, k, self.m, self.n)
        selection = Selection(
            n=self.n,
            m=self.m,
            k=k,
            indices=found.indices,
            order=found.order,
            criterion=tuple(_CRITERIA[self._walk.picks[1, :k]].tolist()),
            bound=found.bound,
            relevance=found.relevance,
            coverage=found.coverage,
            reference=found.reference,
            target=found.target,
            strictness=self.strictness,
            swaps=(),
            final_relevance=float(found.relevance[k]),
            final_coverage=float(found.coverage[k]),
            _not_anytime=self._not_anytime(),
            _refine=self.refine,
        )
        return self.refine(selection)

    def _not_anytime(self) -> str:
        """Which setting makes a run depend on its budget from the first step on, if one does."""
        if self.parameters.target == "final":
            return 'target="final"'
        return 'relevance_depth="auto"' if self.parameters.relevance_depth == "auto" else ""

    def refine(self, selection: Selection) -> Selection:
        """Support-preserving swap refinement, Eq. (swap), where the set is small enough to be refined."""
        parameters, support, k = self.parameters, self.support, selection.k
        if not 0 < k < support.capacity or k > parameters.swap_limit or parameters.criterion != "gated":
            return selection
        indices, swaps = support.backend.refine(
            support.vision_affinity,
            self.query_affinity,
            selection.indices,
            support.eligible,
            self.depth,
            float(self._targets[k]),
            parameters.swap_epsilon,
            parameters.swap_passes,
        )
        if not swaps:
            return selection
        kept = indices.tolist()
        query, vision = torch.from_numpy(self.query_affinity), torch.from_numpy(support.vision_affinity)
        return replace(
            selection,
            indices=indices,
            swaps=tuple(Swap(*swap) for swap in swaps),
            final_relevance=coverage_sum(query, kept, self.depth) / max(1, self.m),
            final_coverage=coverage_sum(vision, kept) / self.n,
        )


def _rule(m: int, parameters: Parameters) -> Rule:
    if parameters.criterion == "scalarized":
        return Rule.SCALARIZED
    if parameters.criterion == "relevance" and parameters.fill == "index":
        return Rule.RELEVANCE
    if m == 0 or parameters.criterion == "coverage":
        return Rule.COVERAGE
    return Rule.GATED
