"""LLaVA-OneVision in vLLM, pruned: base view and canvas of an image share its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.models.llava_next import LlavaNextAdapter
from stacktok.serving.model import TOWER_NAMES, PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedLlavaOnevisionInfo(LlavaOnevisionProcessingInfo):
    """Images alone are served."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No video."""
        return {"image": None}


class PrunedLlavaOnevisionProcessor(PrunedProcessor, LlavaOnevisionMultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaOnevisionProcessor, info=PrunedLlavaOnevisionInfo, dummy_inputs=LlavaOnevisionDummyInputsBuilder
)
class PrunedLlavaOnevision(PrunedModel, LlavaOnevisionForConditionalGeneration):
    """LlavaOnevisionForConditionalGeneration."""

    attention = ("vision_tower.vision_model.encoder.layers", "self_attn.attn", False)

    hf_to_vllm_mapper = LlavaOnevisionForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def check_config(self) -> None:
        """Every canvas is laid out for nine tiles in vLLM."""
        if self.config.vision_aspect_ratio != "anyres_max_9":
            raise ValueError(
                f"vision_aspect_ratio={self.config.vision_aspect_ratio!r} cannot be served: vLLM resizes a canvas as "
                "for 'anyres_max_9' whatever the config says; serve a model with that"
            )

    def chosen(self, modality: str, indices: Sequence[int], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Views that only pad the batch are left out."""
        found = super().chosen(modality, indices, kwargs)
        layouts = [LlavaNextAdapter().layout(self.config, {"image_sizes": size}) for size in found["image_sizes"]]
        pairs = zip(found["pixel_values"], layouts, strict=True)
        found["pixel_values"] = [pixels[: len(layout.crops)] for pixels, layout in pairs]
        return found
