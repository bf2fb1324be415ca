"""Qwen2.5-VL in vLLM, pruned: images and videos."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.mrope import MropeModel
from stacktok.serving.processor import PrunedProcessor


class PrunedQwen2_5_VLProcessor(PrunedProcessor, Qwen2_5_VLMultiModalProcessor):  # noqa: N801 - the family's spelling
    """The family's processor."""

    modalities = ("image", "video")


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen2_5_VLProcessor, info=Qwen2_5_VLProcessingInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class PrunedQwen2_5_VL(MropeModel, Qwen2_5_VLForConditionalGeneration):  # noqa: N801 - the family's own spelling
    """Qwen2_5_VLForConditionalGeneration."""
