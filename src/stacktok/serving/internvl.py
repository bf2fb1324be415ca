"""InternVL in vLLM, pruned: the tiles of an image share its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.interns1 import (
    InternS1DummyInputsBuilder,
    InternS1ForConditionalGeneration,
    InternS1MultiModalProcessor,
    InternS1ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.model import PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedInternVLInfo(InternS1ProcessingInfo):
    """Images alone are served."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No video."""
        return {"image": None}


class PrunedInternVLProcessor(PrunedProcessor, InternS1MultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedInternVLProcessor, info=PrunedInternVLInfo, dummy_inputs=InternS1DummyInputsBuilder
)
class PrunedInternVL(PrunedModel, InternS1ForConditionalGeneration):
    """InternVLForConditionalGeneration, which vLLM runs as Intern-S1."""

    flat = ("pixel_values",)
    attention = ("vision_tower.encoder.layer", "attention.attn", True)

    def check_config(self) -> None:
        """The tower's last layer is what vLLM projects."""
        if self.config.vision_feature_layer != -1:
            raise ValueError(
                f"vision_feature_layer={self.config.vision_feature_layer!r} cannot be served: vLLM projects the "
                "tower's last layer whatever the config says; serve a model with -1"
            )

    def run_encoder(self, modality: str, inputs: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Tiles, not yet put together to images."""
        units: Sequence[torch.Tensor] = self.extract_feature(inputs["pixel_values"])
        return units
