"""Mistral 3 in vLLM, pruned: row breaks are dropped from a pruned image."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.mistral3 import (
    Mistral3DummyInputsBuilder,
    Mistral3ForConditionalGeneration,
    Mistral3MultiModalProcessor,
    Mistral3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.models.base import EncoderCall, TowerReading
from stacktok.serving.model import PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedMistral3Processor(PrunedProcessor, Mistral3MultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedMistral3Processor, info=Mistral3ProcessingInfo, dummy_inputs=Mistral3DummyInputsBuilder
)
class PrunedMistral3(PrunedModel, Mistral3ForConditionalGeneration):
    """Mistral3ForConditionalGeneration."""

    attention = ("vision_tower.transformer.layers", "attention.attn", False)

    def check_config(self) -> None:
        """One layer is what vLLM's tower gives."""
        if not isinstance(self.config.vision_feature_layer, int):
            raise ValueError(
                f"vision_feature_layer={self.config.vision_feature_layer!r} cannot be served pruned: vLLM gives one "
                "layer of the tower; serve a model with a single one"
            )

    def chosen(self, modality: str, indices: Any, kwargs: Any) -> dict[str, Any]:
        """Pictures of any size, in a list."""
        found = super().chosen(modality, indices, kwargs)
        return {**found, "pixel_values": list(found["pixel_values"])}

    def sequence_lengths(self, call: EncoderCall) -> list[int]:
        """Every image by itself."""
        cell = self.config.vision_config.patch_size
        return [(pixels.shape[-2] // cell) * (pixels.shape[-1] // cell) for pixels in call.arguments["pixel_values"]]

    def read_attention(self, call: EncoderCall) -> TowerReading:
        """All images in one sequence, as the adapter knows them."""
        return _joined(super().read_attention(call))

    def states(self) -> torch.Tensor:
        """All images in one sequence, (1, n, d_v)."""
        return super().states().flatten(0, -2)[None]


def _joined(reading: TowerReading) -> TowerReading:
    early = None if reading.early is None else _joined(reading.early)
    return TowerReading([torch.cat(reading.scores)], [torch.cat(reading.keys)], reading.has_cls, early)
