"""Training-free visual-token pruning for vision-language models.

The selector needs torch, numpy and numba alone; what needs more lives in rooms of its own and is imported when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stacktok.core.affinity import affinities
from stacktok.core.batch import select_batch
from stacktok.core.crops import (
    Crop,
    PreparedCrops,
    prepare_crops,
    select_crops,
    select_crops_from_affinities,
)
from stacktok.core.parameters import Parameters
from stacktok.core.record import CropSelection, Selection, Swap
from stacktok.core.selection import PreparedImage, prepare, select, select_from_affinities

if TYPE_CHECKING:
    from stacktok.methods.stacktok import StackTok

__version__ = "0.1.0"

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name == "StackTok":
        from stacktok.methods.stacktok import StackTok

        return StackTok
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
