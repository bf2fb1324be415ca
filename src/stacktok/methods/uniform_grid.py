"""A control: tokens at even distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.cells import cells, centre
from stacktok.methods.crop_methods import PickMethod
from stacktok.methods.info import MethodInfo


@dataclass(frozen=True)
class UniformGrid(PickMethod):
    """The middle token of every cell of an even grid; crops share the budget by their size."""

    crops = "proportional"
    info = MethodInfo(name="Uniform grid", paper="control")

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """One token per cell."""
        return np.array([centre(cell, crop.grid) for cell in cells(crop.grid, crop.eligible, k)])
