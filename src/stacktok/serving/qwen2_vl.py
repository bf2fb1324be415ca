"""Qwen2-VL in vLLM, pruned: images and videos."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.mrope import MropeModel
from stacktok.serving.processor import PrunedProcessor


class PrunedQwen2VLProcessor(PrunedProcessor, Qwen2VLMultiModalProcessor):
    """The family's processor."""

    modalities = ("image", "video")


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen2VLProcessor, info=Qwen2VLProcessingInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class PrunedQwen2VL(MropeModel, Qwen2VLForConditionalGeneration):
    """Qwen2VLForConditionalGeneration."""
