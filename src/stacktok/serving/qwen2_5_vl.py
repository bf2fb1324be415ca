"""Qwen2.5-VL in vLLM, pruned: kept tokens keep their M-RoPE positions, exactly.

Text positions, before and after an image, follow from its size alone and are set when the request arrives, those of
image tokens to where the image begins. Rows and columns of kept tokens travel behind their embeddings, as digits that
every type of weights holds exactly, and are added to the positions just before the language model runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import EncoderCall, Features
from stacktok.serving.model import AttentionReader, PrunedModel
from stacktok.serving.processor import PrunedProcessor

DIGITS = 4
"""Columns behind an embedding: two digits each of a token's row and column in its image."""

# bfloat16 holds integers up to 256 exactly.
_BASE = 128


class PrunedQwenInfo(Qwen2_5_VLProcessingInfo):
    """Images alone are served."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No video."""
        return {"image": None}


class PrunedQwenProcessor(PrunedProcessor, Qwen2_5_VLMultiModalProcessor):
    """The family's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwenProcessor, info=PrunedQwenInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class PrunedQwen2_5_VL(PrunedModel, Qwen2_5_VLForConditionalGeneration):  # noqa: N801 - the family's own spelling
    """Qwen2_5_VLForConditionalGeneration."""

    # Its path past embed_multimodal would skip the selector.
    supports_encoder_cudagraph = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("_offsets", torch.zeros((3, tokens), dtype=torch.long), persistent=False)
        self._patches: torch.Tensor | None = None
        self._encoder_call: EncoderCall | None = None
        # The merger itself may be called past its hooks; its first layer is given the same patches.
        self.visual.merger.ln_q.register_forward_pre_hook(self._note_patches)
        self.reader: AttentionReader | None = None
        if self.pruner.reads_tower:
            signal, blocks = self.pruner.method.tower_signal, self.visual.blocks
            early = signal.early_layer(len(blocks))
            block = blocks[max(self.config.vision_config.fullatt_block_indexes)]
            second = None if early is None else blocks[self.adapter.tower_layer(self.config, early)].attn.attn
            self.reader = AttentionReader(block.attn.attn, False, signal, second)

    def _note_patches(self, module: Any, args: tuple[Any, ...]) -> None:
        self._patches = args[0]

    def image_features(self, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]) -> list[Features]:
        """The merger's input and output, which the adapter puts in raster order."""
        grids = kwargs["image_grid_thw"]
        pixels = kwargs["pixel_values"].split(grids.prod(-1).tolist())
        grids = grids[indices]
        image_input = self._parse_and_validate_image_input(
            pixel_values=torch.cat([pixels[index] for index in indices]), image_grid_thw=grids
        )
        projected = self._process_image_input(image_input)
        patches, self._patches = self._patches, None
        if patches is None:
            raise ValueError("the vision tower's merger did not run, so there are no features to select by")
        output = SimpleNamespace(last_hidden_state=patches.flatten(0, -2))
        self._encoder_call = EncoderCall("image", output, projected, {"image_grid_thw": grids}, self)
        return self.adapter.features(self._encoder_call, layouts)

    def add_attention(self, images: list[EncodedImage]) -> list[EncodedImage]:
        """The attention of the images that were encoded last, where it was read."""
        call, self._encoder_call = self._encoder_call, None
        if self.reader is None or call is None:
            return images
        reading = self.reader.take(call.arguments["image_grid_thw"].prod(-1).tolist())
        return self.adapter.attend(images, reading, call)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """The rows of every image, each followed by the digits of its place."""
        kept = self.embed_images(kwargs)
        if kept is None:
            return super().embed_multimodal(**kwargs)
        merge = self.config.vision_config.spatial_merge_size
        widths = (kwargs["image_grid_thw"][:, 2] // merge).tolist()
        return tuple(
            torch.cat([one.rows, digits(one.offsets, width).to(one.rows)], dim=-1)
            for one, width in zip(kept, widths, strict=True)
        )

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
        """Positions, (3, N), of a prompt: image columns all stand where their image begins."""
        merge = self.config.vision_config.spatial_merge_size
        spans = []
        for feature in mm_features:
            _, height, width = feature.data["image_grid_thw"].data.tolist()
            place = feature.mm_position
            spans.append((place.offset, place.length, max(height, width) // merge))
        positions, following = prompt_positions(len(input_tokens), sorted(spans))
        return positions, following - len(input_tokens)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Input embeddings; the digits of image rows are noted for `forward`."""
        self._offsets.zero_()
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0 or is_multimodal is None:
            return super().embed_input_ids(input_ids)
        columns = is_multimodal.nonzero()[:, 0].to(self._offsets.device)
        self._offsets[1:, columns] = places(torch.cat([rows[:, -DIGITS:] for rows in multimodal_embeddings]))
        return super().embed_input_ids(
            input_ids,
            multimodal_embeddings=[rows[:, :-DIGITS] for rows in multimodal_embeddings],
            is_multimodal=is_multimodal,
        )

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the language model with kept tokens at their own positions."""
        positions = positions + self._offsets[:, : positions.shape[-1]]
        return super().forward(input_ids, positions, *args, **kwargs)


def prompt_positions(length: int, spans: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, int]:
    """M-RoPE positions of a prompt, (3, length), and the position that follows it.

    Parameters
    ----------
    length
        Tokens of the prompt.
    spans
        First column, number of columns and extent (the larger of rows and columns of the unpruned grid) of every image.
    """
    positions = np.empty(length, dtype=np.int64)
    column = position = 0
    for start, count, extent in spans:
        positions[column:start] = position + np.arange(start - column)
        position += start - column
        positions[start : start + count] = position
        position += extent
        column = start + count
    positions[column:] = position + np.arange(length - column)
    return torch.from_numpy(positions).expand(3, -1).clone(), position + length - column


def digits(kept: Any, width: int) -> torch.Tensor:
    """Row and column, two digits each, (k, 4), of tokens at some places of a grid of ``width`` columns."""
    place = torch.as_tensor(kept)
    rows, columns = place // width, place % width
    return torch.stack([rows // _BASE, rows % _BASE, columns // _BASE, columns % _BASE], dim=-1)


def places(written: torch.Tensor) -> torch.Tensor:
    """Rows and columns, (2, k), from their digits, (k, 4)."""
    numbers = written.round().long()
    return torch.stack([numbers[:, 0] * _BASE + numbers[:, 1], numbers[:, 2] * _BASE + numbers[:, 3]])
