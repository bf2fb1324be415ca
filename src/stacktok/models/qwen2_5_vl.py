"""Qwen2.5-VL: as Qwen2-VL, with window attention in most blocks of the tower, which works in window order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stacktok.kernels.transfer import upload
from stacktok.models.base import EncoderCall
from stacktok.models.partial import PartialTower
from stacktok.models.qwen2_vl import Qwen2VLAdapter


class Qwen2_5_VLAdapter(Qwen2VLAdapter):  # noqa: N801 - the family's own spelling
    """Qwen2_5_VLForConditionalGeneration."""

    family = "Qwen2.5-VL"

    def raster(self, call: EncoderCall, values: torch.Tensor) -> torch.Tensor:
        """Tokens are merged in window order."""
        return values[upload(torch.argsort(window_order(call).cpu()), values.device)]

    def partial_tower(self, model: Any, grid: torch.Tensor, kept: torch.Tensor, source: torch.Tensor) -> PartialTower:
        """A window holds those of its tokens that are kept; one without any is gone."""
        part = super().partial_tower(model, grid, kept, source)
        order, ends = _windows(model.config.vision_config, grid)
        numbers = kept.long().cumsum(0) - 1
        mine = kept[order]
        counts = torch.nn.functional.pad(mine.long().cumsum(0), (1, 0))
        inner = torch.unique_consecutive(counts[ends.cpu().long() // part.unit] * part.unit)
        windows = {
            "window_index": numbers[order[mine]],
            "cu_window_seqlens": inner.to(dtype=torch.int32, device=grid.device),
        }
        return replace(part, arguments={**part.arguments, **windows}, order=order)

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last block that attends over the whole image; there is no CLS."""
        visual: Any = self.base(model).visual
        return visual, visual.blocks[max(model.config.vision_config.fullatt_block_indexes)].attn, False

    def tower_layer(self, config: Any, layer: int) -> int:
        """The next block that attends over the whole image, or the last such: the others see windows."""
        whole: list[int] = config.vision_config.fullatt_block_indexes
        return min((own for own in whole if own >= layer), default=max(whole))


def window_order(call: EncoderCall) -> torch.Tensor:
    """For every merged token in window order its raster index, (n,)."""
    return _windows(call.config.vision_config, call.arguments[f"{call.modality}_grid_thw"])[0]


def _windows(config: Any, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Raster indices of merged tokens in window order, (n,), and the patches before the end of every window."""
    from transformers.vision_utils import get_vision_window_index

    order, ends = get_vision_window_index(
        grid,
        spatial_merge_size=config.spatial_merge_size,
        window_size=config.window_size,
        patch_size=config.patch_size,
    )
    return order, ends
