"""Training-free visual-token pruning for vision-language models.

The selector needs torch, numpy and numba alone. Every name here is imported when it is first used, so that the command
line can answer without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stacktok.core.affinity import affinities
    from stacktok.core.batch import select_batch
    from stacktok.core.budget import Coverage
    from stacktok.core.crops import (
        Crop,
        PreparedCrops,
        prepare_crops,
        select_crops,
        select_crops_from_affinities,
    )
    from stacktok.core.parameters import Parameters
    from stacktok.core.record import CropSelection, Selection
    from stacktok.core.selection import PreparedImage, prepare, select, select_from_affinities
    from stacktok.kernels import Swap
    from stacktok.methods.stacktok import StackTok

__version__ = "0.1.0"

__all__ = [
    "Coverage",
    "Crop",
    "CropSelection",
    "Parameters",
    "PreparedCrops",
    "PreparedImage",
    "Selection",
    "StackTok",
    "Swap",
    "affinities",
    "prepare",
    "prepare_crops",
    "select",
    "select_batch",
    "select_crops",
    "select_crops_from_affinities",
    "select_from_affinities",
]

_HOMES = {
    "stacktok.core.affinity": ("affinities",),
    "stacktok.core.batch": ("select_batch",),
    "stacktok.core.budget": ("Coverage",),
    "stacktok.core.crops": (
        "Crop",
        "PreparedCrops",
        "prepare_crops",
        "select_crops",
        "select_crops_from_affinities",
    ),
    "stacktok.core.parameters": ("Parameters",),
    "stacktok.core.record": ("CropSelection", "Selection"),
    "stacktok.core.selection": ("PreparedImage", "prepare", "select", "select_from_affinities"),
    "stacktok.kernels": ("Swap",),
    "stacktok.methods.stacktok": ("StackTok",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
