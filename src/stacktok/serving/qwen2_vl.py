"""Qwen2-VL in vLLM, pruned: images."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.mrope import MropeModel
from stacktok.serving.processor import PrunedProcessor


class PrunedQwen2VLInfo(Qwen2VLProcessingInfo):
    """Images alone are served."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No video."""
        return {"image": None}


class PrunedQwen2VLProcessor(PrunedProcessor, Qwen2VLMultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen2VLProcessor, info=PrunedQwen2VLInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class PrunedQwen2VL(MropeModel, Qwen2VLForConditionalGeneration):
    """Qwen2VLForConditionalGeneration."""
