"""The yardstick: Algorithm 1 and the swap rule in plain torch, every gain from its definition at every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stacktok.core.affinity import Affinity
from stacktok.core.coverage import coverage_sum, gain_sums, row_thresholds
from stacktok.core.inputs import Mask
from stacktok.kernels import CRITERIA, Floats, Ints, Rule


class ReferenceWalk:
    """A selection in progress; see `stacktok.kernels.Walk`."""

    def __init__(
        self,
        vision_affinity: Affinity,
        eligible: Mask,
        query_affinity: Affinity,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> None:
        self._vision = torch.from_numpy(vision_affinity)
        self._query = torch.from_numpy(query_affinity)
        self._rule, self._depth, self._alpha = rule, depth, alpha
        self._candidates = torch.from_numpy(eligible.copy())
        capacity = int(eligible.sum())
        self.length = 0
        self.picks = np.empty((3, capacity), dtype=np.int64)
        self.sums = np.zeros((2, capacity + 1))

    def extend(self, length: int, targets: Floats) -> None:
        order, criteria, bound = self.picks
        relevance_sums, coverage_sums = self.sums
        for t in range(self.length, length):
            kept = order[:t].tolist()
            relevance_gain = gain_sums(self._query, row_thresholds(self._query, kept, self._depth))
            coverage_gain = gain_sums(self._vision, row_thresholds(self._vision, kept))
            deficit = bool(targets[t] > coverage_sums[t])
            token, criterion = self._pick(relevance_gain, coverage_gain, deficit)
            self._candidates[token] = False
            order[t] = token
            criteria[t] = CRITERIA.index(criterion)
            bound[t] = deficit and self._rule == Rule.GATED
            relevance_sums[t + 1] = relevance_sums[t] + float(relevance_gain[token])
            coverage_sums[t + 1] = coverage_sums[t] + float(coverage_gain[token])
            self.length = t + 1

    def _pick(self, relevance: torch.Tensor, coverage: torch.Tensor, deficit: bool) -> tuple[int, str]:
        """Eqs. (gate) and (selection): the primary criterion while it gains, else the secondary, else lowest index."""
        if self._rule == Rule.SCALARIZED:
            m, n = max(1, len(self._query)), len(self._vision)
            criteria = [("scalarized", relevance / m + self._alpha * (coverage / n))]
        elif self._rule == Rule.RELEVANCE:
            criteria = [("relevance", relevance)]
        elif self._rule == Rule.COVERAGE:
            criteria = [("coverage", coverage)]
        elif deficit:
            criteria = [("coverage", coverage), ("relevance", relevance)]
        else:
            criteria = [("relevance", relevance), ("coverage", coverage)]
        for name, gain in criteria:
            score = gain.masked_fill(~self._candidates, -1.0)
            best = score.max()
            if best > 0:
                return int((score == best).nonzero()[0]), name
        return int(self._candidates.nonzero()[0]), "fill"


class ReferenceBackend:
    """See `stacktok.kernels.Backend`."""

    name = "reference"

    def ground(self, vision_affinity: Affinity, eligible: Mask) -> tuple[Affinity, Mask]:
        return vision_affinity, eligible

    def walk(
        self,
        ground: tuple[Affinity, Mask],
        query_affinity: Affinity,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> ReferenceWalk:
        return ReferenceWalk(*ground, query_affinity, rule, depth, alpha)

    def extend(self, walks: Sequence[ReferenceWalk], lengths: Sequence[int], targets: Sequence[Floats]) -> None:
        for walk, length, aims in zip(walks, lengths, targets, strict=True):
            walk.extend(length, aims)

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
        vision, query = torch.from_numpy(vision_affinity), torch.from_numpy(query_affinity)
        m, n = max(1, len(query)), len(vision)
        current = sorted(int(token) for token in kept)
        swaps: list[tuple[int, int, float, float]] = []
        completed = 0
        while passes is None or completed < passes:
            accepted = False
            for out in list(current):
                coverage = coverage_sum(vision, current)
                before = coverage_sum(query, current, depth) / m + coverage / n
                floor = min(target, coverage)
                rest = [token for token in current if token != out]
                relevance_after = coverage_sum(query, rest, depth) + gain_sums(
                    query, row_thresholds(query, rest, depth)
                )
                coverage_after = coverage_sum(vision, rest) + gain_sums(vision, row_thresholds(vision, rest))
                objective = relevance_after / m + coverage_after / n
                outside = torch.from_numpy(eligible.copy())
                outside[current] = False
                admissible = outside & (objective > (1.0 + epsilon) * before) & (coverage_after >= floor)
                if not bool(admissible.any()):
                    continue
                score = objective.masked_fill(~admissible, -1.0)
                into = int((score == score.max()).nonzero()[0])
                swaps.append((out, into, before, float(objective[into])))
                current = sorted([*rest, into])
                accepted = True
            completed += 1
            if not accepted:
                break
        return np.array(current, dtype=np.int64), swaps


REFERENCE = ReferenceBackend()
