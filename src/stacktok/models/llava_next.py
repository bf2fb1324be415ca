"""LLaVA-NeXT: a base view and tiles that share one budget; unpadding decides what may be kept.

The model itself lays the tiles out on a canvas, cuts the letterbox away at patch granularity and ends every canvas row
with a newline. Its own functions are run on indices here, so that the layout is the model's by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stacktok.core.tokens import CropLayout, ImageLayout, Ints
from stacktok.kernels.transfer import upload
from stacktok.models.base import EncoderCall, Features
from stacktok.models.llava import LlavaAdapter, tower_features


class LlavaNextAdapter(LlavaAdapter):
    """LlavaNextForConditionalGeneration, with Vicuna and Mistral language models."""

    family = "LLaVA-NeXT"
    eligible_from_pixels = False

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """Base view and tiles; tokens of the letterbox are not eligible."""
        if inputs.get("image_sizes") is None:
            raise ValueError(
                "image features of LLaVA-NeXT need their image_sizes; compute them inside the with block, "
                "or pass pixel_values"
            )
        from transformers.models.llava_next import modeling_llava_next

        stock: Any = modeling_llava_next
        vision = config.vision_config
        height, width = (int(length) for length in inputs["image_sizes"])
        rows, columns = stock.get_anyres_image_grid_shape(
            (height, width), config.image_grid_pinpoints, vision.image_size
        )
        return canvas_layout(vision.image_size // vision.patch_size, rows, columns, (height, width))

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """All views of every image; the letterbox, which the model drops after projecting, is projected again."""
        vision = tower_features(call).detach()
        views = torch.split(vision, [len(layout.crops) for layout in layouts])
        project = self.base(call.model).multi_modal_projector
        with torch.no_grad():
            return [
                (own.flatten(0, 1), unpack(packed.detach(), layout, own.flatten(0, 1), project))
                for own, packed, layout in zip(views, call.units, layouts, strict=True)
            ]


def canvas_layout(side: int, tile_rows: int, tile_columns: int, size: tuple[int, int]) -> ImageLayout:
    """Base view and tiles of an image: tiles on a canvas, letterbox cut away, every canvas row closed by a newline.

    Parameters
    ----------
    side
        Tokens of a view's side.
    tile_rows, tile_columns
        Tiles of the canvas.
    size
        Height and width of the picture.
    """
    from transformers.models.llava_next import modeling_llava_next

    stock: Any = modeling_llava_next
    n, tiles = side * side, tile_rows * tile_columns
    tokens = torch.arange(tiles * n).view(tile_rows, tile_columns, side, side)
    canvas = tokens.permute(0, 2, 1, 3).reshape(tile_rows * side, tile_columns * side)
    return pack_canvas(stock.unpad_image(canvas[None], list(size))[0].numpy(), tiles, (side, side))


def pack_canvas(kept: Ints, tiles: int, grid: tuple[int, int]) -> ImageLayout:
    """A base view, then canvas rows that each end with a newline.

    Parameters
    ----------
    kept
        The canvas after unpadding: indices into the tiles' tokens, tile after tile, (rows, columns).
    tiles, grid
        Number of tiles, and a view's grid.
    """
    n = grid[0] * grid[1]
    rows, columns = kept.shape
    line = np.repeat(np.arange(rows), columns).reshape(rows, columns)
    offsets, lines = np.full(tiles * n, -1, dtype=np.int64), np.full(tiles * n, -1, dtype=np.int64)
    offsets[kept] = n + line * (columns + 1) + np.arange(columns)
    lines[kept] = line
    crops = [CropLayout.raster(grid)]
    crops += [
        CropLayout(grid, own >= 0, own, own_lines)
        for own, own_lines in zip(offsets.reshape(tiles, n), lines.reshape(tiles, n), strict=True)
    ]
    newlines = n + np.arange(rows, dtype=np.int64) * (columns + 1) + columns
    return ImageLayout(tuple(crops), n + rows * (columns + 1), newlines, base=0)


def unpack(packed: torch.Tensor, layout: ImageLayout, vision: torch.Tensor, project: Any) -> torch.Tensor:
    """Post-projector features of all tokens of an image, (n, d).

    Parameters
    ----------
    packed
        The language model's input, (length, d), which lacks the letterbox.
    layout
        Where each token stands in it.
    vision
        Pre-projector features, (n, d_v).
    project
        The projector. Letterbox tokens are never kept, but all encoded tokens are affinity targets.
    """
    offsets = np.concatenate([crop.offsets for crop in layout.crops])
    projected = packed[upload(np.maximum(offsets, 0), packed.device)]
    letterbox = np.flatnonzero(offsets < 0)
    if len(letterbox):
        rows = project(vision[upload(letterbox, vision.device)])
        projected[upload(letterbox, projected.device)] = rows.to(projected)
    return projected
