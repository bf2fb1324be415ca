"""Qwen3.5 and Qwen3.6 in vLLM, pruned: images and videos; three of four layers of the language model are recurrent."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLDummyInputsBuilder
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.serving.qwen3_vl import PrunedQwen3VLInfo, PrunedQwen3VLProcessor, TimestampedModel


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen3VLProcessor, info=PrunedQwen3VLInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class PrunedQwen3_5(TimestampedModel, Qwen3_5ForConditionalGeneration):  # noqa: N801 - the family's own spelling
    """Qwen3_5ForConditionalGeneration."""
