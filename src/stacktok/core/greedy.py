"""Greedy runs over images and crops: what both backends share around Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from stacktok.core import reference as reference_backend
from stacktok.core.affinity import Affinity, QueryAffinity
from stacktok.core.budget import Coverage
from stacktok.core.inputs import Mask
from stacktok.core.parameters import Parameters
from stacktok.core.record import Selection
from stacktok.core.reference import coverage_sum, nominee_gains, strictness, target_sums
from stacktok.kernels import CRITERIA, Floats, Ints, Problem, Rule, Steps, Swap

_CRITERIA = np.array(CRITERIA, dtype=object)

LIMIT = 4096
"""Tokens of an image or crop up to which the "triton" backend runs it."""


class Backend(Protocol):
    """A module that runs selections; `stacktok.kernels.cpu` documents the functions."""

    def precompute(self, vision_affinity: Affinity, eligible: Mask) -> Any:
        """Query-independent state from A^vv, (n, n), and the positions that may be kept, (n,)."""

    def greedy(self, problems: Sequence[Problem]) -> list[Steps]:
        """Algorithm 1 on every problem, in parallel where that pays."""

    def allocate(self, gains: Sequence[Floats], total: int) -> tuple[Ints, Ints]:
        """Algorithm 2 from the gains of every crop's nominees."""

    def refine(
        self,
        vision_affinity: Affinity,
        query_affinity: QueryAffinity,
        kept: Ints,
        eligible: Mask,
        depth: int | None,
        target: float,
        epsilon: float,
        passes: int | None,
    ) -> tuple[Ints, list[Swap]]:
        """Swap refinement, Eq. (swap)."""


def get_backend(name: str) -> Backend:
    """The backend of a checked name; "auto" is the compiled one."""
    if name == "reference":
        return reference_backend
    # numba and Triton load with the first selection, not with the package.
    if name == "triton":
        from stacktok.core import device

        return device
    from stacktok.kernels import cpu

    return cpu


def choose_backend(name: str, device: torch.device, n: int) -> str:
    """The backend that selects among ``n`` tokens on ``device``: "reference", "cpu" or "triton".

    "auto" is "triton" on GPUs where Triton can be imported. Above `LIMIT` tokens one block of threads per image is too
    few: the matrix is then copied to the host, whatever is asked for.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and find_spec("triton") is not None else "cpu"
    return "cpu" if name == "triton" and n > LIMIT else name


class CoverageReference:
    """The query-independent side of an image or crop: A^vv and the reference curve, Eq. (reference).

    Threads may share it.

    Parameters
    ----------
    vision_affinity
        A^vv, (n, n), on its grid.
    eligible
        Positions that may be kept, (n,).
    backend
        Name of the backend.
    """

    def __init__(self, vision_affinity: Affinity, eligible: Mask, backend: str) -> None:
        self.vision_affinity, self.eligible, self.backend = vision_affinity, eligible, backend
        self.n, self.capacity = len(vision_affinity), int(eligible.sum())
        self.state = get_backend(backend).precompute(vision_affinity, eligible)
        # n C^ref_t from t = 0 on, as far as it has been asked for.
        self._curve: Any = np.zeros(1)
        if isinstance(vision_affinity, torch.Tensor):
            self._curve = torch.zeros(1, dtype=torch.float64, device=vision_affinity.device)

    @cached_property
    def whole(self) -> float:
        """N C of all eligible positions."""
        return coverage_sum(torch.as_tensor(self.vision_affinity), np.flatnonzero(self.eligible).tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of A^vv and what is precomputed from it."""
        return sum(array.nbytes for array in (*self.state, self._curve))

    @staticmethod
    def curves(units: Sequence[CoverageReference], sizes: Sequence[int]) -> list[Any]:
        """N C^ref_t of every unit for t = 0 to its size at least; computed in parallel where not yet known."""
        found = [unit._curve for unit in units]
        short = [c for c, size in enumerate(sizes) if size >= len(found[c])]
        problems = []
        for c in short:
            # At least doubled, so that slowly rising budgets do not repeat the chain each time.
            size = min(units[c].capacity, max(sizes[c], 2 * (len(found[c]) - 1)))
            no_query = units[c].vision_affinity[:0]
            problems.append(Problem(units[c].state, no_query, np.zeros(size), Rule.COVERAGE))
        for c, steps in zip(short, run_problems([units[c].backend for c in short], problems), strict=True):
            found[c] = units[c]._curve = steps.coverage
        return found


