"""LLaVA-1.5: one fixed-resolution view, a vision tower whose chosen layer feeds a projector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, TowerAttention, single_crop
from stacktok.models.base import ModelAdapter, TowerReading

# A quarter of a grey level after normalisation: rounding to half precision stays below it, another colour does not.
_SAME_COLOUR = 0.25 / 255 / 0.27


class LlavaAdapter(ModelAdapter):
    """LlavaForConditionalGeneration."""

    family = "LLaVA-1.5"

    def encode(
        self, modality: str, output: Any, arguments: Mapping[str, Any], model: Any, processor: Any
    ) -> list[EncodedImage]:
        """One crop per image; patches of a padded border are not eligible."""
        vision = tower_features(output.hidden_states, *feature_choice(arguments, model.config))
        if len(vision) != len(output.pooler_output):
            raise ValueError(
                f"the vision tower encoded {len(vision)} views for {len(output.pooler_output)} images; "
                "this adapter needs one view per image"
            )
        pixels = arguments.get("pixel_values")
        colour = pad_colour(getattr(processor, "image_processor", None))
        images = []
        for index, projected in enumerate(output.pooler_output):
            grid = square_grid(len(projected))
            eligible = None
            if colour is not None and pixels is not None:
                eligible = inside_border(pixels[index], grid, colour)
            images.append(
                single_crop(vision[index].detach(), projected.detach(), grid, eligible, tau_query=self.tau_query)
            )
        return images

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The layer whose output feeds the projector."""
        return feature_layer(self.base(model).vision_tower, model.config)

    def add_attention(
        self, images: list[EncodedImage], reading: TowerReading, output: Any, arguments: Mapping[str, Any], model: Any
    ) -> list[EncodedImage]:
        """One view per image."""
        states = tower_features(output.hidden_states, feature_choice(arguments, model.config)[0], "full")
        return with_views(images, reading, states, self.base(model).multi_modal_projector)


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
    images: list[EncodedImage], reading: TowerReading, states: torch.Tensor, project: Any
) -> list[EncodedImage]:
    """Images whose crops are the tower's views, in order, each with its attention.

    Parameters
    ----------
    images
        The images of one encoder call.
    reading
        One sequence per view.
    states
        What feeds the projector, CLS included where there is one, (views, n + 1, d_v).
    project
        The projector.
    """
    count = sum(len(image.crops) for image in images)
    if len(reading.scores) != count:
        raise ValueError(f"the vision tower attended over {len(reading.scores)} views for {count} crops")
    crops = iter(range(count))
    found = []
    for image in images:
        views = [next(crops) for _ in image.crops]
        found.append(
            replace(
                image,
                crops=tuple(
                    replace(
                        crop,
                        attention=TowerAttention(
                            reading.scores[view],
                            reading.keys[view],
                            states[view, 0].detach() if reading.has_cls else None,
                            torch.no_grad()(project),
                        ),
                    )
                    for crop, view in zip(image.crops, views, strict=True)
                ),
            )
        )
    return found


def feature_choice(arguments: Mapping[str, Any], config: Any) -> tuple[int | Sequence[int], str]:
    """The tower's layer (or layers) and the select strategy in force: the call's, else the config's."""
    layer = arguments.get("vision_feature_layer")
    strategy = arguments.get("vision_feature_select_strategy")
    return (
        config.vision_feature_layer if layer is None else layer,
        config.vision_feature_select_strategy if strategy is None else strategy,
    )


def tower_features(hidden_states: Sequence[torch.Tensor], layer: int | Sequence[int], strategy: str) -> torch.Tensor:
    """Pre-projector features, (views, n, d_v): what the projector was given.

    Parameters
    ----------
    hidden_states
        The tower's hidden states, each (views, n + 1, d_v) with CLS first.
    layer
        Which of them feeds the projector; several are joined along the features.
    strategy
        "default" drops CLS, "full" keeps it.
    """
    chosen = [hidden_states[index] for index in ([layer] if isinstance(layer, int) else layer)]
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
