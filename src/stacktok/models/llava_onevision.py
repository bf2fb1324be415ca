"""LLaVA-OneVision: base view and canvas as in LLaVA-NeXT, a large canvas resized, videos pooled 2 x 2.

A canvas of more than nine tiles' tokens is resized bilinearly after projection; the pre-projector canvas is resized by
the same call, and the canvas is one crop. Several images in a prompt are base views only. A video is one crop per frame
and one newline at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stacktok.core.tokens import CropLayout, EncodedImage, ImageLayout
from stacktok.kernels.transfer import upload
from stacktok.models.base import EncoderCall, Features, TowerReading, split_attention
from stacktok.models.llava import tower_features
from stacktok.models.llava_next import LlavaNextAdapter, unpack


class LlavaOnevisionAdapter(LlavaNextAdapter):
    """LlavaOnevisionForConditionalGeneration."""

    family = "LLaVA-OneVision"
    modalities = {"image": "image_token_id", "video": "video_token_id"}  # noqa: RUF012 - declared as a ClassVar

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """Base view and tiles, base view and resized canvas, base view alone, or frames."""
        side = _side(config)
        if "pixel_values_videos" in inputs:
            pooled = math.ceil(side / 2)
            frames = len(inputs["pixel_values_videos"])
            if "tokens" in inputs:
                frames = (int(inputs["tokens"]) - 1) // pooled**2
            return _closed(ImageLayout.raster(*[(pooled, pooled)] * frames))
        if inputs.get("tokens") == side * side + 1:
            return _closed(ImageLayout.raster((side, side)))
        layout = super().layout(config, inputs, processor)
        canvas = _resized(layout, side, inputs.get("vision_aspect_ratio") or config.vision_aspect_ratio)
        if canvas is None:
            return layout
        rows, columns = canvas
        line = np.repeat(np.arange(rows), columns)
        offsets = side * side + line * (columns + 1) + np.tile(np.arange(columns), rows)
        crop = CropLayout((rows, columns), np.ones(rows * columns, dtype=np.bool_), offsets, line)
        newlines = side * side + np.arange(1, rows + 1) * (columns + 1) - 1
        return ImageLayout((layout.crops[0], crop), side * side + rows * (columns + 1), newlines, base=0)

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """All views of every image; a resized canvas and the frames of a video are pooled as the model pools them."""
        with torch.no_grad():
            vision = self._aligned(call, layouts, tower_features(call).detach())
            if call.modality == "video":
                return [(x, unit[:-1]) for x, unit in zip(vision, call.units, strict=True)]
            project = self.base(call.model).multi_modal_projector
            return [
                (x, unpack(unit.detach(), layout, x, project))
                for x, unit, layout in zip(vision, call.units, layouts, strict=True)
            ]

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """One sequence of the tower per view; pooled as the features are."""
        layouts = [image.layout for image in images]
        scores = self._aligned(call, layouts, torch.stack(reading.scores)[..., None])
        keys = self._aligned(call, layouts, torch.stack(reading.keys))
        return split_attention(images, torch.cat(scores)[:, 0], torch.cat(keys))

    def _aligned(self, call: EncoderCall, layouts: Sequence[ImageLayout], views: torch.Tensor) -> list[torch.Tensor]:
        """Values of the tower's tokens, (views, n, d), as values of every image's tokens, (n, d) each."""
        if call.modality == "video":
            pooled = self.base(call.model).apply_pooling(views)  # type: ignore[operator]
            frames = torch.split(pooled, [len(layout.crops) for layout in layouts])
            return [own.flatten(0, 1) for own in frames]
        found, first = [], 0
        for index, layout in enumerate(layouts):
            tiles = layout
            if len(layout.crops) > 1:
                tiles = super().layout(call.config, {"image_sizes": call.arguments["image_sizes"][index]})
            own = views[first : first + len(tiles.crops)]
            first += len(own)
            if tiles.length == layout.length:
                found.append(own.flatten(0, 1))
            else:
                found.append(torch.cat([own[0], _resize(own[1:], tiles, layout.crops[1].grid)]))
        return found


def _side(config: Any) -> int:
    """Tokens of a view's side."""
    return int(config.vision_config.image_size) // int(config.vision_config.patch_size)


def _closed(layout: ImageLayout) -> ImageLayout:
    """The layout with one newline behind its last token."""
    crops = tuple(replace(crop, separators=np.zeros(crop.n, dtype=np.int64)) for crop in layout.crops)
    return ImageLayout(crops, layout.length + 1, np.array([layout.length], dtype=np.int64))


def _resized(layout: ImageLayout, side: int, aspect_ratio: str) -> tuple[int, int] | None:
    """Rows and columns of a canvas that the model resizes; None for one that it leaves as it is."""
    rows = len(layout.separators)
    columns = (layout.length - side * side) // max(1, rows) - 1
    ratio = math.sqrt(rows * columns / (int(aspect_ratio.removeprefix("anyres_max_")) * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None


def _resize(views: torch.Tensor, tiles: ImageLayout, grid: tuple[int, int]) -> torch.Tensor:
    """The tiles' values on their canvas, resized, (rows columns, d).

    Parameters
    ----------
    views
        Values of the tiles' tokens, (tiles, n, d).
    tiles
        The layout before resizing.
    grid
        Rows and columns to resize to.
    """
    n = views.shape[1]
    offsets = np.concatenate([crop.offsets for crop in tiles.crops[1:]])
    fed = np.flatnonzero(offsets >= 0)
    places, tokens = (upload(own, views.device) for own in (offsets[fed] - n, fed))
    rows = len(tiles.separators)
    columns = (tiles.length - n) // rows - 1
    canvas = views.new_empty((tiles.length - n, views.shape[-1]))
    canvas[places] = views.flatten(0, 1)[tokens]
    canvas = canvas.view(rows, columns + 1, -1)[:, :-1].permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(canvas, list(grid), mode="bilinear")[0].permute(1, 2, 0).flatten(0, 1)
