"""SmolVLM2 in vLLM, pruned: the tiles of an image share its budget, the texts that name them stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.models.idefics3 import (
    Idefics3DummyInputsBuilder,
    Idefics3MultiModalProcessor,
)
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration, SmolVLMProcessingInfo
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.model import PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedSmolVLMProcessor(PrunedProcessor, Idefics3MultiModalProcessor):
    """The family's processor; tiles stand behind texts that name their row and column."""

    interleaved = ("image",)


class TiledModel(PrunedModel):
    """Tiles, each encoded by itself."""

    tapped = ("model.vision_model", "output")
    flat = ("pixel_values", "pixel_attention_mask")
    attention = ("model.vision_model.encoder.layers", "self_attn.attn", False)

    def run_encoder(self, modality: str, inputs: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Tiles, not yet put together to images."""
        units = self._process_image_input(self._parse_and_validate_image_input(**inputs))
        rows = torch.cat(list(units))
        return list(rows.view(-1, self.model.image_seq_len, rows.shape[-1]))


@MULTIMODAL_REGISTRY.register_processor(
    PrunedSmolVLMProcessor, info=SmolVLMProcessingInfo, dummy_inputs=Idefics3DummyInputsBuilder
)
class PrunedSmolVLM(TiledModel, SmolVLMForConditionalGeneration):
    """SmolVLMForConditionalGeneration."""
