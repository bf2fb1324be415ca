"""One image or video of a batch under the names that adapters know, in the processor and in the model alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stacktok.models.base import image_inputs

# How vLLM's processors call the number of tiles of an image.
_UNITS = ("num_patches", "image_num_patches")


def item_inputs(data: Mapping[str, Any], index: int, count: int, modality: str = "image") -> dict[str, Any]:
    """The inputs of one of ``count`` items: what there is one of per item, the number of tiles, the picture's size.

    Parameters
    ----------
    data
        What the processor made, or what the model got.
    index, count
        Which item, of how many.
    modality
        "image" or "video"; inputs of the other are left out.
    """
    other = "video" if modality == "image" else "image"
    own = {
        name: value
        for name, value in data.items()
        if other not in name and _belongs(name, modality) and getattr(value, "ndim", None) != 0
    }
    found = image_inputs(own, index, count)
    for name in _UNITS:
        if name in found:
            found["units"] = int(found[name])
    pixels: Any = found.get("pixel_values")
    if "image_sizes" not in found and getattr(pixels, "ndim", None) == 3:
        found["image_sizes"] = tuple(pixels.shape[-2:])
    return found


def _belongs(name: str, modality: str) -> bool:
    return modality == "image" or name != "pixel_values"
