"""LLaVA-1.5: one fixed-resolution view, a vision tower whose chosen layer feeds a projector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, ImageLayout, TowerAttention
from stacktok.models.base import EncoderCall, Features, ModelAdapter, TowerReading

# A quarter of a grey level after normalisation: rounding to half precision stays below it, another colour does not.
_SAME_COLOUR = 0.25 / 255 / 0.27


class LlavaAdapter(ModelAdapter):
    """LlavaForConditionalGeneration."""

    family = "LLaVA-1.5"
    eligible_from_pixels = True

    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """One crop per image; patches of a padded border are not eligible."""
        side = config.vision_config.image_size // config.vision_config.patch_size
        strategy = inputs.get("vision_feature_select_strategy") or config.vision_feature_select_strategy
        extra = 0 if strategy == "default" else 1
        layout = ImageLayout.raster(square_grid(side * side + extra))
        colour = pad_colour(getattr(processor, "image_processor", None))
        pixels = inputs.get("pixel_values")
        if colour is None or pixels is None:
            return layout
        return layout.with_eligible(inside_border(pixels, layout.crops[0].grid, colour))

    def host_arguments(self, arguments: Mapping[str, Any], processor: Any = None) -> dict[str, Any]:
        """Pixels too where the processor pads, since the border is found in them."""
        found = super().host_arguments(arguments, processor)
        pads = pad_colour(getattr(processor, "image_processor", None)) is not None
        if self.eligible_from_pixels and pads and found.get("pixel_values") is not None:
            found["pixel_values"] = found["pixel_values"].cpu()
        return found

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The layer that feeds the projector, and the projector's output."""
        vision = tower_features(call)
        if len(vision) != len(layouts):
            raise ValueError(
                f"the vision tower encoded {len(vision)} views for {len(layouts)} images; "
                "this adapter needs one view per image"
            )
        return list(zip(vision, call.units, strict=True))

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The layer whose output feeds the projector."""
        return feature_layer(self.base(model).vision_tower, model.config)

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """One sequence of the tower per crop."""
        return with_views(images, reading, tower_features(call, "full"), self.base(call.model).multi_modal_projector)


def feature_layer(tower: Any, config: Any) -> tuple[nn.Module, nn.Module, bool]:
    """The tower, the attention module of the layer whose output feeds the projector, and whether CLS comes first."""
    layers = tower.encoder.layers
    chosen = config.vision_feature_layer
    chosen = chosen if isinstance(chosen, int) else chosen[-1]
    # hidden_states[0] is the embedding, so hidden_states[f] is the output of layer f - 1.
    layer = layers[chosen - 1 if chosen > 0 else len(layers) + chosen]
    has_cls = getattr(tower.embeddings, "class_embedding", None) is not None
    if has_cls and config.vision_feature_select_strategy != "default":
        raise ValueError(
            "the model keeps CLS among its image tokens (vision_feature_select_strategy="
            f"{config.vision_feature_select_strategy!r}); methods that read its attention need 'default'"
        )
    return tower, layer.self_attn, has_cls


@torch.no_grad()
def with_views(
    images: Sequence[EncodedImage], reading: TowerReading, states: torch.Tensor, project: Any
) -> list[EncodedImage]:
    """Images whose crops are the tower's views, in order, each with its attention.

    Parameters
    ----------
    images
        The images of one encoder call.
    reading
        One sequence per view.
    states
        The projector's input, CLS included where there is one, (views, n + 1, d_v).
    project
        The projector.
    """
    count = sum(len(image.crops) for image in images)
    if len(reading.scores) != count:
        raise ValueError(f"the vision tower attended over {len(reading.scores)} views for {count} crops")
    views = iter(
        TowerAttention(scores, keys, view[0].detach() if reading.has_cls else None, torch.no_grad()(project))
        for scores, keys, view in zip(reading.scores, reading.keys, states, strict=True)
    )
    return [image.with_attention([next(views) for _ in image.crops]) for image in images]


def tower_features(call: EncoderCall, strategy: str | None = None) -> torch.Tensor:
    """The projector's input, (views, n, d_v): the tower's layer or layers and select strategy of the call or config.

    Parameters
    ----------
    call
        The encoder call.
    strategy
        "default" drops CLS, "full" keeps it; None takes the one in force.
    """

    def in_force(name: str) -> Any:
        given = call.arguments.get(name)
        return getattr(call.config, name) if given is None else given

    layer = in_force("vision_feature_layer")
    strategy = strategy or in_force("vision_feature_select_strategy")
    chosen = [call.output.hidden_states[index] for index in ([layer] if isinstance(layer, int) else layer)]
    if strategy == "default":
        chosen = [states[:, 1:] for states in chosen]
    return torch.cat(chosen, dim=-1)


def square_grid(n: int) -> tuple[int, int]:
    """Rows and columns of n tokens; a tower that keeps CLS has no grid and counts as one row."""
    side = math.isqrt(n)
    return (side, side) if side * side == n else (1, n)


def pad_colour(image_processor: Any) -> torch.Tensor | None:
    """The normalised colour, (3,), with which an image processor pads to a square; None where it does not pad."""
    if not getattr(image_processor, "do_pad", False) or not getattr(image_processor, "image_mean", None):
        return None
    mean = torch.tensor(image_processor.image_mean, dtype=torch.float64)
    colour = (mean * 255).floor()
    if getattr(image_processor, "do_rescale", True):
        colour = colour * getattr(image_processor, "rescale_factor", 1 / 255)
    if getattr(image_processor, "do_normalize", True):
        colour = (colour - mean) / torch.tensor(image_processor.image_std, dtype=torch.float64)
    return colour


def inside_border(pixels: torch.Tensor, grid: tuple[int, int], colour: torch.Tensor) -> Mask | None:
    """Which patches lie inside the padded border, (h w,); None where there is no border.

    Whole rows and columns of patches at the edges that hold exactly the pad colour are the border; a patch of that
    colour inside the picture is picture.

    Parameters
    ----------
    pixels
        Normalised image, (3, height, width).
    grid
        Rows and columns of patches.
    colour
        Normalised pad colour, (3,).
    """
    rows, columns = grid
    height, width = pixels.shape[-2:]
    if height % rows or width % columns:
        return None
    flat = ((pixels - colour.to(pixels)[:, None, None]).abs() <= _SAME_COLOUR).all(0)
    patches = flat.reshape(rows, height // rows, columns, width // columns).all(3).all(1).cpu().numpy()
    top, bottom = _content(np.all(patches, axis=1))
    left, right = _content(np.all(patches, axis=0))
    if (top, bottom, left, right) == (0, rows, 0, columns) or top >= bottom:
        return None
    inside = np.zeros(grid, dtype=np.bool_)
    inside[top:bottom, left:right] = True
    return inside.reshape(-1)


def _content(padded: Mask) -> tuple[int, int]:
    """First and past-the-last line that is not padding."""
    content = np.flatnonzero(~padded)
    return (int(content[0]), int(content[-1]) + 1) if len(content) else (0, 0)
