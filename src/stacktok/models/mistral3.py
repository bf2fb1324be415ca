"""Mistral 3 and Pixtral: dynamic resolution, 2 x 2 merging or none, every row of tokens closed by a text token.

``[IMG_BREAK]`` stands between the rows of an image as a token of the prompt. It is layout, as LLaVA-NeXT's newlines
are: breaks are dropped from a pruned image, unless ``keep_newlines`` keeps those of the rows that still have tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.tokens import CropLayout, EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features, ModelAdapter, TowerReading
from stacktok.models.tiles import pooled, pooled_attention


class Mistral3Adapter(ModelAdapter):
    """Mistral3ForConditionalGeneration, and LlavaForConditionalGeneration with a Pixtral tower."""

    family = "Mistral 3 and Pixtral"
    text_separators = True

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop; a break after every row but the last."""
        if inputs.get("image_sizes") is None:
            raise ValueError(
                f"image features of {self.family} need their image_sizes; compute them inside the with block, or pass "
                "pixel_values"
            )
        cell = int(config.vision_config.patch_size) * _merge(config)
        rows, columns = (int(length) // cell for length in inputs["image_sizes"])
        line = np.repeat(np.arange(rows), columns)
        offsets = line * (columns + 1) + np.tile(np.arange(columns), rows)
        crop = CropLayout(
            (rows, columns), np.ones(rows * columns, dtype=np.bool_), offsets, np.where(line < rows - 1, line, -1)
        )
        return ImageLayout((crop,), rows * (columns + 1) - 1, np.arange(1, rows) * (columns + 1) - 1)

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The mean of the patches that were merged into a token, and the projector's output."""
        layer = call.arguments.get("vision_feature_layer")
        layer = call.config.vision_feature_layer if layer is None else layer
        chosen = [call.output.hidden_states[index] for index in ([layer] if isinstance(layer, int) else layer)]
        merge = _merge(call.config)
        grids = [(rows * merge, columns * merge) for rows, columns in (one.crops[0].grid for one in layouts)]
        parts = torch.split(torch.cat(chosen, dim=-1)[0], [rows * columns for rows, columns in grids])
        vision = [pooled(part, *grid, merge) for part, grid in zip(parts, grids, strict=True)]
        return list(zip(vision, call.units, strict=True))

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The layer whose output feeds the projector; there is no CLS."""
        tower: Any = self.base(model).vision_tower
        layer = model.config.vision_feature_layer
        layer = layer if isinstance(layer, int) else layer[-1]
        return tower, tower.transformer.layers[layer if layer < 0 else layer - 1].attention, False

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """Means over the patches of a token; the tower attends over all images of a call in one sequence."""
        if len(images) > 1 and "flash" in call.config.vision_config._attn_implementation:
            raise ValueError(
                f"the vision tower of {self.family} tells several images apart by a mask, which FlashAttention is not "
                "given, so their attention cannot be read; load the model with attn_implementation='sdpa'"
            )
        merge = _merge(call.config)
        grids = [(rows * merge, columns * merge) for rows, columns in (image.crops[0].grid for image in images)]
        sizes = [rows * columns for rows, columns in grids]
        (scores,), (keys,) = reading.scores, reading.keys
        parts = TowerReading(list(torch.split(scores, sizes)), list(torch.split(keys, sizes)), False)
        return pooled_attention(images, parts, grids, merge)


def _merge(config: Any) -> int:
    """Patches of a token's side."""
    return int(getattr(config, "spatial_merge_size", 1))
