"""StackTok: relevance as the objective, coverage as budget-calibrated support (Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from stacktok.core.budget import Budget
from stacktok.core.crops import Crop, select_crops
from stacktok.core.inputs import Array, Eligible
from stacktok.core.parameters import Allocation, Criterion, Depth, Fill, Parameters, Target
from stacktok.core.record import CropSelection, Selection
from stacktok.core.selection import select
from stacktok.core.tokens import EncodedCrop, EncodedImage, Reduction
from stacktok.methods.base import FeatureMethod
from stacktok.methods.facts import Facts


@dataclass(frozen=True)
class StackTok(FeatureMethod):
    """The paper's selector; the fields below `keep_newlines` are those of `Parameters`, under the same names.

    Parameters
    ----------
    tau_query
        Temperature of the query affinities; None takes the model family's (0.02, on Qwen2.5-VL 0.01).
    """

    facts = Facts(
        name="StackTok",
        paper="StackTok, the paper of this package",
        query_aware=True,
        deviations=("affinities are rounded to a grid on which sums are exact, so that ties are real ties",),
    )

    tau_query: float | None = None
    tau_vision: float = 0.2
    beta_min: float = 0.3
    beta_max: float = 0.9
    swap_limit: int = 16
    swap_passes: int | None = 1
    swap_epsilon: float = 1e-6
    norm_epsilon: float = 1e-8
    entropy_floor: float = 1e-12
    relevance_depth: Depth = 1
    strictness: float | None = None
    target: Target = "size"
    criterion: Criterion = "gated"
    fill: Fill = "coverage"
    alpha: float = 0.5
    allocation: Allocation = "shared"
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters()

    def parameters(self, tau_query: float = 0.02) -> Parameters:
        """The checked parameters; ``tau_query`` is used where the field is None."""
        values = {field.name: getattr(self, field.name) for field in fields(Parameters)}
        if self.tau_query is None:
            values["tau_query"] = tau_query
        return Parameters(**values)

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        tau_query: float = 0.02,
    ) -> Selection:
        """Select on features, without a model; see `stacktok.select`."""
        if self.budget is None:
            raise ValueError("budget=None keeps everything and selects nothing; give StackTok a budget")
        settings = self._settings(tau_query)
        return select(vision, projected, query, self.budget, eligible=eligible, **settings)

    def reduce(self, image: EncodedImage, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Algorithm 1 on a single crop, Algorithm 2 on several."""
        settings = self._settings(image.tau_query)
        record: Selection | CropSelection
        if len(image.crops) == 1:
            crop = image.crops[0]
            record = select(crop.vision, crop.projected, query, budget, eligible=crop.eligible, **settings)
            kept: Sequence[Any] = [record.indices]
        else:
            record = select_crops([_crop(crop) for crop in image.crops], query, budget, **settings)
            kept = record.indices
        return image.keep(kept, record=record, keep_newlines=self.keep_newlines)

    def reduce_shared(
        self, images: Sequence[EncodedImage], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Algorithm 2 over all crops of the prompt."""
        crops = [_crop(crop) for image in images for crop in image.crops]
        record = select_crops(crops, query, budget, **self._settings(images[0].tau_query))
        reductions, first = [], 0
        for image in images:
            part = _part(record, first, len(image.crops))
            reductions.append(image.keep(part.indices, record=part, keep_newlines=self.keep_newlines))
            first += len(image.crops)
        return reductions

    def _settings(self, tau_query: float) -> dict[str, Any]:
        parameters = self.parameters(tau_query)
        return {field.name: getattr(parameters, field.name) for field in fields(parameters)}


def _crop(crop: EncodedCrop) -> Crop:
    return Crop(vision=crop.vision, projected=crop.projected, eligible=crop.eligible)


def _part(record: CropSelection, first: int, count: int) -> CropSelection:
    """The record of one image out of a selection over several: its crops, and the steps that it won."""
    own = range(first, first + count)
    steps = np.array([crop in own for crop, _ in record.order], dtype=np.bool_)
    order = tuple((crop - first, token) for crop, token in record.order if crop in own)
    return replace(
        record,
        k=len(order),
        crops=record.crops[first : first + count],
        order=order,
        nominees=record.nominees[steps, first : first + count],
        nominee_gain=record.nominee_gain[steps, first : first + count],
        _not_anytime="a budget shared between images",
    )
