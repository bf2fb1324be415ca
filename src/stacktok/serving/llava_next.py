"""LLaVA-NeXT in vLLM, pruned: base view and tiles of an image share its budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import EncodedImage
from stacktok.models.llava_next import CanvasLayout, LlavaNextAdapter, canvas_layout, encode_tiles
from stacktok.serving.fields import Asked
from stacktok.serving.llava import LlavaTower
from stacktok.serving.model import TOWER_NAMES
from stacktok.serving.processor import PrunedProcessor, Room


def _layout(size: Any, config: Any) -> CanvasLayout:
    return canvas_layout(size, config.image_grid_pinpoints, config.vision_config)


class PrunedLlavaNextProcessor(PrunedProcessor, LlavaNextMultiModalProcessor):
    """What may be kept follows from the size of the picture."""

    def room(self, index: int, items: Any, processed: Mapping[str, Any]) -> Room:
        """Encoded positions of all views; those that the model unpads away may not be kept."""
        layout = _layout(processed["image_sizes"][index], self.info.get_hf_config())
        base = layout.side**2
        return Room(base * (1 + layout.tiles), base + int((layout.places >= 0).sum()))


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaNextProcessor, info=LlavaNextProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlavaNext(LlavaTower, LlavaNextForConditionalGeneration):
    """LlavaNextForConditionalGeneration, with Vicuna and Mistral language models."""

    family = LlavaNextAdapter.family
    hf_to_vllm_mapper = LlavaNextForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def unpruned_lengths(self, kwargs: dict[str, Any]) -> list[int]:
        """All views of an image."""
        return [self.view_length * (1 + _layout(size, self.config).tiles) for size in kwargs["image_sizes"]]

    def encode_images(self, indices: list[int], asked: list[Asked], kwargs: dict[str, Any]) -> list[EncodedImage]:
        """Base view and tiles of each image; views that only pad the batch are not encoded."""
        layouts = [_layout(kwargs["image_sizes"][index], self.config) for index in indices]
        views = [1 + layout.tiles for layout in layouts]
        pixels = [kwargs["pixel_values"][index][:count] for index, count in zip(indices, views, strict=True)]
        vision, states = self.vision_features(torch.cat(pixels))
        projected = self.multi_modal_projector(vision)
        images = [
            encode_tiles(x, z, layout, tau_query=LlavaNextAdapter.tau_query)
            for x, z, layout in zip(torch.split(vision, views), torch.split(projected, views), layouts, strict=True)
        ]
        return self.with_attention(images, states)
