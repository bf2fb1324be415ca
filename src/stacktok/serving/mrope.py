"""Families with M-RoPE in vLLM: kept tokens keep their (t, h, w) positions, exactly.

Text positions, before and after an image, follow from its size alone and are set when the request arrives, those of its
tokens to where the image begins. How far each kept token stands from there travels behind its embedding, as digits that
every type of weights holds exactly, and is added to the positions just before the language model runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stacktok.core.tokens import Ints
from stacktok.kernels.transfer import upload
from stacktok.models.base import EncoderCall
from stacktok.serving.fields import field, modality_of
from stacktok.serving.model import AttentionReader, PrunedModel

DIGITS = 6
"""Columns behind an embedding: two digits each of a token's distance in t, h and w from its image's beginning."""

# bfloat16 holds integers up to 256 exactly.
_BASE = 256


class MropeModel(PrunedModel):
    """Stands before the model class of a family with dynamic resolution, 2 x 2 merging and M-RoPE."""

    tapped = ("visual.merger.ln_q", "input")
    flat = ("pixel_values", "pixel_values_videos")

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("_offsets", torch.zeros((3, tokens), dtype=torch.long), persistent=False)

    def rows_of(self, modality: str, kwargs: Mapping[str, Any]) -> list[int]:
        """Patches of every image or video."""
        patches: list[int] = kwargs[f"{modality}_grid_thw"].prod(-1).tolist()
        return patches

    def attention_reader(self) -> AttentionReader:
        """The block that the adapter reads in transformers."""
        _, attention, has_cls = self.adapter.tower_attention(_AsTransformers(self))
        signal, blocks = self.pruner.method.tower_signal, self.visual.blocks
        early = signal.early_layer(len(blocks))
        second = None if early is None else blocks[self.adapter.tower_layer(self.config, early)].attn.attn
        return AttentionReader(attention.attn, has_cls, signal, second)

    def sequence_lengths(self, call: EncoderCall) -> list[int]:
        """Every frame by itself."""
        grids = call.arguments[f"{call.modality}_grid_thw"].tolist()
        return [height * width for frames, height, width in grids for _ in range(frames)]

    def places(self, modality: str, data: Mapping[str, Any]) -> Ints:
        """Distances of the tokens of an image or video from where it begins, (3, n).

        Behind them come those of the texts between its tokens, last text first: `Kept.offsets` counts them from the
        end.

        Parameters
        ----------
        modality
            "image" or "video".
        data
            The item's inputs.
        """
        merge = self.config.vision_config.spatial_merge_size
        frames, height, width = (int(length) for length in data[f"{modality}_grid_thw"])
        seconds = data.get("second_per_grid_ts")
        pace = getattr(self.config.vision_config, "tokens_per_second", 1.0) if modality == "video" else 1.0
        pace *= 1.0 if seconds is None else float(seconds)
        return grid_places((frames, height // merge, width // merge), pace)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """The rows of every item, each followed by the digits of its place."""
        kept = self.embed_items(kwargs)
        modality = modality_of(kwargs)
        if kept is None or modality is None:
            return super().embed_multimodal(**kwargs)
        found = []
        own = (f"{modality}_grid_thw", "second_per_grid_ts", field(modality, "text"))
        names = [name for name in own if name in kwargs]
        for index, one in enumerate(kept):
            places = self.places(modality, {name: kwargs[name][index] for name in names})
            written = upload(digits(places), one.rows.device)[one.offsets.to(one.rows.device)]
            found.append(torch.cat([one.rows, written.to(one.rows)], dim=-1))
        return tuple(found)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
        """Positions, (3, N), of a prompt: columns of an image all stand where it begins."""
        spans = []
        for feature in mm_features:
            data = {name: value.data for name, value in feature.data.items()}
            extent = int(self.places(feature.modality, data).max()) + 1
            spans.append((*span(feature.mm_position), extent))
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
        mask, found = is_multimodal, numbers(torch.cat([rows[:, -DIGITS:] for rows in multimodal_embeddings]))
        mask = upload(mask, found.device) if mask.device.type == "cpu" else mask
        # Filled in order without a search for the columns, which would have to be waited for.
        self._offsets[:, : len(mask)].masked_scatter_(mask.expand(3, -1), found)
        return super().embed_input_ids(
            input_ids,
            multimodal_embeddings=[rows[:, :-DIGITS] for rows in multimodal_embeddings],
            is_multimodal=is_multimodal,
        )

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the language model with kept tokens at their own positions."""
        positions = positions + self._offsets[:, : positions.shape[-1]]
        return super().forward(input_ids, positions, *args, **kwargs)


class _AsTransformers:
    """A model of vLLM under the names of transformers, as far as adapters look at it."""

    def __init__(self, model: Any) -> None:
        self.config, self.model = model.config, model


def grid_places(grid: tuple[int, int, int], pace: float = 1.0) -> Ints:
    """Distances of tokens from where their image or video begins, (3, n).

    Parameters
    ----------
    grid
        Temporal patches, rows and columns of tokens.
    pace
        Positions between two temporal patches; fractions of a position are cut off.
    """
    tokens = np.indices(grid).reshape(3, -1)
    tokens[0] = (tokens[0] * pace).astype(np.int64)
    return tokens


def frame_places(grid: tuple[int, int, int], before: Ints) -> Ints:
    """Distances from where a video begins whose frames stand behind texts, (3, n + s): tokens, then texts backwards.

    Every frame begins where the text before it ends, and takes as many positions as its longer side has tokens.

    Parameters
    ----------
    grid
        Temporal patches, rows and columns of tokens.
    before
        How many of the video's tokens stand before every text token between them, (s,), ascending.
    """
    frames, rows, columns = grid
    tokens = np.tile(np.indices((1, rows, columns)).reshape(3, -1), frames)
    number = np.arange(frames * rows * columns) // (rows * columns)
    # A text that b tokens stand before is behind frame b / (rows columns) - 1, and all texts up to there come first.
    texts = before // (rows * columns) * max(rows, columns) + np.arange(len(before))
    tokens += number * max(rows, columns) + np.searchsorted(before, number * rows * columns, side="right")
    return np.concatenate([tokens, np.broadcast_to(texts[::-1], (3, len(texts)))], axis=1)


def span(place: Any) -> tuple[int, int]:
    """First column and number of columns that an item's embeddings fill."""
    if place.is_embed is None:
        return place.offset, place.length
    own = place.is_embed.nonzero()[:, 0]
    return place.offset + int(own[0]), len(own)


def prompt_positions(length: int, spans: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, int]:
    """M-RoPE positions of a prompt, (3, length), and the position that follows it.

    Parameters
    ----------
    length
        Tokens of the prompt.
    spans
        First column, number of columns and extent (positions that the unpruned item takes) of every image.
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


def digits(distances: Ints) -> torch.Tensor:
    """Two digits of each of three distances, (k, 6), from (3, k)."""
    found = np.stack([distances // _BASE, distances % _BASE], axis=1)
    return torch.from_numpy(found.reshape(DIGITS, -1).T.copy())


def numbers(written: torch.Tensor) -> torch.Tensor:
    """Distances, (3, k), from their digits, (k, 6)."""
    found = written.round().long().T.reshape(3, 2, -1)
    return found[:, 0] * _BASE + found[:, 1]
