"""LLaVA-1.5: one fixed-resolution view, a vision tower whose chosen layer feeds a projector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, single_crop
from stacktok.models.base import ModelAdapter

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
