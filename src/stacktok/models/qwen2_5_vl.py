"""Qwen2.5-VL: as Qwen2-VL, with window attention in most blocks of the tower, which works in window order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stacktok.models.base import EncoderCall
from stacktok.models.qwen2_vl import Qwen2VLAdapter


class Qwen2_5_VLAdapter(Qwen2VLAdapter):  # noqa: N801 - the family's own spelling
    """Qwen2_5_VLForConditionalGeneration."""

    family = "Qwen2.5-VL"

    def raster(self, call: EncoderCall, values: torch.Tensor) -> torch.Tensor:
        """Tokens are merged in window order."""
        return values[torch.argsort(window_order(call).to(values.device))]

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last block that attends over the whole image; there is no CLS."""
        visual: Any = self.base(model).visual
        return visual, visual.blocks[max(model.config.vision_config.fullatt_block_indexes)].attn, False


def window_order(call: EncoderCall) -> torch.Tensor:
    """For every merged token in window order its raster index, (n,)."""
    from transformers.vision_utils import get_vision_window_index

    config = call.config.vision_config
    order, _ = get_vision_window_index(
        call.arguments[f"{call.modality}_grid_thw"],
        spatial_merge_size=config.spatial_merge_size,
        window_size=config.window_size,
        patch_size=config.patch_size,
    )
    return order
