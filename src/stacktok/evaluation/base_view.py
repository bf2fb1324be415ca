"""A control for several crops: the base view alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stacktok.core.budget import Budget
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.methods.base import FeatureMethod, Prepared


@dataclass(frozen=True)
class BaseView(FeatureMethod):
    """All of the first crop and nothing of the tiles, whatever the budget: the distance to the full model is theirs."""

    plan_name: ClassVar[str] = "base-view"

    def prepare(self, image: EncodedImage) -> Prepared:
        """Nothing to do."""
        return _FirstCrop(image)


class _FirstCrop(Prepared):
    nbytes = 0

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        first, *tiles = (np.flatnonzero(crop.eligible) for crop in self.image.crops)
        return self.image.keep([first, *(tile[:0] for tile in tiles)])
