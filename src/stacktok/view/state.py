"""The inspector's state: encoded pictures, questions on them, and the pruned views of methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from stacktok.core.attention import TowerSignal
from stacktok.core.crops import PreparedCrops
from stacktok.core.record import CropSelection, Selection
from stacktok.core.selection import PreparedImage
from stacktok.core.tokens import SEPARATOR, EncodedImage, Reduction
from stacktok.methods.base import Prepared


@dataclass(eq=False)
class Picture:
    """A picture that the model has seen.

    Attributes
    ----------
    name
        Its name in links: of a sample, or of the file's content.
    image
        What was sent, in RGB.
    arguments
        What the encoder was given.
    encoded, features
        As the adapter read the encoder's output, and that output.
    prepared
        The coverage side, done.
    crops
        What the encoder saw, as PNG, per crop.
    seconds
        Time of encoding and of preparing.
    attended
        The encoded picture with the tower's attention, by the signal that was read.
    prepared_for
        The picture prepared for a method, by its name.
    """

    name: str
    image: Image.Image
    arguments: dict[str, Any]
    encoded: EncodedImage
    features: Any
    prepared: PreparedImage | PreparedCrops
    crops: list[bytes]
    seconds: dict[str, float]
    attended: dict[TowerSignal, EncodedImage] = field(default_factory=dict)
    prepared_for: dict[str, Prepared] = field(default_factory=dict)

    @property
    def units(self) -> tuple[PreparedImage, ...]:
        """The prepared image of every crop."""
        return self.prepared.crops if isinstance(self.prepared, PreparedCrops) else (self.prepared,)


@dataclass(eq=False)
class Query:
    """A question on a picture: its words, their embeddings, and the runs that were made for it."""

    words: list[str]
    rows: list[list[int]]
    query: torch.Tensor
    records: dict[str, tuple[Selection | CropSelection, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PrunedView:
    """A picture as a method pruned it, and the tokens that entered each layer of the language model."""

    reduction: Reduction
    per_layer: tuple[int, ...]

    @property
    def placed(self) -> list[int]:
        """Output tokens that stand for a place of the picture: neither separators nor CLS."""
        crops = self.reduction.anchors[:, 0].tolist()
        return [i for i, sources in enumerate(self.reduction.sources) if len(sources) and crops[i] != SEPARATOR]

    @property
    def merged(self) -> list[dict[str, Any]]:
        """Output tokens made of several: their own (crop, token) pair, and the pairs of their sources."""
        return [
            {"token": self.reduction.anchors[i].tolist(), "sources": sources.tolist()}
            for i, sources in self.reduction.merged.items()
            if len(sources)
        ]


def tile_places(encoded: EncodedImage) -> list[list[int] | None]:
    """Row and column of every tile on its canvas; None for a view that is no tile."""
    if len(encoded.crops) == 1:
        return [None]
    first: dict[int, int] = {}
    for c, crop in enumerate(encoded.crops):
        if crop.layout.separators is not None and crop.eligible.any():
            first[c] = int(crop.layout.separators[crop.eligible].min())
    lines = sorted(set(first.values()))
    columns = dict.fromkeys(lines, 0)
    places: list[list[int] | None] = []
    for c in range(len(encoded.crops)):
        if c not in first:
            places.append(None)
            continue
        places.append([lines.index(first[c]), columns[first[c]]])
        columns[first[c]] += 1
    return places
