"""HiPrune: tokens that a middle layer of the vision tower attends to, their neighbours, and those of a deep layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import Crops, PickMethod
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod


@dataclass(frozen=True)
class HiPrune(TowerMethod, PickMethod):
    """Anchors by the attention of a middle layer, the four neighbours of each, the rest by the last layer's attention.

    Parameters
    ----------
    signal
        As in the other methods, but by default what is read is the attention that a token receives from all.
    alpha
        Share of the budget that goes to anchors and their neighbours.
    object_depth
        Share of the tower's layers at whose end the anchors are read: 9 of 24 on CLIP as published; on Qwen2.5-VL the
        next layer that sees the whole image is 16 of 32, which the authors take.
    """

    info = MethodInfo(
        name="HiPrune",
        paper="HiPrune, arXiv 2508.00553",
        deviations=(
            "attention received is a mean over patches; the original's mean has the row of CLS too",
            "anchors and neighbours that exceed the budget are cut off, and tokens that may not be kept are no "
            "neighbours; the original fails on the one and does not know the other",
        ),
    )
    crops: ClassVar[Crops] = "uniform"

    signal: Literal["cls", "received"] | None = "received"
    alpha: float = 0.1
    object_depth: float = 9 / 24

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "object_depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} is not a share; give a number in [0, 1]")

    @property
    def tower_signal(self) -> TowerSignal:
        """Two layers."""
        return replace(super().tower_signal, early=self.object_depth)

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """Anchors and neighbours, then registers."""
        anchors = self.by_early_attention(crop)[: round(k * self.alpha / 5)]
        # As in the original, the neighbours of a row's last token begin the next row.
        around = np.concatenate([anchors + step for step in (0, -1, 1, -crop.grid[1], crop.grid[1])])
        first = np.unique(np.clip(around, 0, crop.n - 1))
        first = first[crop.eligible[first]][:k]
        deep = self.by_attention(crop)
        return np.concatenate([first, deep[~np.isin(deep, first)][: k - len(first)]])
