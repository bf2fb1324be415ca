"""SCOPE: coverage of the image by salient tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stacktok.core.affinity import given_affinity, on_grid
from stacktok.core.greedy import get_backend
from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.kernels import Problem, Rule
from stacktok.kernels.transfer import upload
from stacktok.methods.crop_methods import Crops, PickMethod
from stacktok.methods.divprune import cosines
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod


@dataclass(frozen=True)
class SCOPE(TowerMethod, PickMethod):
    """Greedy facility location on cosines of pre-projector features, gains times the vision tower's attention.

    Each step picks the token of the largest a_j^alpha sum_i [cos_ij - max over the kept of cos_i]_+.

    Parameters
    ----------
    alpha
        Power of the attention; 0 is coverage alone.
    """

    nested = True
    info = MethodInfo(
        name="SCOPE",
        paper="SCOPE, NeurIPS 2025",
        deviations=(
            "cosines in float32 whatever the model's type, on a grid on which sums are exact; the original stays in "
            "half precision",
            "LLaVA-NeXT: tokens of the letterbox, which the model itself drops, are covered but cannot be kept",
            "towers without CLS: the attention that a token receives from all",
        ),
    )
    crops: ClassVar[Crops] = "uniform"

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha={self.alpha!r} must be finite and at least 0; give 1 for the published method")

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """The greedy order."""
        similarity = given_affinity(cosines(crop.vision, "vision").clamp_(0, 1), "vision")
        weights = self.attention_of(crop).scores.double().cpu().numpy() ** self.alpha
        backend = get_backend("auto")
        no_query = np.zeros((0, crop.n), dtype=similarity.dtype)
        state = backend.precompute(similarity, crop.eligible)
        (steps,) = backend.greedy([Problem(state, no_query, np.zeros(k), Rule.COVERAGE, weights=weights)])
        order: Ints = steps.order
        return order

    def pick_on_device(
        self, sets: Sequence[EncodedCrop], queries: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """The greedy orders, in one launch."""
        from stacktok.kernels import triton

        problems = []
        for crop, k in zip(sets, sizes, strict=True):
            similarity = on_grid(cosines(crop.vision, "vision", host=False).clamp_(0, 1))
            state = triton.precompute(similarity, upload(crop.eligible, similarity.device))
            weights = self.attention_of(crop).scores.double() ** self.alpha
            targets = torch.zeros(k, dtype=torch.float64, device=similarity.device)
            problems.append(Problem(state, similarity[:0], targets, Rule.COVERAGE, weights=weights))
        return [steps.order for steps in triton.greedy(problems)]
