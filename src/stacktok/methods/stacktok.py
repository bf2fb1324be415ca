"""StackTok: relevance as the objective, coverage as budget-calibrated support (Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from stacktok.core.affinity import query_affinities
from stacktok.core.budget import Budget, Coverage, resolve_budget
from stacktok.core.crops import PreparedCrops
from stacktok.core.inputs import Array, Eligible
from stacktok.core.parameters import Allocation, Criterion, Depth, Fill, Parameters, Target
from stacktok.core.record import CropSelection, Selection
from stacktok.core.selection import PreparedImage
from stacktok.core.tokens import DeviceReduction, EncodedImage, Reduction
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.methods.info import MethodInfo


@dataclass(frozen=True)
class StackTok(FeatureMethod):
    """The paper's selector; the fields below `keep_newlines` are those of `Parameters`, under the same names.

    Parameters
    ----------
    tau_query
        Temperature of the query affinities; None takes the model family's (0.02, on Qwen2.5-VL 0.01).
    """

    query_aware = True
    adapts = True
    info = MethodInfo(
        name="StackTok",
        paper="StackTok, the paper of this package",
        deviations=(
            "affinities are rounded to a grid on which sums are exact, so that ties are real ties",
            "tokens that are nothing but a space, which Llama's tokenizer puts before some words, are no query rows",
        ),
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
        own = {field.name: getattr(self, field.name) for field in fields(Parameters)}
        return Parameters(**own | {"tau_query": tau_query if self.tau_query is None else self.tau_query})

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
        return PreparedImage(vision, projected, eligible, self.parameters(tau_query)).select(query, self.budget)

    def prepare(self, image: EncodedImage) -> PreparedSelector:
        """The affinities among the tokens of every crop."""
        parameters = self.parameters(image.tau_query)
        several = len(image.crops) > 1
        units = [
            PreparedImage(crop.vision, crop.projected, crop.eligible, parameters, f"crop {c}: " if several else "")
            for c, crop in enumerate(image.crops)
        ]
        return PreparedSelector(image, units, keep_newlines=self.keep_newlines)

    def reduce_shared(
        self, prepared: Sequence[Prepared], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Algorithm 2 over all crops of the prompt."""
        own = [image for image in prepared if isinstance(image, PreparedSelector)]
        if len(own) < len(prepared):
            raise TypeError("prepared holds an image that another method prepared; give those of StackTok.prepare")
        record = PreparedCrops([unit for image in own for unit in image.units]).select(query, budget)
        reductions, first = [], 0
        for image in own:
            part = part_of(record, first, len(image.units))
            reductions.append(image.image.keep(part.indices, record=part, keep_newlines=self.keep_newlines))
            first += len(image.units)
        return reductions


class PreparedSelector(Prepared):
    """An image whose affinities among its own tokens are done.

    Parameters
    ----------
    image
        The encoded image.
    units
        The selector's state of every crop.
    keep_newlines
        As in `FeatureMethod`.
    per_crop
        Whether every crop gets the whole budget.
    """

    def __init__(
        self, image: EncodedImage, units: Sequence[PreparedImage], *, keep_newlines: bool, per_crop: bool = False
    ) -> None:
        super().__init__(image)
        self.units, self.keep_newlines, self.per_crop = tuple(units), keep_newlines, per_crop

    @property
    def nbytes(self) -> int:
        """Bytes of A^vv, and of what every question needs of the tokens."""
        return sum(unit.nbytes for unit in self.units)

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Algorithm 1 on a single crop, Algorithm 2 on several; on a GPU nothing waits for the decision."""
        if Coverage.of(budget) is None and not self.keep_newlines and not self.per_crop and self._on_device:
            return self._reduce_on_device(query, budget)
        return self._reduce(query, budget)

    @property
    def _on_device(self) -> bool:
        if any(unit.reference.backend != "triton" for unit in self.units):
            return False
        # Triton loads with the first selection, not with the package.
        from stacktok.core.device import keeps

        return keeps([unit.reference for unit in self.units], self.units[0].parameters)

    def _reduce_on_device(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        from stacktok.core.device import keep, kept_offsets

        first, image = self.units[0], self.image
        queries = query_affinities(first.question(query), [unit.embeddings for unit in self.units], first.parameters)
        total = resolve_budget(budget, image.n, image.capacity)
        references = [unit.reference for unit in self.units]
        masks = keep(list(zip(references, queries, strict=True)), first.parameters, total)
        offsets = kept_offsets(image.layout, masks, total)
        return DeviceReduction(image.layout, offsets, lambda: self._reduce(query, budget).record)

    def _reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """The reduction with its record."""
        record: Selection | CropSelection | tuple[Selection, ...]
        if self.per_crop or len(self.units) == 1:
            records = tuple(unit.select(query, budget) for unit in self.units)
            record, kept = records if len(records) > 1 else records[0], [one.indices for one in records]
        else:
            record = PreparedCrops(self.units).select(query, budget)
            kept = list(record.indices)
        return self.image.keep(kept, record=record, keep_newlines=self.keep_newlines)


def part_of(record: CropSelection, first: int, count: int) -> CropSelection:
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
