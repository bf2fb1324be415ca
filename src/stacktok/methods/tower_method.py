"""Methods that read the vision tower's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import SetMethod


@dataclass(frozen=True)
class TowerMethod(SetMethod):
    """A method that ranks tokens by the vision tower's attention; combine it with one of the other classes.

    Parameters
    ----------
    signal
        What ranks tokens: "cls", the attention that CLS pays them; "received", the attention that all tokens pay them;
        None follows the tower: CLS where it has one.
    """

    reads_tower = True

    signal: Literal["cls", "received"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal not in (None, "cls", "received"):
            raise ValueError(f"signal={self.signal!r} is not known; use 'cls', 'received' or None")

    @property
    def tower_signal(self) -> TowerSignal:
        """The rows of the field `signal`."""
        return TowerSignal(self.signal)

    def by_attention(self, crop: EncodedCrop) -> Ints:
        """Eligible tokens by the tower's attention, most first; ties to the lowest index."""
        return ranked_by(self.attention_of(crop).scores, crop.eligible)

    def by_early_attention(self, crop: EncodedCrop) -> Ints:
        """The same by the attention in the second layer that the method reads."""
        early = self.attention_of(crop).early
        if early is None:
            raise ValueError(
                f"{type(self).__name__} needs the attention of two layers of the vision tower, and these features came "
                "with that of one; give TowerAttention.early, or encode the image inside the with block"
            )
        return ranked_by(early, crop.eligible)


def ranked_by(scores: torch.Tensor, eligible: Mask) -> Ints:
    """Eligible tokens by their scores, (n,), highest first; ties to the lowest index."""
    tokens = np.flatnonzero(eligible)
    ranked: Ints = tokens[np.argsort(-scores.cpu().numpy()[tokens], kind="stable")]
    return ranked
