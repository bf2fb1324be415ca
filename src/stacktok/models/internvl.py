"""InternVL 3 and 3.5: tiles and a thumbnail, 2 x 2 patches shuffled into one token, a tower with CLS.

The processor does not pass on how many tiles an image has; the prompt tells by the length of the image's run of
placeholders. Frames of a video are images to the model, and to this adapter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stacktok.models.base import EncoderCall
from stacktok.models.tiles import TilesAdapter, runs

_FRAME = re.compile(r"Frame\d+: (?=<img>)")


class InternVLAdapter(TilesAdapter):
    """InternVLForConditionalGeneration."""

    family = "InternVL"

    def patches(self, config: Any) -> int:
        """Patches of a tile's side."""
        vision = config.vision_config
        size, patch = (v[0] if isinstance(v, (list, tuple)) else v for v in (vision.image_size, vision.patch_size))
        return int(size) // int(patch)

    def block(self, config: Any) -> int:
        """Patches of a token's side."""
        return int(1 / config.downsample_ratio)

    def group(self, config: Any, ids: Sequence[int], processor: Any = None) -> list[int]:
        """Tiles of every run of placeholders."""
        return [length // self.side(config) ** 2 for _, length in runs(ids, config.image_token_id)]

    def states(self, call: EncoderCall) -> torch.Tensor:
        """The layer that feeds the projector."""
        layer = call.arguments.get("vision_feature_layer")
        layer = call.config.vision_feature_layer if layer is None else layer
        states: torch.Tensor = call.output.last_hidden_state if layer == -1 else call.output.hidden_states[layer]
        return states[:, states.shape[1] - self.patches(call.config) ** 2 :]

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The layer whose output is shuffled and projected; CLS comes first."""
        tower: Any = self.base(model).vision_tower
        layer = model.config.vision_feature_layer
        return tower, tower.encoder.layer[layer if layer < 0 else layer - 1].attention, True

    def user_text(self, turn: str) -> str:
        """Without the names of a video's frames."""
        return _FRAME.sub("", turn)
