"""Spotlight: coverage of the image, each of its tokens weighted by how much the question is about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.crops import spend
from stacktok.core.inputs import Array, Eligible
from stacktok.core.parameters import Parameters
from stacktok.core.record import CropSelection, Selection
from stacktok.core.selection import PreparedImage
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.core.weighted import Focus, Weighting, weighted_runs
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.methods.info import MethodInfo
from stacktok.methods.stacktok import PreparedSelector, part_of

_OWN_PARAMETERS = ("tau_vision", "swap_limit", "swap_passes", "swap_epsilon", "norm_epsilon", "backend")


@dataclass(frozen=True)
class Spotlight(FeatureMethod):
    """Greedy maximisation of F(S) = sum_i w_i max_{j in S} A^vv_ij; `stacktok.core.weighted` defines the weights.

    Parameters
    ----------
    focus, exponent, centred, equal_views, strictness
        How a question weighs the image's tokens, and how much coverage is required all the same; see `Weighting`.
    tau_vision, norm_epsilon, backend
        As in `Parameters`.
    swap_limit, swap_passes, swap_epsilon
        As in `Parameters`, with F as what a swap must raise; off unless a limit is given.
    tau_query
        Temperature of the affinities from which `strictness=None` reads; None takes the model family's.
    """

    query_aware = True
    info = MethodInfo(
        name="Spotlight",
        paper="query-weighted coverage, a method of this package",
        deviations=("affinities are rounded to a grid on which sums are exact, so that ties are real ties",),
    )

    focus: Focus = "auto"
    exponent: float = 2.0
    centred: bool = True
    equal_views: bool = True
    tau_vision: float = 0.2
    swap_limit: int = 0
    swap_passes: int | None = 1
    swap_epsilon: float = 1e-6
    norm_epsilon: float = 1e-8
    strictness: float | None = 0.0
    tau_query: float | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weighting()
        self.parameters()

    def weighting(self) -> Weighting:
        """How rows are weighted, checked."""
        return Weighting(**{field.name: getattr(self, field.name) for field in fields(Weighting)})

    def parameters(self, tau_query: float = 0.02) -> Parameters:
        """The checked parameters of the greedy run; ``tau_query`` is used where the field is None."""
        own = {name: getattr(self, name) for name in _OWN_PARAMETERS}
        return Parameters(**own, tau_query=tau_query if self.tau_query is None else self.tau_query)

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        tau_query: float = 0.02,
    ) -> Selection:
        """Select on features, without a model; arguments as in `stacktok.select`."""
        if self.budget is None:
            raise ValueError("budget=None keeps everything and selects nothing; give Spotlight a budget")
        unit = PreparedImage(vision, projected, eligible, self.parameters(tau_query))
        k = resolve_budget(self.budget, unit.n, unit.reference.capacity)
        (run,) = weighted_runs([([unit], None)], query, k, self.weighting(), unit.parameters)
        return run.record(k)

    def prepare(self, image: EncodedImage) -> PreparedSpotlight:
        """The affinities among the tokens of every crop."""
        parameters = self.parameters(image.tau_query)
        several = len(image.crops) > 1
        units = [
            PreparedImage(crop.vision, crop.projected, crop.eligible, parameters, f"crop {c}: " if several else "")
            for c, crop in enumerate(image.crops)
        ]
        return PreparedSpotlight(self, image, units)

    def reduce_shared(
        self, prepared: Sequence[Prepared], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """One run over all crops of the prompt."""
        own = [image for image in prepared if isinstance(image, PreparedSpotlight)]
        if len(own) < len(prepared):
            raise TypeError("prepared holds an image that another method prepared; give those of Spotlight.prepare")
        record = self.record(own, query, budget)
        reductions, first = [], 0
        for image in own:
            part = part_of(record, first, len(image.units))
            reductions.append(image.image.keep(part.indices, record=part, keep_newlines=self.keep_newlines))
            first += len(image.units)
        return reductions

    def record(
        self, prepared: Sequence[PreparedSpotlight], query: torch.Tensor | None, budget: Budget
    ) -> CropSelection:
        """The record of a run over all crops of some images, Algorithm 2 with the gain of F."""
        capacity = sum(image.image.capacity for image in prepared)
        k = resolve_budget(budget, sum(image.image.n for image in prepared), capacity)
        images = [(image.units, image.image.layout.base) for image in prepared]
        parameters = self.parameters(prepared[0].image.tau_query)
        return spend(weighted_runs(images, query, k, self.weighting(), parameters), k)


class PreparedSpotlight(PreparedSelector):
    """An image whose affinities among its own tokens are done."""

    def __init__(self, method: Spotlight, image: EncodedImage, units: Sequence[PreparedImage]) -> None:
        super().__init__(image, units, keep_newlines=method.keep_newlines)
        self.method = method

    def on_device(self, budget: Budget) -> bool:
        """No: the weights of the rows are read in between."""
        return False

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """One greedy run over all crops."""
        crops = self.method.record([self], query, budget)
        record = crops if len(crops.crops) > 1 else crops.crops[0]
        return self.image.keep(crops.indices, record=record, keep_newlines=self.keep_newlines)
