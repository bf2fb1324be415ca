"""MMTok: one facility location over the stacked rows of the query's and the image's affinities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stacktok.core.budget import Budget
from stacktok.core.inputs import Array, Eligible
from stacktok.core.record import Selection
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.methods.info import MethodInfo
from stacktok.methods.stacktok import PreparedSelector, StackTok


@dataclass(frozen=True)
class MMTok(FeatureMethod):
    """Greedy maximisation of R(S) + alpha C(S): the selector's `criterion="scalarized"`, run by the same kernel.

    Parameters
    ----------
    tau_query
        Temperature of the query affinities; None takes the model family's (0.02, on Qwen2.5-VL 0.01).
    tau_vision
        Temperature of the vision affinities.
    alpha
        Weight of the image's rows.
    allocation
        How crops share a budget: "uniform" gives each an equal share; "per_crop" gives each the whole budget, as the
        original's parameter does; "shared" spends one budget over all crops where it gains most.
    norm_epsilon
        Lower bound of the norm that features are divided by.
    backend
        As in `Parameters`.
    """

    query_aware = True
    keeps_blank_rows = True
    info = MethodInfo(
        name="MMTok",
        paper="MMTok, ICLR 2026, arXiv 2508.18264",
        deviations=(
            "features are cast up before they are normalised; the original takes norms in half precision",
            "affinities are rounded to a grid on which sums are exact, so that ties are real ties",
            "LLaVA-NeXT: the budget is the image's and split evenly over its crops; the original's is per crop, so "
            "that its 640, 320 and 160 are upper bounds (allocation='per_crop' with 128, 64, 32)",
            "LLaVA-NeXT: tokens of the letterbox, which the model itself drops, cannot be kept",
            "without a query it covers the image alone; the original asks what is to be seen",
        ),
    )

    tau_query: float | None = None
    tau_vision: float = 0.2
    alpha: float = 0.5
    allocation: Literal["uniform", "shared", "per_crop"] = "uniform"
    norm_epsilon: float = 1e-8
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allocation not in ("uniform", "shared", "per_crop"):
            raise ValueError(f"allocation={self.allocation!r} is not known; use 'uniform', 'shared' or 'per_crop'")
        self._selector()

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        tau_query: float = 0.02,
    ) -> Selection:
        """Select on features, without a model; ``tau_query`` is used where the field is None."""
        if self.budget is None:
            raise ValueError("budget=None keeps everything and selects nothing; give MMTok a budget")
        return self._selector().select(vision, projected, query, eligible, tau_query=tau_query)

    def prepare(self, image: EncodedImage) -> PreparedSelector:
        """The affinities among the tokens of every crop."""
        units = self._selector().prepare(image).units
        per_crop = self.allocation == "per_crop"
        return PreparedSelector(image, units, keep_newlines=self.keep_newlines, per_crop=per_crop)

    def reduce_shared(
        self, prepared: Sequence[Prepared], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """All crops of the prompt under one budget."""
        if self.allocation == "per_crop":
            raise ValueError("share_budget=True contradicts allocation='per_crop'; use 'shared' or 'uniform'")
        return self._selector().reduce_shared(prepared, query, budget)

    def _selector(self) -> StackTok:
        return StackTok(
            budget=self.budget,
            positions=self.positions,
            keep_newlines=self.keep_newlines,
            tau_query=self.tau_query,
            tau_vision=self.tau_vision,
            alpha=self.alpha,
            norm_epsilon=self.norm_epsilon,
            allocation="shared" if self.allocation == "shared" else "uniform",
            criterion="scalarized",
            swap_limit=0,
            backend=self.backend,
        )