def run_problems(backends: Sequence[str], problems: Sequence[Problem]) -> list[Steps]:
    """Algorithm 1 on every problem, all of one backend at once."""
    found: dict[int, Steps] = {}
    for name in dict.fromkeys(backends):
        own = [index for index, backend in enumerate(backends) if backend == name]
        found |= dict(zip(own, get_backend(name).greedy([problems[index] for index in own]), strict=True))
    return [found[index] for index in range(len(problems))]


class CropRun(Protocol):
    """A greedy run over one crop, as far as sharing a budget needs it."""

    @property
    def reference(self) -> CoverageReference:
        """The coverage side of the crop."""

    @property
    def steps(self) -> Steps:
        """The picks."""

    def nominee_gains(self) -> Floats:
        """Gain of every pick by which crops compete, (k,)."""

    def record(self, k: int) -> Selection:
        """The record at k tokens."""


@dataclass(frozen=True, eq=False)
class GreedyRun:
    """One question's run of Algorithm 1 over an image or crop.

    With the "triton" backend affinities, strictness, curves and steps are tensors on the image's device.

    Attributes
    ----------
    reference
        The coverage side of the unit.
    query_affinity
        A^qv, (m, n), on its grid.
    parameters
        Checked parameters.
    depth
        Kept tokens per query row that count towards relevance; None for all.
    strictness
        beta.
    curve, targets
        n C^ref_t and n theta_t, from t = 0 to the run's length at least.
    steps
        The picks.
    """

    reference: CoverageReference
    query_affinity: QueryAffinity
    parameters: Parameters
    depth: int | None
    strictness: float | torch.Tensor
    curve: Any
    targets: Any
    steps: Steps

    @staticmethod
    def run(
        units: Sequence[tuple[CoverageReference, QueryAffinity]],
        parameters: Parameters,
        budgets: Sequence[int],
        lengths: Sequence[int],
        horizons: Sequence[int],
    ) -> list[GreedyRun]:
        """Run several units at once.

        Parameters
        ----------
        units
            Images or crops, with the affinities of a question to each.
        parameters
            Checked parameters.
        budgets
            Tokens to be kept in the end, over all crops of the image that a unit belongs to.
        lengths
            Tokens that each run picks.
        horizons
            Sizes whose targets `target="final"` holds throughout.
        """
        final = parameters.target == "final"
        curves = CoverageReference.curves([unit for unit, _ in units], horizons if final else lengths)
        runs, problems = [], []
        for (unit, query), curve, budget, k, horizon in zip(units, curves, budgets, lengths, horizons, strict=True):
            beta = strictness(query, parameters)
            if parameters.criterion == "relevance":
                # No coverage is asked for: it only takes over where relevance has saturated.
                targets = target_sums(curve[: k + 1], 0.0)
            elif final:
                targets = target_sums(curve[: k + 1], 0.0) + target_sums(curve, beta)[horizon]
            else:
                targets = target_sums(curve[: k + 1], beta)
            depth = parameters.depth(len(query), budget)
            problems.append(Problem(unit.state, query, targets[:k], _rule(query, parameters), depth, parameters.alpha))
            runs.append((unit, query, parameters, depth, beta, curve, targets))
        found = run_problems([unit.backend for unit, _ in units], problems)
        return [GreedyRun(*run, steps) for run, steps in zip(runs, found, strict=True)]

    def on_host(self) -> GreedyRun:
        """The run with its steps and curves in host memory, which waits for a device; the affinities stay there."""
        if not isinstance(self.steps.order, torch.Tensor):
            return self
        curve, targets = (to_host(values) for values in (self.curve, self.targets))
        steps = Steps(*map(to_host, self.steps))
        return replace(self, strictness=float(self.strictness), curve=curve, targets=targets, steps=steps)

    def nominee_gains(self) -> Floats:
        """H of every pick, Eq. (crop-nominee)."""
        return nominee_gains(self.steps, *self.query_affinity.shape)

    def saturated(self) -> float:
        """M R of all eligible positions: what relevance is where no further token raises it."""
        eligible = np.flatnonzero(self.reference.eligible).tolist()
        return coverage_sum(torch.as_tensor(self.query_affinity), eligible, self.depth)

    def record(self, k: int) -> Selection:
        """The record at k tokens, at most the run's, with swaps where the parameters ask; of a run on the host."""
        m, n = self.query_affinity.shape
        relevance, coverage = self.steps.relevance[: k + 1] / max(1, m), self.steps.coverage[: k + 1] / n
        selection = Selection(
            n=n,
            m=m,
            k=k,
            indices=np.sort(self.steps.order[:k]),
            order=self.steps.order[:k].copy(),
            criterion=tuple(_CRITERIA[self.steps.criterion[:k]].tolist()),
            bound=self.steps.bound[:k].copy(),
            relevance=relevance,
            coverage=coverage,
            reference=self.curve[: k + 1] / n,
            target=self.targets[: k + 1] / n,
            strictness=float(self.strictness),
            swaps=(),
            final_relevance=float(relevance[k]),
            final_coverage=float(coverage[k]),
            _not_anytime=self._not_anytime(),
            _refine=self.refine,
        )
        return self.refine(selection)

    def _not_anytime(self) -> str:
        """The setting that makes a run depend on its budget from the first step on, if one does."""
        if self.parameters.target == "final":
            return 'target="final"'
        return 'relevance_depth="auto"' if self.parameters.relevance_depth == "auto" else ""

    def refine(self, selection: Selection) -> Selection:
        """Swap refinement, Eq. (swap), where the set is small enough to be refined."""
        parameters, unit, k = self.parameters, self.reference, selection.k
        if not 0 < k < unit.capacity or k > parameters.swap_limit or parameters.criterion != "gated":
            return selection
        indices, swaps = get_backend(unit.backend).refine(
            unit.vision_affinity,
            self.query_affinity,
            selection.indices,
            unit.eligible,
            self.depth,
            float(self.targets[k]),
            parameters.swap_epsilon,
            parameters.swap_passes,
        )
        if not swaps:
            return selection
        kept = indices.tolist()
        query, vision = torch.as_tensor(self.query_affinity), torch.as_tensor(unit.vision_affinity)
        return replace(
            selection,
            indices=indices,
            swaps=tuple(swaps),
            final_relevance=coverage_sum(query, kept, self.depth) / max(1, len(query)),
            final_coverage=coverage_sum(vision, kept) / selection.n,
        )


