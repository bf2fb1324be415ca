"""Methods that work before the vision tower: which cells of a picture are encoded at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from stacktok.core.budget import Budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, Ints, Reduction
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.methods.info import MethodInfo

if TYPE_CHECKING:
    from stacktok.models.base import ModelAdapter
    from stacktok.runtime.attach import Attachment


@dataclass(frozen=True)
class PixelMethod(ABC):
    """A way to leave cells of a picture out before the vision tower; a cell is what becomes one token.

    Cells that are left out never enter the tower, and their placeholders leave the sequence; the others keep their
    positions in both. Used by itself, ``with PixelPrune()(model, processor)``, or in front of another method,
    ``StackTok(budget=64, before=PixelPrune())``.

    Attributes
    ----------
    info
        What tables say about it.
    """

    stage: ClassVar[str] = "tower"
    info: ClassVar[MethodInfo] = MethodInfo(name="unnamed", paper="")

    @property
    def needs_levels(self) -> bool:
        """Whether it must be given pixels on the scale from 0 to 1, not only equal ones as equal."""
        return True

    @abstractmethod
    def keep(self, cells: torch.Tensor) -> tuple[Mask, Ints]:
        """Which cells of one frame are encoded.

        Parameters
        ----------
        cells
            Pixels of every cell, (h, w, d).

        Returns
        -------
        tuple
            Which are encoded, (h w,), at least one; and for every cell the one whose features stand for it, (h w,).
        """

    def __call__(self, model: Any, processor: Any, *, adapter: ModelAdapter | None = None) -> Attachment:
        """Attach to a transformers model; every cell that is encoded goes on. See `Method.__call__`."""
        return AllTokens(budget=1.0, before=self)(model, processor, adapter=adapter)


@dataclass(frozen=True)
class AllTokens(FeatureMethod):
    """Keeps every token that may be kept, whatever the budget."""

    info = MethodInfo(name="all tokens", paper="control")

    def prepare(self, image: EncodedImage) -> PreparedAll:
        """Nothing to prepare."""
        return PreparedAll(image)


class PreparedAll(Prepared):
    """An image all of whose eligible tokens are kept."""

    @property
    def nbytes(self) -> int:
        """Nothing is held."""
        return 0

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Keep everything, separators included."""
        return self.image.keep([np.flatnonzero(crop.eligible) for crop in self.image.crops], keep_newlines=True)
