"""LLaVA-NeXT in vLLM, pruned: base view and tiles of an image share its budget."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import ImageLayout
from stacktok.models.base import Features
from stacktok.serving.llava import LlavaTower
from stacktok.serving.model import TOWER_NAMES
from stacktok.serving.processor import PrunedProcessor


class PrunedLlavaNextProcessor(PrunedProcessor, LlavaNextMultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaNextProcessor, info=LlavaNextProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlavaNext(LlavaTower, LlavaNextForConditionalGeneration):
    """LlavaNextForConditionalGeneration, with Vicuna and Mistral language models."""

    hf_to_vllm_mapper = LlavaNextForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def item_features(
        self, modality: str, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]
    ) -> list[Features]:
        """Base view and tiles of each image; views that only pad the batch are not encoded."""
        views = [len(layout.crops) for layout in layouts]
        pixels = [kwargs["pixel_values"][index][:count] for index, count in zip(indices, views, strict=True)]
        vision, projected = (torch.split(part, views) for part in self.view_features(torch.cat(pixels)))
        return [(x.flatten(0, 1), z.flatten(0, 1)) for x, z in zip(vision, projected, strict=True)]
