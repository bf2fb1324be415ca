"""Methods that read the vision tower's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

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
    def tower_signal(self) -> str | None:
        """The field `signal`."""
        return self.signal

    def by_attention(self, crop: EncodedCrop) -> Ints:
        """Eligible tokens by the tower's attention, most first; ties to the lowest index."""
        eligible = np.flatnonzero(crop.eligible)
        scores = self.attention_of(crop).scores.cpu().numpy()[eligible]
        ranked: Ints = eligible[np.argsort(-scores, kind="stable")]
        return ranked
