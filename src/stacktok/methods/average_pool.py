"""A control: average pooling to the same number of tokens."""

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
class AveragePool(PickMethod):
    """The mean post-projector embedding of every cell of an even grid; crops share the budget by their size."""

    facts = Facts(name="Average pooling", paper="control", query_aware=False, merges=True)
    spread = "proportional"

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """One mean per cell, at the place of the cell's middle token."""
        embeddings, sources = {}, {}
        anchors = []
        for cell in cells(crop.grid, crop.eligible, k):
            anchor = centre(cell, crop.grid)
            anchors.append(anchor)
            if len(cell) > 1:
                rows = crop.projected[torch.from_numpy(cell).to(crop.projected.device)]
                embeddings[anchor] = rows.float().mean(0).to(rows.dtype)
                sources[anchor] = cell
        order = np.array(anchors, dtype=np.int64)
        return Choice(crop.n, np.sort(order), order, embeddings, sources)

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        grid: tuple[int, int] | None = None,
    ) -> Choice:
        """Pool features; ``grid`` gives rows and columns, a square where it is None and n is one."""
        return self.select_crop(as_crop(vision, projected, query, eligible, grid), query)
