"""Gemma 3: 4 x 4 patches pooled into one token; image tokens see each other in every layer.

The language model is given ready masks, in which the tokens of an image attend to one another both ways. They are
gathered for the kept tokens: masks that are built again would be causal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features, ModelAdapter, TowerReading
from stacktok.models.tiles import pooled, pooled_attention

_PAN_AND_SCAN = re.compile(
    r"(Here is the original image|and here are some crops to help you see better)(?=\s*<start_of_image>)"
)


class Gemma3Adapter(ModelAdapter):
    """Gemma3ForConditionalGeneration; crops of pan and scan are images of their own."""

    family = "Gemma 3"
    gathers_masks = True

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop per image."""
        side = round(config.mm_tokens_per_image**0.5)
        return ImageLayout.raster((side, side))

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The mean of the patches that were pooled into a token, and the projector's output."""
        patches, block = _sizes(call.config)
        vision = pooled(call.output.last_hidden_state, patches, patches, block)
        return list(zip(vision, call.units, strict=True))

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last layer; there is no CLS."""
        tower: Any = self.base(model).vision_tower
        return tower, tower.encoder.layers[-1].self_attn, False

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """Means over the patches of a token."""
        patches, block = _sizes(call.config)
        return pooled_attention(images, reading, [(patches, patches)] * len(reading.scores), block)

    def ranking_attention(self, model: Any, layer: int) -> nn.Module:
        """None: the masks of the layers behind a cut would have to be made again."""
        raise ValueError(masks_refusal(self.family))

    def user_text(self, turn: str) -> str:
        """Without the words that pan and scan puts before the picture and its crops."""
        return _PAN_AND_SCAN.sub("", turn)


def masks_refusal(family: str) -> str:
    """Why no token is dropped between the layers of a family's language model."""
    return (
        f"the layers of {family} are given ready masks, of image tokens that see each other and of sliding windows, "
        "which cannot be shortened between layers; use a method that works before the language model"
    )


def _sizes(config: Any) -> tuple[int, int]:
    """Patches of a picture's side, and of a token's."""
    patches = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
    return patches, patches // round(config.mm_tokens_per_image**0.5)
