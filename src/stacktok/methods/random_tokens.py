"""A control: tokens drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import PickMethod
from stacktok.methods.info import MethodInfo


@dataclass(frozen=True)
class RandomTokens(PickMethod):
    """Eligible tokens drawn uniformly, without replacement.

    Parameters
    ----------
    seed
        Decides the draw; images of the same size get the same one.
    """

    nested = True
    info = MethodInfo(name="Random", paper="control")

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """A seeded draw."""
        return np.random.default_rng(self.seed).permutation(np.flatnonzero(crop.eligible))[:k]


def check_seed(seed: object) -> None:
    """Refuse a seed that is not a number 0, 1, ..."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed={seed!r} is not a seed; give an integer of at least 0")
