"""Qwen2.5-VL: dynamic resolution, window attention, 2 x 2 merging, M-RoPE; images and videos.

The vision transformer works on patches in window order and merges four neighbours into one token. The pre-merger
features of a merged token are the mean of its four patches, put back in raster order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.tokens import EncodedCrop, EncodedImage, TowerAttention
from stacktok.models.base import ModelAdapter, TowerReading
from stacktok.models.query import question_words


class Qwen2_5_VLAdapter(ModelAdapter):  # noqa: N801 - the family's own spelling
    """Qwen2_5_VLForConditionalGeneration."""

    family = "Qwen2.5-VL"
    modalities = {"image": "image_token_id", "video": "video_token_id"}  # noqa: RUF012 - declared as a ClassVar
    tau_query = 0.01
    mrope = True

    def encode(
        self, modality: str, output: Any, arguments: Mapping[str, Any], model: Any, processor: Any
    ) -> list[EncodedImage]:
        """One crop per image; one per temporal patch (two frames) of a video, all under the video's one budget."""
        from transformers.vision_utils import get_vision_window_index

        grids = arguments.get(f"{modality}_grid_thw")
        if grids is None:
            raise ValueError(
                f"{modality} features of Qwen2.5-VL need their {modality}_grid_thw; compute them inside the with "
                "block, or pass the pixels"
            )
        config = model.config.vision_config
        merge = config.spatial_merge_size
        order, _ = get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=config.window_size, patch_size=config.patch_size
        )
        vision = merged_features(output.last_hidden_state.detach(), order, merge * merge)
        images, first = [], 0
        for (frames, height, width), projected in zip(grids.tolist(), output.pooler_output, strict=True):
            rows = slice(first, first + len(projected))
            grid = (int(frames), int(height) // merge, int(width) // merge)
            images.append(encode_frames(vision[rows], projected.detach(), grid, tau_query=self.tau_query))
            first = rows.stop
        return images

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last block that attends over the whole image; there is no CLS."""
        visual: Any = self.base(model).visual
        return visual, visual.blocks[max(model.config.vision_config.fullatt_block_indexes)].attn, False

    def add_attention(
        self, images: list[EncodedImage], reading: TowerReading, output: Any, arguments: Mapping[str, Any], model: Any
    ) -> list[EncodedImage]:
        """Scores and keys of a merged token are the means over its four patches, put back in raster order."""
        from transformers.vision_utils import get_vision_window_index

        config = model.config.vision_config
        merge = config.spatial_merge_size
        grids = next(value for name, value in arguments.items() if name.endswith("_grid_thw") and value is not None)
        order, _ = get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=config.window_size, patch_size=config.patch_size
        )
        scores = merged_features(torch.cat(reading.scores)[:, None], order, merge * merge)[:, 0]
        keys = merged_features(torch.cat(reading.keys), order, merge * merge)
        found, first = [], 0
        for image in images:
            crops = []
            for crop in image.crops:
                own = slice(first, first + crop.n)
                crops.append(replace(crop, attention=TowerAttention(scores[own], keys[own])))
                first = own.stop
            found.append(replace(image, crops=tuple(crops)))
        return found

    def query_words(self, text: str) -> list[str]:
        """The question-prefixed text, unfiltered."""
        return question_words(text)


def merged_features(patches: torch.Tensor, window_order: torch.Tensor, unit: int) -> torch.Tensor:
    """Pre-merger features of every merged token, in raster order, (n, d_v).

    Parameters
    ----------
    patches
        The last block's output in window order, (unit n, d_v); a merged token's patches stand together.
    window_order
        For every merged token in window order its raster index, (n,).
    unit
        Patches per merged token.
    """
    means = patches.reshape(len(patches) // unit, unit, -1).mean(1)
    return means[torch.argsort(window_order.to(means.device))]


def encode_frames(
    vision: torch.Tensor, projected: torch.Tensor, grid: Sequence[int], *, tau_query: float = 0.01
) -> EncodedImage:
    """An image or video as crops.

    Parameters
    ----------
    vision, projected
        Features of all merged tokens, (t h w, d_v) and (t h w, d), raster order within each frame.
    grid
        Temporal patches, rows and columns of merged tokens.
    tau_query
        The family's temperature.
    """
    frames, rows, columns = grid
    n = rows * columns
    crops = []
    for frame in range(frames):
        own = slice(frame * n, (frame + 1) * n)
        crops.append(
            EncodedCrop(
                vision=vision[own],
                projected=projected[own],
                grid=(rows, columns),
                eligible=np.ones(n, dtype=np.bool_),
                places=np.arange(own.start, own.stop, dtype=np.int64),
            )
        )
    return EncodedImage(tuple(crops), frames * n, tau_query=tau_query)
