"""A control: tokens at even distances."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.inputs import Array, Eligible
from stacktok.core.tokens import EncodedCrop
from stacktok.methods.cells import cells, centre
from stacktok.methods.facts import Facts
from stacktok.methods.pick import Choice, PickMethod, as_crop


@dataclass(frozen=True)
class UniformGrid(PickMethod):
    """The middle token of every cell of an even grid; crops share the budget by their size."""

    facts = Facts(name="Uniform grid", paper="control", query_aware=False)
    spread = "proportional"

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """One token per cell."""
        return Choice.of(np.array([centre(cell, crop.grid) for cell in cells(crop.grid, crop.eligible, k)]), crop.n)

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Choice:
        """Select on features; ``grid`` gives rows and columns, a square where it is None and n is one."""
        return self.select_crop(as_crop(vision, projected, query, eligible, grid), query)
