"""A vision tower that is given a part of a picture's cells: its arguments, and its output made whole again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class PartialTower:
    """Which tokens of a call of the tower are encoded.

    Attributes
    ----------
    kept
        Which tokens of all images of the call, in raster order, (n,).
    source
        For every token the index of the encoded one that stands for it, (n,).
    unit
        Patches per token.
    arguments
        Further arguments of the tower: positions, boundaries of sequences and what else it derives from whole grids.
    order
        Index of every token in raster order, in the order of the tower, (n,); None where the two are the same.
    """

    kept: torch.Tensor
    source: torch.Tensor
    unit: int
    arguments: Mapping[str, Any]
    order: torch.Tensor | None = None

    @property
    def patches(self) -> torch.Tensor:
        """Which patches are encoded, (n unit,)."""
        return self.kept.repeat_interleave(self.unit)

    @property
    def numbers(self) -> torch.Tensor:
        """For every token the number of the encoded one that stands for it, (n,)."""
        return (self.kept.long().cumsum(0) - 1)[self.source]

    def tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the encoded tokens in raster order, (k, ...), as those of all tokens, (n, ...)."""
        return values[self.numbers.to(values.device)]

    def tower_patches(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the encoded patches in the order of the tower, (k unit, ...), as those of all, (n unit, ...)."""
        units = values.reshape(-1, self.unit, *values.shape[1:])
        if self.order is not None:
            order = self.order.to(values.device)
            mine = order[self.kept.to(values.device)[order]]
            units = units[torch.argsort(mine)]
            return self.tokens(units)[order].flatten(0, 1)
        return self.tokens(units).flatten(0, 1)


def frame_boundaries(kept: torch.Tensor, grid: torch.Tensor, unit: int) -> torch.Tensor:
    """Cumulative numbers of encoded patches at the end of every frame, with 0 in front, in int32.

    Parameters
    ----------
    kept
        Which tokens are encoded, (n,).
    grid
        Temporal patches, rows and columns of patches of every image, (images, 3).
    unit
        Patches per token.
    """
    sizes = [h * w // unit for t, h, w in grid.tolist() for _ in range(t)]
    counts = torch.stack([frame.sum() for frame in torch.split(kept, sizes)]) * unit
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(dtype=torch.int32, device=grid.device)
