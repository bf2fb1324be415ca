"""The shared part of families with dynamic resolution: grids of patches, 2 x 2 merging into tokens, videos, M-RoPE.

The processor orders patches so that those of a token stand together, tokens in raster order, temporal patches (two
frames each) one after the other. The pre-projector feature of a token is the mean of its patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features, ModelAdapter, TowerReading, split_attention


class MergedPatchAdapter(ModelAdapter):
    """A tower on patches of any grid, whose neighbours are merged into tokens; images and videos."""

    modalities = {"image": "image_token_id", "video": "video_token_id"}  # noqa: RUF012 - declared as a ClassVar
    mrope = True

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop per image; one per temporal patch (two frames) of a video, all under the video's one budget."""
        frames, rows, columns = merged_grid(inputs, config.vision_config.spatial_merge_size, self.family)
        return ImageLayout.raster(*[(rows, columns)] * frames)

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The mean of the patches that a token was merged from, and the merger's output."""
        vision = self.raster(call, means(call, call.output.last_hidden_state.detach()))
        return list(zip(torch.split(vision, [layout.n for layout in layouts]), call.units, strict=True))

    def raster(self, call: EncoderCall, values: torch.Tensor) -> torch.Tensor:
        """Values of the tokens, (n, d), in the order of the tower, put in raster order; the same for most families."""
        return values

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last block; there is no CLS."""
        visual: Any = self.base(model).visual
        return visual, visual.blocks[-1].attn, False

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """Scores and keys of a token are the means over its patches."""
        scores = self.raster(call, means(call, torch.cat(reading.scores)[:, None]))[:, 0]
        return split_attention(images, scores, self.raster(call, means(call, torch.cat(reading.keys))))


def merged_grid(inputs: Mapping[str, Any], merge: int, family: str) -> tuple[int, int, int]:
    """Temporal patches, rows and columns of merged tokens of one image or video."""
    grid = next((value for name, value in inputs.items() if name.endswith("_grid_thw") and value is not None), None)
    if grid is None:
        raise ValueError(
            f"features of {family} need their image_grid_thw or video_grid_thw; compute them inside the with block, "
            "or pass the pixels"
        )
    frames, height, width = (int(length) for length in grid)
    return frames, height // merge, width // merge


def means(call: EncoderCall, patches: torch.Tensor) -> torch.Tensor:
    """Values of patches, (unit n, d), averaged over the patches of every token, (n, d)."""
    unit = call.config.vision_config.spatial_merge_size**2
    return patches.reshape(len(patches) // unit, unit, -1).mean(1)
