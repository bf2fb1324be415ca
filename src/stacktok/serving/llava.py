"""LLaVA-1.5 in vLLM, pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import EncodedImage, single_crop
from stacktok.models.llava import LlavaAdapter, inside_border, pad_colour, square_grid, with_views
from stacktok.serving.fields import Asked
from stacktok.serving.model import TOWER_NAMES, AttentionReader, PrunedModel
from stacktok.serving.processor import PrunedProcessor, Room


class PrunedLlavaProcessor(PrunedProcessor, LlavaMultiModalProcessor):
    """Padded borders are found in the pixels: the model does not know the pad colour."""

    def room(self, index: int, items: Any, processed: Mapping[str, Any]) -> Room:
        """All positions; of a padded picture those inside the border may be kept."""
        size = items.get_image_size(index)
        count = self.info.get_num_image_tokens(image_width=size.width, image_height=size.height)
        colour = pad_colour(getattr(self.info.get_hf_processor(), "image_processor", None))
        eligible = torch.ones(count, dtype=torch.bool)
        if colour is not None:
            inside = inside_border(processed["pixel_values"][index], square_grid(count), colour)
            if inside is not None:
                eligible = torch.from_numpy(inside)
        return Room(count, int(eligible.sum()), eligible)


class LlavaTower(PrunedModel):
    """Vision features, and attention where a method needs it, of a CLIP or SigLIP tower."""

    reader: AttentionReader | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.pruner.reads_tower:
            tower = self.vision_tower.vision_model
            has_cls = getattr(tower.embeddings, "class_embedding", None) is not None
            strategy = self.config.vision_feature_select_strategy
            if not isinstance(self.config.vision_feature_layer, int) or (has_cls and strategy != "default"):
                raise ValueError(
                    f"vision_feature_layer={self.config.vision_feature_layer!r} with vision_feature_select_strategy="
                    f"{strategy!r} leaves no single attention to read; use a method that needs no attention"
                )
            self.reader = AttentionReader(
                tower.encoder.layers[-1].self_attn.attn, has_cls, getattr(self.pruner.method, "signal", None)
            )

    @property
    def view_length(self) -> int:
        """Encoded positions of one view."""
        config = self.config.vision_config
        return int((config.image_size // config.patch_size) ** 2)

    def vision_features(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pre-projector features of some views, (views, n, d_v), and the same with CLS where there is one."""
        if self.reader is None:
            vision = self._image_pixels_to_features(self.vision_tower, pixels)
            return vision, vision
        states = self.vision_tower(pixels, feature_select_strategy="full")
        return (states[:, 1:] if self.reader.has_cls else states), states

    def with_attention(self, images: list[EncodedImage], states: torch.Tensor) -> list[EncodedImage]:
        """Images whose crops are the tower's views, in order, each with its attention where that was read."""
        if self.reader is None:
            return images
        reading = self.reader.take([states.shape[1]] * len(states))
        return with_views(images, reading, states, self.multi_modal_projector)


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(LlavaTower, LlavaForConditionalGeneration):
    """LlavaForConditionalGeneration."""

    family = LlavaAdapter.family
    hf_to_vllm_mapper = LlavaForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def unpruned_lengths(self, kwargs: dict[str, Any]) -> list[int]:
        """One view per image."""
        return [self.view_length] * len(kwargs["pixel_values"])

    def encode_images(self, indices: list[int], asked: list[Asked], kwargs: dict[str, Any]) -> list[EncodedImage]:
        """One crop per image."""
        vision, states = self.vision_features(kwargs["pixel_values"][indices])
        projected = self.multi_modal_projector(vision)
        images = []
        for index, x, z in zip(indices, vision, projected, strict=True):
            mask = asked[index].eligible
            eligible = None if mask is None else mask.cpu().numpy()
            images.append(single_crop(x, z, square_grid(len(z)), eligible, tau_query=LlavaAdapter.tau_query))
        return self.with_attention(images, states)
