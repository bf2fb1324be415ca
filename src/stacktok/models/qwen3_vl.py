"""Qwen3-VL and its mixture of experts: timestamped frames, and DeepStack.

The language model adds further features of the tower to the hidden states of visual tokens after its first layers.
Those features, and the mask that says whose they are, lose the tokens that go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stacktok.kernels.transfer import upload
from stacktok.models.base import KeptTokens
from stacktok.models.partial import PartialTower
from stacktok.models.qwen2_vl import Qwen2VLAdapter

_TIMESTAMP = re.compile(r"<\d+\.\d seconds>(?=<\|vision_start\|>)")


class TimestampedQwenAdapter(Qwen2VLAdapter):
    """A video is one run of placeholders per temporal patch, each after its time; all runs share one budget."""

    def user_text(self, turn: str) -> str:
        """The turn without the times of frames and the numbers of images and videos."""
        return super().user_text(_TIMESTAMP.sub("", turn))

    def partial_tower(self, model: Any, grid: torch.Tensor, kept: torch.Tensor, source: torch.Tensor) -> PartialTower:
        """Learned positions are interpolated to the whole grid; the kept patches have theirs."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        part = super().partial_tower(model, grid, kept, source)
        visual: Any = self.base(model).visual
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=model.config.vision_config.spatial_merge_size,
        )
        patches = part.patches.to(indices.device)
        learned = {"interp_indices": indices[patches], "interp_weights": weights[patches]}
        return replace(part, arguments={**part.arguments, **learned})


class Qwen3VLAdapter(TimestampedQwenAdapter):
    """Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration."""

    family = "Qwen3-VL"

    def shorten(self, kwargs: Mapping[str, Any], kept: KeptTokens) -> dict[str, Any]:
        """DeepStack: the mask of visual tokens, and their features; those of a merged token are averaged."""
        visual, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
        if visual is None or features is None:
            return {}
        mask = kept.gather(visual) & upload(kept.valid, visual.device)
        # A feature belongs to the visual token of the same number, counted over the batch.
        numbers, outputs = (own.flatten().cumsum(0).reshape(own.shape) - 1 for own in (visual, mask))
        count = int(mask.sum()) if kept.visual is None else kept.visual
        # A stable sort brings the visual tokens to the front; a search for them would have to be waited for.
        places = mask.flatten().to(torch.uint8).sort(descending=True, stable=True).indices[:count]
        chosen = kept.gather(numbers).flatten()[places]
        shorter = [rows[chosen.to(rows.device)] for rows in features]
        for row, token, sources in kept.merged:
            of = numbers[row, sources.to(numbers.device)]
            for rows, pruned in zip(features, shorter, strict=True):
                pruned[outputs[row, token]] = rows[of.to(rows.device)].mean(0)
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": shorter}

    def ranking_attention(self, model: Any, layer: int) -> nn.Module:
        """Any layer from the last on that DeepStack features are added after."""
        last = len(model.config.vision_config.deepstack_visual_indexes) - 1
        if layer < last:
            raise ValueError(
                f"{self.family} adds visual features to the hidden states after layers 0 to {last}, so no token can go "
                f"after layer {layer}; cut after layer {last} or later (FastV: full_layers={last + 1})"
            )
        return super().ranking_attention(model, layer)
