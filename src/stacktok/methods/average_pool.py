"""A control: average pooling to the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stacktok.core.tokens import EncodedCrop
from stacktok.methods.cells import cells, centre
from stacktok.methods.choice import MergedTokens
from stacktok.methods.crop_methods import MergeMethod
from stacktok.methods.info import MethodInfo


@dataclass(frozen=True)
class AveragePool(MergeMethod):
    """The mean post-projector embedding of every cell of an even grid; crops share the budget by their size."""

    crops = "proportional"
    info = MethodInfo(name="Average pooling", paper="control")

    def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
        """One mean per cell, at the place of the cell's middle token."""
        found = cells(crop.grid, crop.eligible, k)
        several = [cell for cell in found if len(cell) > 1]
        rows = crop.projected
        means = [rows[torch.from_numpy(cell).to(rows.device)].float().mean(0).to(rows.dtype) for cell in several]
        return MergedTokens(
            kept=[int(cell[0]) for cell in found if len(cell) == 1],
            anchors=[centre(cell, crop.grid) for cell in several],
            made=torch.stack(means) if means else rows[:0],
            sources=several,
        )
