"""Qwen3-VL in vLLM, pruned: images, and videos whose frames stand behind their times; DeepStack follows its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import Ints
from stacktok.serving.fields import field
from stacktok.serving.mrope import MropeModel, frame_places
from stacktok.serving.processor import PrunedProcessor


class PrunedQwen3VLInfo(Qwen3VLProcessingInfo):
    """Of all families whose frames stand behind their times."""

    def get_hf_config(self) -> Any:
        """The family's own."""
        return self.ctx.get_hf_config()

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
        """A video brings the texts between its frames along."""
        found = dict(super().get_mm_max_tokens_per_item(seq_len, mm_counts))
        processor = self.get_video_processor()
        # The longest time, and the marks around a frame.
        text = len(self.get_tokenizer().encode("<99999.9 seconds>", add_special_tokens=False)) + 2
        found["video"] += text * (processor.max_frames // processor.temporal_patch_size)
        return found


class PrunedQwen3VLProcessor(PrunedProcessor, Qwen3VLMultiModalProcessor):
    """The family's processor; frames stand behind texts that tell their time."""

    modalities = ("image", "video")
    interleaved = ("video",)


class TimestampedModel(MropeModel):
    """The tower, and positions of frames behind their times."""

    tapped = ("visual.merger", "input")

    def places(self, modality: str, data: Mapping[str, Any]) -> Ints:
        """Distances from the item's beginning; a frame begins where the text that tells its time ends."""
        if modality == "image":
            return super().places(modality, data)
        merge = self.config.vision_config.spatial_merge_size
        frames, height, width = (int(length) for length in data["video_grid_thw"])
        return frame_places((frames, height // merge, width // merge), data[field("video", "text")][1].cpu().numpy())


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen3VLProcessor, info=PrunedQwen3VLInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class PrunedQwen3VL(TimestampedModel, Qwen3VLForConditionalGeneration):
    """Qwen3VLForConditionalGeneration."""
