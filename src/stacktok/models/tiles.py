"""Tokens that a family makes of a block of patches, and images that are several tiles: shared parts of the adapters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features, ModelAdapter, TowerReading, split_attention


class TilesAdapter(ModelAdapter):
    """Square tiles of equal size, each encoded by itself, a block of whose patches is shuffled into one token.

    How many tiles an image has only the prompt tells: `group` counts them.
    """

    @abstractmethod
    def patches(self, config: Any) -> int:
        """Patches of a tile's side."""

    @abstractmethod
    def block(self, config: Any) -> int:
        """Patches of a token's side."""

    @abstractmethod
    def states(self, call: EncoderCall) -> torch.Tensor:
        """Patch features before pixel shuffle and projector, without CLS, (tiles, patches, d_v)."""

    def side(self, config: Any) -> int:
        """Tokens of a tile's side."""
        return self.patches(config) // self.block(config)

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop per tile, the whole picture last."""
        side, tiles = self.side(config), int(inputs["units"])
        return replace(ImageLayout.raster(*[(side, side)] * tiles), base=tiles - 1 if tiles > 1 else None)

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The mean of the patches that were shuffled into a token, and the projector's output."""
        patches = self.patches(call.config)
        vision = pooled(self.states(call), patches, patches, self.block(call.config))
        tiles = [len(layout.crops) for layout in layouts]
        projected = torch.split(torch.stack(tuple(call.units)), tiles)
        return [(x.flatten(0, 1), z.flatten(0, 1)) for x, z in zip(torch.split(vision, tiles), projected, strict=True)]

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """Means over the patches of a token; one sequence of the tower per tile."""
        patches = self.patches(call.config)
        return pooled_attention(images, reading, [(patches, patches)] * len(reading.scores), self.block(call.config))


def pooled(patches: torch.Tensor, rows: int, columns: int, side: int) -> torch.Tensor:
    """The mean over every block of side x side patches, in raster order.

    Parameters
    ----------
    patches
        Features in raster order, (..., rows columns, d).
    rows, columns
        The grid of patches.
    side
        Patches of a block's side.
    """
    blocks = patches.reshape(*patches.shape[:-2], rows // side, side, columns // side, side, patches.shape[-1])
    return blocks.mean((-4, -2)).flatten(-3, -2)


def pooled_attention(
    images: Sequence[EncodedImage], reading: TowerReading, grids: Sequence[tuple[int, int]], side: int
) -> list[EncodedImage]:
    """Images with the tower's attention; scores and keys of a token are the means over its block of patches.

    Parameters
    ----------
    images
        The images of one encoder call.
    reading
        One sequence per crop, in order.
    grids
        Rows and columns of patches of every sequence.
    side
        Patches of a block's side.
    """
    scores = [pooled(own[:, None], *grid, side)[:, 0] for own, grid in zip(reading.scores, grids, strict=True)]
    keys = [pooled(own, *grid, side) for own, grid in zip(reading.keys, grids, strict=True)]
    return split_attention(images, torch.cat(scores), torch.cat(keys))


def runs(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """First index and length of every run of a token."""
    found: list[tuple[int, int]] = []
    for index, own in enumerate(ids):
        if own != token:
            continue
        if found and sum(found[-1]) == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found
