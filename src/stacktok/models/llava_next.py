"""LLaVA-NeXT: a base view and tiles that share one budget; unpadding decides what may be kept.

The model itself lays the tiles out on a canvas, cuts the letterbox away at patch granularity and ends every canvas row
with a newline. Its own functions are run on indices here, so that the layout is the model's by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints
from stacktok.models.base import ModelAdapter, TowerReading
from stacktok.models.llava import feature_choice, feature_layer, tower_features, with_views


class LlavaNextAdapter(ModelAdapter):
    """LlavaNextForConditionalGeneration, with Vicuna and Mistral language models."""

    family = "LLaVA-NeXT"

    def encode(
        self, modality: str, output: Any, arguments: Mapping[str, Any], model: Any, processor: Any
    ) -> list[EncodedImage]:
        """Base view and tiles of each image."""
        if arguments.get("image_sizes") is None:
            raise ValueError(
                "image features of LLaVA-NeXT need their image_sizes; compute them inside the with block, "
                "or pass pixel_values"
            )
        vision = tower_features(output.hidden_states, *feature_choice(arguments, model.config))
        config = model.config
        images, first = [], 0
        for size, packed in zip(arguments["image_sizes"], output.pooler_output, strict=True):
            layout = canvas_layout(size, config.image_grid_pinpoints, config.vision_config)
            views = slice(first, first + 1 + layout.tiles)
            seen = vision[views].detach()
            with torch.no_grad():
                projected = unpack(packed.detach(), layout, seen, self.base(model).multi_modal_projector)
            images.append(encode_tiles(seen, projected, layout, tau_query=self.tau_query))
            first = views.stop
        return images

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The layer whose output feeds the projector."""
        return feature_layer(self.base(model).vision_tower, model.config)

    def add_attention(
        self, images: list[EncodedImage], reading: TowerReading, output: Any, arguments: Mapping[str, Any], model: Any
    ) -> list[EncodedImage]:
        """Base view and tiles of each image, in order."""
        states = tower_features(output.hidden_states, feature_choice(arguments, model.config)[0], "full")
        return with_views(images, reading, states, self.base(model).multi_modal_projector)


class CanvasLayout:
    """How the tiles of one image fill the language model's rows.

    Attributes
    ----------
    side
        Rows and columns of a view.
    tiles
        Number of tiles, the base view not counted.
    places
        Place of every tile's tokens, (tiles, side^2), -1 in the letterbox.
    lines
        Canvas row of every tile's tokens after unpadding, (tiles, side^2), -1 in the letterbox.
    newlines
        Place of the newline after every canvas row.
    length
        Rows of the language model's input, base view and newlines included.
    """

    def __init__(self, side: int, tile_rows: int, tile_columns: int, size: Sequence[int]) -> None:
        from transformers.models.llava_next import modeling_llava_next

        stock: Any = modeling_llava_next
        self.side, self.tiles = side, tile_rows * tile_columns
        n = side * side
        tokens = torch.arange(self.tiles * n).view(tile_rows, tile_columns, side, side)
        canvas = tokens.permute(0, 2, 1, 3).reshape(tile_rows * side, tile_columns * side)
        kept = stock.unpad_image(canvas[None], list(size))[0].numpy()
        rows, columns = kept.shape
        line = np.repeat(np.arange(rows), columns).reshape(rows, columns)
        places, lines = np.full(self.tiles * n, -1, dtype=np.int64), np.full(self.tiles * n, -1, dtype=np.int64)
        places[kept] = n + line * (columns + 1) + np.arange(columns)
        lines[kept] = line
        self.places: Ints = places.reshape(-1, n)
        self.lines: Ints = lines.reshape(-1, n)
        self.newlines: Ints = n + np.arange(rows, dtype=np.int64) * (columns + 1) + columns
        self.length = n + rows * (columns + 1)


def canvas_layout(size: Any, pinpoints: list[list[int]], vision_config: Any) -> CanvasLayout:
    """The layout of an image of ``size`` (height, width) under a model's tile shapes."""
    from transformers.models.llava_next import modeling_llava_next

    stock: Any = modeling_llava_next
    height, width = (int(side) for side in size)
    rows, columns = stock.get_anyres_image_grid_shape((height, width), pinpoints, vision_config.image_size)
    return CanvasLayout(vision_config.image_size // vision_config.patch_size, rows, columns, (height, width))


def encode_tiles(
    vision: torch.Tensor, projected: torch.Tensor, layout: CanvasLayout, *, tau_query: float = 0.02
) -> EncodedImage:
    """Base view and tiles of one image as crops.

    Parameters
    ----------
    vision, projected
        Pre- and post-projector features of all views, (1 + tiles, n, d_v) and (1 + tiles, n, d), base view first.
    layout
        Where each token of each tile stands.
    tau_query
        The family's temperature.
    """
    views: list[tuple[Ints, Ints | None]] = [(np.arange(layout.side**2, dtype=np.int64), None)]
    views.extend((layout.places[tile], layout.lines[tile]) for tile in range(layout.tiles))
    crops = [
        EncodedCrop(
            vision=vision[view],
            projected=projected[view],
            grid=(layout.side, layout.side),
            eligible=places >= 0,
            places=places,
            separators=lines,
        )
        for view, (places, lines) in enumerate(views)
    ]
    return EncodedImage(tuple(crops), layout.length, layout.newlines, tau_query)


def unpack(packed: torch.Tensor, layout: CanvasLayout, vision: torch.Tensor, project: Any) -> torch.Tensor:
    """Post-projector features of all views, (1 + tiles, n, d).

    Parameters
    ----------
    packed
        Rows of the language model's input, (length, d), which lack the letterbox.
    layout
        Where each token of each tile stands in them.
    vision
        Pre-projector features, (1 + tiles, n, d_v).
    project
        The projector. Letterbox tokens are never kept, but all encoded positions are affinity targets.
    """
    n = layout.side**2
    places = torch.from_numpy(np.concatenate([np.arange(n)[None], layout.places])).to(packed.device)
    projected = packed[places.clamp_min(0)]
    letterbox = places < 0
    if bool(letterbox.any()):
        projected[letterbox] = project(vision[letterbox.to(vision.device)]).to(projected)
    return projected
