"""Gemma 3 in vLLM, pruned: the kept tokens of an image see each other, where the attention backend can do that."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.gemma3_mm import (
    Gemma3DummyInputsBuilder,
    Gemma3ForConditionalGeneration,
    Gemma3MultiModalProcessor,
    Gemma3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import ImageLayout
from stacktok.serving.model import TOWER_NAMES, PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedGemma3Processor(PrunedProcessor, Gemma3MultiModalProcessor):
    """The family's processor."""

    def _layout(self, processed: Any, index: int, count: int, modality: str) -> ImageLayout:
        """One view per image."""
        if int(processed["num_patches"][index]) != 1:
            raise ValueError(
                "pan and scan is not served pruned: its crops are images of their own in transformers, and one image "
                "in vLLM; leave do_pan_and_scan out of mm_processor_kwargs"
            )
        return super()._layout(processed, index, count, modality)


@MULTIMODAL_REGISTRY.register_processor(
    PrunedGemma3Processor, info=Gemma3ProcessingInfo, dummy_inputs=Gemma3DummyInputsBuilder
)
class PrunedGemma3(PrunedModel, Gemma3ForConditionalGeneration):
    """Gemma3ForConditionalGeneration."""

    attention = ("vision_tower.vision_model.encoder.layers", "self_attn.attn", False)
    flat = ("pixel_values",)

    hf_to_vllm_mapper = Gemma3ForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def check_config(self) -> None:
        """Image tokens must see each other."""
        for layer in self.modules():
            if isinstance(layer, Attention) and not layer.attn_backend.supports_mm_prefix():
                raise ValueError(
                    f"the tokens of an image of Gemma 3 see each other, which the attention backend "
                    f"{layer.attn_backend.get_name()} leaves out without a word; run it on a GPU with a backend that "
                    "does it, such as TRITON_ATTN"
                )
