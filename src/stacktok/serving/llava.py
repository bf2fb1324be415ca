"""LLaVA-1.5 in vLLM, pruned."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import Features
from stacktok.models.llava import with_views
from stacktok.serving.model import TOWER_NAMES, AttentionReader, PrunedModel
from stacktok.serving.processor import PrunedProcessor


class PrunedLlavaProcessor(PrunedProcessor, LlavaMultiModalProcessor):
    """The family's processor."""


class LlavaTower(PrunedModel):
    """Vision features, and attention where a method needs it, of a CLIP or SigLIP tower."""

    tapped = None

    _states: torch.Tensor | None = None

    def check_config(self) -> None:
        """One grid for all views."""
        if self.config.vision_config.model_type == "pixtral":
            raise ValueError(
                "a LLaVA with a Pixtral tower is not served pruned; use Mistral 3, or prune it in transformers"
            )

    def attention_reader(self) -> AttentionReader:
        """The last layer that vLLM builds, which feeds the projector."""
        tower = self.vision_tower.vision_model
        has_cls = getattr(tower.embeddings, "class_embedding", None) is not None
        strategy = self.config.vision_feature_select_strategy
        if not isinstance(self.config.vision_feature_layer, int) or (has_cls and strategy != "default"):
            raise ValueError(
                f"vision_feature_layer={self.config.vision_feature_layer!r} with vision_feature_select_strategy="
                f"{strategy!r} leaves no single attention to read; use a method that needs no attention"
            )
        # vLLM builds the layers up to the one that feeds the projector.
        signal, layers = self.pruner.method.tower_signal, tower.encoder.layers
        early = signal.early_layer(self.config.vision_config.num_hidden_layers)
        second = None if early is None else layers[early].self_attn.attn
        return AttentionReader(layers[-1].self_attn.attn, has_cls, signal, second)

    def view_features(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pre- and post-projector features of some views, (views, n, d_v) and (views, n, d)."""
        if self.reader is None:
            vision = self._image_pixels_to_features(self.vision_tower, pixels)
        else:
            self._states = self.vision_tower(pixels, feature_select_strategy="full")
            vision = self._states[:, 1:] if self.reader.has_cls else self._states
        return vision, self.multi_modal_projector(vision)

    def add_attention(self, images: list[EncodedImage]) -> list[EncodedImage]:
        """The attention of the views that were encoded last, where it was read."""
        states, self._states = self._states, None
        if self.reader is None or states is None:
            return images
        reading = self.reader.take([states.shape[1]] * len(states))
        found = with_views(images, reading, states, self.multi_modal_projector)
        if reading.early is None:
            return found
        early = with_views(images, reading.early, states, self.multi_modal_projector)
        return [image.with_early(other) for image, other in zip(found, early, strict=True)]


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(LlavaTower, LlavaForConditionalGeneration):
    """LlavaForConditionalGeneration."""

    hf_to_vllm_mapper = LlavaForConditionalGeneration.hf_to_vllm_mapper | TOWER_NAMES

    def item_features(
        self, modality: str, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]
    ) -> list[Features]:
        """One view per image."""
        return list(zip(*self.view_features(kwargs["pixel_values"][indices]), strict=True))
