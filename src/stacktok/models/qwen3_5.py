"""Qwen3.5, Qwen3.6 and their mixtures of experts: three of four layers are recurrent (Gated DeltaNet).

Before the language model pruning is what it is elsewhere: a recurrent layer sees the order of tokens and no gaps.
Inside, only the layers with attention can rank tokens, and only they hold keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from stacktok.models.qwen3_vl import TimestampedQwenAdapter


class Qwen3_5Adapter(TimestampedQwenAdapter):  # noqa: N801 - the family's own spelling
    """Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration."""

    family = "Qwen3.5"

    def ranking_attention(self, model: Any, layer: int) -> nn.Module:
        """A layer with attention."""
        kinds = model.config.get_text_config().layer_types
        if kinds[layer] == "linear_attention":
            usable = [number for number, kind in enumerate(kinds) if kind != "linear_attention"]
            named = ", ".join(map(str, usable[:3])) + (", ..." if len(usable) > 3 else "")
            raise ValueError(
                f"layer {layer} of {self.family} is recurrent and has no attention to rank tokens by; cut after one of "
                f"layers {named} (FastV: full_layers={usable[0] + 1}), or prune before the language model"
            )
        return super().ranking_attention(model, layer)
