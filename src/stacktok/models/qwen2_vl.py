"""Qwen2-VL: dynamic resolution, 2 x 2 merging, M-RoPE; images and videos."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stacktok.models.merged import MergedPatchAdapter
from stacktok.models.partial import PartialTower, frame_boundaries
from stacktok.models.query import question_words

# What the chat template writes before images and videos under add_vision_id.
_NUMBER = re.compile(r"(?:Picture|Video) \d+: (?=<\|vision_start\|>)")


class Qwen2VLAdapter(MergedPatchAdapter):
    """Qwen2VLForConditionalGeneration."""

    family = "Qwen2-VL"
    tau_query = 0.01

    def user_text(self, turn: str) -> str:
        """The turn without the numbers of images and videos."""
        return _NUMBER.sub("", turn)

    def query_words(self, text: str) -> list[str]:
        """The question-prefixed text, unfiltered."""
        return question_words(text)

    def partial_encoder(self, model: Any) -> nn.Module:
        """The tower works on any set of patches with positions."""
        return self.base(model).visual  # type: ignore[return-value]

    def cells(self, call_arguments: Mapping[str, Any], model: Any, modality: str) -> list[torch.Tensor]:
        """The processor's patches, of which those of a token stand together."""
        pixels = call_arguments["pixel_values" if modality == "image" else "pixel_values_videos"]
        grid = call_arguments[f"{modality}_grid_thw"]
        merge, channels = model.config.vision_config.spatial_merge_size, _channels(model.config.vision_config)
        images = torch.split(pixels, [t * h * w for t, h, w in grid.tolist()])
        return [
            rows.reshape(t, h // merge, w // merge, merge * merge, channels, -1).transpose(3, 4).flatten(4)
            for rows, (t, h, w) in zip(images, grid.tolist(), strict=True)
        ]

    def partial_tower(self, model: Any, grid: torch.Tensor, kept: torch.Tensor, source: torch.Tensor) -> PartialTower:
        """Positions of the kept patches; frames attend within themselves."""
        from transformers.vision_utils import get_vision_position_ids

        merge = model.config.vision_config.spatial_merge_size
        part = PartialTower(kept, source, merge * merge, {})
        arguments = {
            "position_ids": get_vision_position_ids(grid, merge)[part.patches.to(grid.device)],
            "cu_seqlens": frame_boundaries(kept, grid, merge * merge),
        }
        return PartialTower(kept, source, merge * merge, arguments)


def _channels(config: Any) -> int:
    return int(getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3)
