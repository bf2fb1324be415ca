"""Query-weighted coverage: facility location whose rows count by how much the question is about them.

For a question with rows q_a and an image with embeddings z_i:

    z_ai  = cos(q_a, z_i) - mean over the image's tokens j of cos(q_a, z_j)
    rho_i = sum over a of [z_ai]_+ ^ 2
    w_i   = (1 - lambda) / n_v + lambda rho_i / (sum of rho over the view v of i)
    F(S)  = sum over i of w_i max over j in S of A^vv_ij

A view is the base view, or all tiles together; an image of one crop is one view. F is coverage of the matrix
w_i A^vv_ij, so it is monotone and submodular, and the kernels maximise it as they are. Over crops it is a sum, so the
greedy run over all of them is Algorithm 2 with h = the gain of F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from stacktok.core.affinity import Affinity, Embeddings, query_cosines, weighted_affinity
from stacktok.core.greedy import CoverageReference, CropRun, GreedyRun, get_backend, run_problems, to_host
from stacktok.core.inputs import Array
from stacktok.core.parameters import Parameters
from stacktok.core.record import Selection
from stacktok.core.reference import coverage_sum, strictness
from stacktok.core.selection import PreparedImage
from stacktok.kernels import CRITERIA, Floats, Ints, Problem, Rule, Steps

Focus = float | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """How a question weighs an image's rows.

    Parameters
    ----------
    focus
        lambda in [0, 1], the share of the weight that the question decides; "auto" reads it from the evidence
        (`evidence_focus`).
    exponent
        Exponent of the evidence, greater than 0.
    centred
        Whether a row's mean cosine is taken off.
    equal_views
        Whether the base view and the tiles weigh the same; otherwise all tokens are one view.
    strictness
        Coverage that the set must keep up, as a share of the reference curve, in [0, 1]: 0 is the greedy run of F
        alone; more runs the paper's Algorithm 1 with F as its relevance, and None does so at the paper's strictness.
    """

    focus: Focus = "auto"
    exponent: float = 2.0
    centred: bool = True
    equal_views: bool = True
    strictness: float | None = 0.0

    def __post_init__(self) -> None:
        if self.focus != "auto" and (isinstance(self.focus, (bool, str)) or not 0 <= self.focus <= 1):
            raise ValueError(f"focus={self.focus!r} must lie in [0, 1], or be 'auto'")
        beta = self.strictness
        if beta is not None and (isinstance(beta, (bool, str)) or not 0 <= beta <= 1):
            raise ValueError(f"strictness={beta!r} must lie in [0, 1], or be None for the paper's rule")
        if isinstance(self.exponent, bool) or not 0 < self.exponent < math.inf:
            raise ValueError(f"exponent={self.exponent!r} must be a finite number greater than 0")
        for name in ("centred", "equal_views"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a bool; give True or False")


# Roots of the largest rho up to which a question decides nothing and from which on it decides most, and that most.
# Chosen on the dev splits of both embedded models (docs/results.md); cosines of a model that aligns words and patches
# less are smaller.
_NO_EVIDENCE, _FULL_EVIDENCE, _MOST = 0.35, 0.6, 0.95


class RowWeights(NamedTuple):
    """The weights of one crop's rows for a question.

    Attributes
    ----------
    w
        w_i, (n_c,).
    m
        Rows of the question.
    focus
        lambda.
    strictness
        beta; None for the paper's rule.
    """

    w: Floats
    m: int
    focus: float
    strictness: float | None


def evidence(
    query: torch.Tensor, crops: Sequence[Embeddings], weighting: Weighting, norm_epsilon: float
) -> list[Floats]:
    """Evidence rho of every crop of one image, (n_c,) each, for a question, (m, d)."""
    cosines = [found.double().cpu() for found in query_cosines(query, crops, norm_epsilon)]
    if weighting.centred:
        mean = sum(found.sum(1, keepdim=True) for found in cosines) / sum(found.shape[1] for found in cosines)
        cosines = [found - mean for found in cosines]
    return [z.clamp(min=0).pow(weighting.exponent).sum(0).numpy() for z in cosines]


def evidence_focus(rho: Sequence[Floats]) -> float:
    """Lambda from the strongest evidence of any token: a question that finds nothing decides nothing."""
    strongest = math.sqrt(max(float(own.max()) for own in rho))
    return _MOST * min(max((strongest - _NO_EVIDENCE) / (_FULL_EVIDENCE - _NO_EVIDENCE), 0.0), 1.0)


def row_weights(rho: Sequence[Floats], views: Sequence[int], focus: float) -> list[Floats]:
    """w_i of every crop, (n_c,); a view of which the question finds nothing is weighted evenly.

    Parameters
    ----------
    rho
        Evidence of every crop, (n_c,).
    views
        Number of every crop's view.
    focus
        lambda.
    """
    found: list[Floats] = []
    for own, view in zip(rho, views, strict=True):
        members = [other for other, its_view in zip(rho, views, strict=True) if its_view == view]
        even, total = 1.0 / sum(len(other) for other in members), math.fsum(np.concatenate(members).tolist())
        found.append((1 - focus) * even + focus * own / total if total > 0 else np.full(len(own), even))
    return found


def weigh(
    query: torch.Tensor, crops: Sequence[Embeddings], base: int | None, weighting: Weighting, norm_epsilon: float
) -> list[RowWeights]:
    """The weights of every crop of one image.

    Parameters
    ----------
    query
        Rows of the question, (m, d); m = 0 weighs all rows of a view alike, which is coverage alone.
    crops
        Embeddings of the crops.
    base
        The crop that is a view of its own, if there is one.
    weighting
        How to weigh.
    norm_epsilon
        Lower bound of the norms.
    """
    views = [int(weighting.equal_views and c == base) for c in range(len(crops))]
    if not len(query):
        even = row_weights([np.zeros(len(crop.rows)) for crop in crops], views, 0.0)
        return [RowWeights(w, 0, 0.0, 0.0) for w in even]
    rho = evidence(query, crops, weighting, norm_epsilon)
    focus = evidence_focus(rho) if weighting.focus == "auto" else float(weighting.focus)
    return [RowWeights(w, len(query), focus, weighting.strictness) for w in row_weights(rho, views, focus)]


def weighted_runs(
    images: Sequence[tuple[Sequence[PreparedImage], int | None]],
    query: Array | None,
    k: int,
    weighting: Weighting,
    parameters: Parameters,
) -> list[CropRun]:
    """Runs of every crop of some images for one question, each to k tokens or as many as it has.

    Parameters
    ----------
    images
        Prepared crops of every image, and which of them is the base view.
    query
        Embeddings of the question's tokens, (m, d), or None for m = 0.
    k
        Tokens to be kept in the end.
    weighting
        How rows are weighted.
    parameters
        Checked parameters.
    """
    question = images[0][0][0].question(query)
    crops, weights = [crop for own, _ in images for crop in own], []
    for own, base in images:
        weights += weigh(question, [crop.embeddings for crop in own], base, weighting, parameters.norm_epsilon)
    lengths = [min(k, crop.reference.capacity) for crop in crops]
    if all(own.strictness == 0 for own in weights):
        units = [(crop.reference, own) for crop, own in zip(crops, weights, strict=True)]
        return list(WeightedRun.run(units, parameters, lengths))
    return [
        GatedRun.run(crop, question, own, parameters, length)
        for crop, own, length in zip(crops, weights, lengths, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class WeightedRun:
    """A greedy run of F over an image or crop.

    Attributes
    ----------
    reference
        A^vv and its reference curve.
    matrix
        n w_i A^vv_ij, (n, n), on its grid: F is its coverage.
    weights
        Those of the rows.
    parameters
        Checked parameters.
    curve
        n C^ref_t, from t = 0 to the run's length at least.
    steps
        The picks; their coverage is n F.
    """

    reference: CoverageReference
    matrix: Affinity
    weights: RowWeights
    parameters: Parameters
    curve: Floats
    steps: Steps

    @staticmethod
    def run(
        units: Sequence[tuple[CoverageReference, RowWeights]], parameters: Parameters, lengths: Sequence[int]
    ) -> list[WeightedRun]:
        """Run several crops of one question, each to its length."""
        curves = CoverageReference.curves([unit for unit, _ in units], lengths)
        problems, runs = [], []
        for (unit, weights), curve, k in zip(units, curves, lengths, strict=True):
            matrix = weighted_affinity(unit.vision_affinity, unit.n * weights.w)
            state = get_backend(unit.backend).precompute(matrix, unit.eligible)
            problems.append(Problem(state, matrix[:0], np.zeros(k), Rule.COVERAGE))
            runs.append((unit, matrix, weights, parameters, _array(curve)))
        found = run_problems([unit.backend for unit, _ in units], problems)
        return [WeightedRun(*run, Steps(*map(_array, steps))) for run, steps in zip(runs, found, strict=True)]

    def nominee_gains(self) -> Floats:
        """The gain of F of every pick, (k,)."""
        gains: Floats = np.diff(self.steps.coverage) / self.reference.n
        return gains

    def record(self, k: int) -> Selection:
        """The record at k tokens, with F as its relevance and C as its coverage."""
        n, order = self.reference.n, self.steps.order[:k].copy()
        weighted, coverage = self.steps.coverage[: k + 1] / n, _coverage(self.reference.vision_affinity, order) / n
        names = {"coverage": "relevance" if self.weights.m else "coverage"}
        selection = Selection(
            n=n,
            m=self.weights.m,
            k=k,
            indices=np.sort(order),
            order=order,
            criterion=tuple(names.get(name, name) for name in (CRITERIA[c] for c in self.steps.criterion[:k])),
            bound=np.zeros(k, dtype=np.bool_),
            relevance=weighted,
            coverage=coverage,
            reference=self.curve[: k + 1] / n,
            target=np.zeros(k + 1),
            strictness=0.0,
            swaps=(),
            final_relevance=float(weighted[k]),
            final_coverage=float(coverage[k]),
            row_weights=self.weights.w,
            focus=self.weights.focus,
            _refine=self.refine,
        )
        return self.refine(selection)

    def refine(self, selection: Selection) -> Selection:
        """Swaps that raise F, where the set is small enough to be refined."""
        parameters, unit, k = self.parameters, self.reference, selection.k
        if not 0 < k < unit.capacity or k > parameters.swap_limit:
            return selection
        indices, swaps = get_backend(unit.backend).refine(
            self.matrix,
            self.matrix[:0],
            selection.indices,
            unit.eligible,
            1,
            0.0,
            parameters.swap_epsilon,
            parameters.swap_passes,
        )
        kept = indices.tolist()
        return replace(
            selection,
            indices=indices,
            swaps=tuple(swaps),
            final_relevance=coverage_sum(torch.as_tensor(self.matrix), kept) / unit.n,
            final_coverage=coverage_sum(torch.as_tensor(unit.vision_affinity), kept) / unit.n,
        )


@dataclass(frozen=True, eq=False)
class GatedRun:
    """Algorithm 1 with F as its relevance: coverage takes over where the set falls behind the requirement.

    Attributes
    ----------
    inner
        The run.
    weights
        Those of the rows.
    """

    inner: GreedyRun
    weights: RowWeights

    @staticmethod
    def run(
        crop: PreparedImage, question: torch.Tensor, weights: RowWeights, parameters: Parameters, length: int
    ) -> GatedRun:
        """Run one crop to its length."""
        matrix = weighted_affinity(crop.vision_affinity, crop.n * weights.w)
        beta = weights.strictness
        if beta is None:
            beta = float(strictness(crop.query_affinity(question, parameters), parameters))
        own = replace(parameters, strictness=beta)
        (inner,) = GreedyRun.run([(crop.reference, matrix)], own, [length], [length], [length])
        return GatedRun(inner.on_host(), weights)

    @property
    def reference(self) -> CoverageReference:
        """The coverage side of the crop."""
        return self.inner.reference

    @property
    def steps(self) -> Steps:
        """The picks."""
        return self.inner.steps

    def nominee_gains(self) -> Floats:
        """The gain of F + C of every pick, Eq. (crop-nominee)."""
        return self.inner.nominee_gains()

    def record(self, k: int) -> Selection:
        """The record at k tokens."""
        weights = self.weights
        return replace(self.inner.record(k), m=weights.m, row_weights=weights.w, focus=weights.focus)


def _array(values: Any) -> Any:
    """Numbers in host memory."""
    return to_host(values) if isinstance(values, torch.Tensor) else values


def _coverage(vision_affinity: Affinity, order: Ints) -> Floats:
    """N C(S_t) for t = 0..k, (k + 1,)."""
    affinity = torch.as_tensor(vision_affinity)
    best, found = torch.zeros_like(affinity[:, 0]), np.zeros(len(order) + 1)
    for t, token in enumerate(order.tolist()):
        best = torch.maximum(best, affinity[:, token])
        found[t + 1] = float(best.double().sum())
    return found
