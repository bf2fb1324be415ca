"""Gemma 4: dynamic resolution, 3 x 3 patches pooled inside the tower, per-layer inputs along the sequence.

Where image tokens see each other both ways (sliding layers of the larger models), the ready masks are gathered. Tokens
of a pruned image keep their per-layer inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features, KeptTokens, ModelAdapter, TowerReading
from stacktok.models.gemma3 import masks_refusal
from stacktok.models.tiles import pooled_attention


class Gemma4Adapter(ModelAdapter):
    """Gemma4ForConditionalGeneration; images. Videos and sounds pass unpruned."""

    family = "Gemma 4"
    gathers_masks = True

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop, whose grid follows from the positions of the patches."""
        positions = inputs.get("image_position_ids")
        if positions is None:
            raise ValueError(
                "image features of Gemma 4 need their image_position_ids; compute them inside the with block, or pass "
                "pixel_values"
            )
        block = config.vision_config.pooling_kernel_size
        # Positions are (x, y), -1 in padding.
        columns, rows = (int(last + 1) // block for last in positions.amax(0))
        return ImageLayout.raster((rows, columns))

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The tower's pooled output, which is already one row per token, and the projector's."""
        vision = torch.split(call.output.last_hidden_state, [layout.n for layout in layouts])
        return list(zip(vision, call.units, strict=True))

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last layer; there is no CLS."""
        tower: Any = self.base(model).vision_tower
        return tower, tower.encoder.layers[-1].self_attn, False

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """Means over the patches of a token; padding stands behind the patches of an image."""
        block = call.config.vision_config.pooling_kernel_size
        grids = [(rows * block, columns * block) for rows, columns in (image.crops[0].grid for image in images)]
        sizes = [rows * columns for rows, columns in grids]
        parts = TowerReading(
            [own[:size] for own, size in zip(reading.scores, sizes, strict=True)],
            [own[:size] for own, size in zip(reading.keys, sizes, strict=True)],
            False,
        )
        return pooled_attention(images, parts, grids, block)

    def ranking_attention(self, model: Any, layer: int) -> nn.Module:
        """None: the masks of the layers behind a cut would have to be made again."""
        raise ValueError(masks_refusal(self.family))

    def shorten(self, kwargs: Mapping[str, Any], kept: KeptTokens) -> dict[str, Any]:
        """Inputs of every layer, (B, S, layers, d)."""
        inputs = kwargs.get("per_layer_inputs")
        return {} if inputs is None else {"per_layer_inputs": kept.gather(inputs)}
