"""StackTok: relevance as the objective, coverage as budget-calibrated support (Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from stacktok.core.affinity import query_affinities
from stacktok.core.budget import Budget, Coverage, resolve_budget
from stacktok.core.crops import PreparedCrops
from stacktok.core.inputs import Array, Eligible
from stacktok.core.parameters import Allocation, Criterion, Depth, Fill, Parameters, Target
from stacktok.core.record import CropSelection, Selection
from stacktok.core.selection import PreparedImage
from stacktok.core.tokens import EncodedImage, KeptOnDevice, Reduction
from stacktok.methods.base import Asked, FeatureMethod, Prepared, reduce_on_device
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
        if self.on_device(budget):
            return reduce_on_device([Asked(self, query, budget)])[0]
        return self.reduce_on_host(query, budget)

    def on_device(self, budget: Budget) -> bool:
        """Whether nothing between affinities and kept tokens needs a look at the numbers."""
        unknown = self.keep_newlines or Coverage.of(budget) is not None
        if unknown or any(unit.reference.backend != "triton" for unit in self.units):
            return False
        # Triton loads with the first selection, not with the package.
        from stacktok.core.device import keeps

        return keeps([unit.reference for unit in self.units], self.units[0].parameters)

    @classmethod
    def keep_on_device(cls, questions: Sequence[Asked]) -> list[KeptOnDevice]:
        """Algorithms 1 and 2 and the swaps, each in one launch for all images."""
        from stacktok.core.device import keep

        images, budgets = [], []
        for one in questions:
            for units, total in one.prepared.shares(one.budget):
                first, embeddings = units[0], [unit.embeddings for unit in units]
                queries = query_affinities(first.question(one.query), embeddings, first.parameters)
                images.append(list(zip([unit.reference for unit in units], queries, strict=True)))
                budgets.append(total)
        masks = iter(keep(images, questions[0].prepared.units[0].parameters, budgets))
        found = []
        for one in questions:
            shares = one.prepared.shares(one.budget)
            own = [mask for _ in shares for mask in next(masks)]
            found.append(KeptOnDevice(own, sum(total for _, total in shares), one.prepared.recorder(one)))
        return found

    def recorder(self, question: Asked) -> Callable[[], Any]:
        """Makes the record of a question by a second run, which returns the same bits."""
        return lambda: self.reduce_on_host(question.query, question.budget).record

    def shares(self, budget: Budget) -> list[tuple[Sequence[PreparedImage], int]]:
        """The crops that share a budget, and that budget as a count."""
        if self.per_crop:
            return [([unit], resolve_budget(budget, unit.n, unit.reference.capacity)) for unit in self.units]
        return [(self.units, resolve_budget(budget, self.image.n, self.image.capacity))]

    def reduce_on_host(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
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
