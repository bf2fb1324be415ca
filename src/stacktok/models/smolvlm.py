"""SmolVLM2 and Idefics3: tiles between texts that name their row and column, the whole picture last.

Every tile is a run of placeholders of its own, behind a token that opens it; one more such token closes an image.
Frames of a video are images to the model, and to this adapter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stacktok.models.base import EncoderCall
from stacktok.models.tiles import TilesAdapter, runs

_AROUND = "<fake_token_around_image>"

# What the processors write around tiles and frames; tokenizers without tokens for the tiles' names read them as text.
_WRITTEN = re.compile(
    r"<row_\d+_col_\d+>|<global-img>|\nFrame from \d\d:\d\d:(?=<fake_token_around_image>)"
    r"|You are provided the following series of [\w -]+ frames from a [\d:]+ \[H:MM:SS\] video\.\n"
)


class SmolVLMAdapter(TilesAdapter):
    """SmolVLMForConditionalGeneration and Idefics3ForConditionalGeneration."""

    family = "SmolVLM2 and Idefics3"

    def patches(self, config: Any) -> int:
        """Patches of a tile's side."""
        return int(config.vision_config.image_size) // int(config.vision_config.patch_size)

    def block(self, config: Any) -> int:
        """Patches of a token's side."""
        return int(config.scale_factor)

    def group(self, config: Any, ids: Sequence[int], processor: Any = None) -> list[int]:
        """Tiles between two tokens that close an image."""
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"the tiles of {self.family} are told apart by the tokenizer's {_AROUND}; give the model's processor"
            )
        around = tokenizer.convert_tokens_to_ids(getattr(processor, "fake_image_token", _AROUND))
        counts: list[int] = []
        end = 0
        for first, length in runs(ids, config.image_token_id):
            # One token opens a tile; where another stands before it, the last image is closed.
            if not counts or list(ids[end:first]).count(around) > 1:
                counts.append(0)
            counts[-1] += length // self.side(config) ** 2
            end = first + length
        return counts

    def units(self, output: Any, config: Any) -> Sequence[torch.Tensor]:
        """Tiles, (tokens, d) each; from transformers 5.20 on the tiles of a prompt come as one."""
        found: Any = output.pooler_output
        if isinstance(found, torch.Tensor):
            tiles: Sequence[torch.Tensor] = found  # type: ignore[assignment]
            return tiles
        # A prompt without pictures has an empty one.
        return [tile for own in found if len(own) for tile in own.split(self.side(config) ** 2)]

    def states(self, call: EncoderCall) -> torch.Tensor:
        """The tower's output."""
        states: torch.Tensor = call.output.last_hidden_state
        return states

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The last layer; there is no CLS."""
        tower: Any = self.base(model).vision_model
        return tower, tower.encoder.layers[-1].self_attn, False

    def language_model(self, model: Any) -> nn.Module:
        """The decoder stack."""
        return self.base(model).text_model  # type: ignore[return-value]

    def user_text(self, turn: str) -> str:
        """Without the names of tiles, and the introduction and time stamps of a video."""
        return _WRITTEN.sub("", turn)