def adaptive_size(budget: Coverage, runs: Sequence[GreedyRun], sizes: Ints) -> int:
    """Smallest number of steps after which coverage reaches the budget's share and relevance has saturated.

    Parameters
    ----------
    budget
        The budget.
    runs
        Of every crop.
    sizes
        Tokens of every crop after 0, 1, ... steps, (k + 1, L). Where no number of steps is enough, it is k.
    """
    # Sums are exact on the affinities' grid, so that saturation is equality.
    covered = sum(run.steps.coverage[own] for run, own in zip(runs, sizes.T, strict=True))
    relevant = sum(run.steps.relevance[own] for run, own in zip(runs, sizes.T, strict=True))
    enough = (covered >= budget.share * sum(run.reference.whole for run in runs)) & (
        relevant >= sum(run.saturated() for run in runs)
    )
    return int(np.argmax(enough)) if np.any(enough) else len(sizes) - 1


def to_host(values: torch.Tensor) -> Any:
    """A tensor's numbers as an array."""
    return values.cpu().numpy()


def _rule(query_affinity: QueryAffinity, parameters: Parameters) -> Rule:
    if parameters.criterion == "scalarized":
        return Rule.SCALARIZED
    if parameters.criterion == "relevance" and parameters.fill == "index":
        return Rule.RELEVANCE
    if len(query_affinity) == 0 or parameters.criterion == "coverage":
        return Rule.COVERAGE
    return Rule.GATED
