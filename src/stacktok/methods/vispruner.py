"""VisPruner: tokens that CLS looks at, and of the rest those unlike all others. FasterVLM is its first half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import Crops, PickMethod
from stacktok.methods.divprune import cosines
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod

# Tokens that go in one round of the original.
_ROUND = 8


@dataclass(frozen=True)
class VisPruner(TowerMethod, PickMethod):
    """A share of the budget by the vision tower's attention, the rest by removing tokens that have a double.

    Parameters
    ----------
    important_ratio
        Share of the budget that attention decides; 1 is FasterVLM.
    """

    info = MethodInfo(
        name="VisPruner",
        paper="VisPruner, ICCV 2025; with ratio 1 FasterVLM, 2024",
        deviations=(
            "LLaVA-NeXT: the budget is the image's and split evenly over its crops; the original's is per crop",
            "an odd number of tokens, which the original cannot pair, leaves the last one in",
            "towers without CLS: the attention that a token receives from all",
        ),
    )
    crops: ClassVar[Crops] = "uniform"

    important_ratio: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.important_ratio, bool) or not 0 <= self.important_ratio <= 1:
            raise ValueError(f"important_ratio={self.important_ratio!r} must lie in [0, 1]; give 1 for FasterVLM")

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """Important tokens by attention, then diverse ones."""
        ranked = self.by_attention(crop)
        important = int(k * self.important_ratio)
        if important == k:
            return ranked[:k]
        similarity = cosines(crop.vision, "vision").cpu().numpy()
        diverse = remove_doubles(similarity, ranked[important:], k - important)
        return np.concatenate([ranked[:important], diverse])


def remove_doubles(similarity: NDArray[np.float32], tokens: Ints, count: int) -> Ints:
    """The ``count`` tokens left when, round by round, those at even places that are most like one at an odd go.

    Parameters
    ----------
    similarity
        Cosine of every pair, (n, n).
    tokens
        The tokens, most important first.
    count
        How many stay.
    """
    while len(tokens) > count:
        pairs = len(tokens) // 2
        even, odd, unpaired = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], tokens[2 * pairs :]
        order = np.argsort(-similarity[np.ix_(even, odd)].max(1), kind="stable")
        gone = min(_ROUND, len(tokens) - count, pairs)
        tokens = np.concatenate([even[order[gone:]], odd, unpaired])
    return tokens
