"""What a model adapter hands a method, and what the method hands back.

An image is a list of crops: one for a fixed-resolution encoder, base view and tiles for a multi-crop one, frames for a
video. Every token knows its *place*: its index among the rows that the image would fill in the language model's input.
A method answers with output tokens in order; nothing downstream needs to know which method it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask

Ints = NDArray[np.int64]

SEPARATOR = -1
"""Crop number of an output token that is a separator (a newline of the layout), not an image token."""


@dataclass(frozen=True, eq=False)
class TowerAttention:
    """What the vision tower's attention said about one crop; only read where a method needs it.

    Attributes
    ----------
    scores
        Attention that each token receives, (n_c,): from CLS, summed over heads; or from all tokens, averaged over
        heads and summed over queries.
    keys
        Key vector of each token, mean over heads, (n_c, d_k).
    cls
        Pre-projector features of the CLS token, (d_v,); None where the tower has none.
    project
        The projector, (k, d_v) to (k, d); None where a token is not the projection of one feature vector.
    """

    scores: torch.Tensor
    keys: torch.Tensor
    cls: torch.Tensor | None = None
    project: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class EncodedCrop:
    """One encoder input: an image, a base view, a tile, a frame.

    Attributes
    ----------
    vision
        Pre-projector features, (n_c, d_v).
    projected
        Post-projector embeddings, (n_c, d).
    grid
        Rows and columns of tokens, h w = n_c, raster order.
    eligible
        Tokens that may be kept, (n_c,).
    places
        Index of each token among the rows that the image fills in the language model's input, (n_c,); -1 where the
        model itself drops the token, which then is not eligible.
    separators
        Index into `EncodedImage.separators` of the separator that closes the token's line, (n_c,), -1 for none; None
        where no line is closed.
    attention
        The vision tower's attention, for the methods that need it; None otherwise.
    """

    vision: torch.Tensor
    projected: torch.Tensor
    grid: tuple[int, int]
    eligible: Mask
    places: Ints
    separators: Ints | None = None
    attention: TowerAttention | None = None

    @property
    def n(self) -> int:
        """Number of encoded positions."""
        return len(self.places)


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image or video as the encoder left it.

    Attributes
    ----------
    crops
        Encoder inputs, L >= 1.
    length
        Rows that the unpruned image fills in the language model's input, separators included.
    separators
        Places of the layout's separators (LLaVA-NeXT's newlines), in order.
    tau_query
        The model family's temperature of the query affinities, for a method that is not told another.
    """

    crops: tuple[EncodedCrop, ...]
    length: int
    separators: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    tau_query: float = 0.02

    @property
    def n(self) -> int:
        """Number of encoded positions of all crops."""
        return sum(crop.n for crop in self.crops)

    @property
    def capacity(self) -> int:
        """Number of tokens that may be kept."""
        return sum(int(crop.eligible.sum()) for crop in self.crops)

    def keep(self, indices: Sequence[Ints], *, record: Any = None, keep_newlines: bool = False) -> Reduction:
        """The reduction that keeps some tokens as they are, in the order of the unpruned image.

        Parameters
        ----------
        indices
            Kept tokens of every crop.
        record
            What the method wants remembered.
        keep_newlines
            Keep, on top, the separator of every line that still has tokens.
        """
        if len(indices) != len(self.crops):
            raise ValueError(f"indices holds {len(indices)} arrays for {len(self.crops)} crops; give one per crop")
        anchors = [np.stack([np.full(len(kept), c), kept], axis=1) for c, kept in enumerate(indices)]
        if keep_newlines:
            lines = [
                crop.separators[kept]
                for crop, kept in zip(self.crops, indices, strict=True)
                if crop.separators is not None
            ]
            used = np.unique(np.concatenate(lines)) if lines else np.empty(0, dtype=np.int64)
            used = used[used >= 0]
            anchors.append(np.stack([np.full(len(used), SEPARATOR), used], axis=1))
        found = np.concatenate(anchors).astype(np.int64)
        order = np.argsort(self.places_of(found), kind="stable")
        return Reduction(anchors=found[order], record=record)

    def gather(self, rows: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The rows that are left of the unpruned image's, (k, d), in order.

        Parameters
        ----------
        rows
            What the image would fill in the language model's input, (length, d).
        reduction
            What is left.
        """
        if len(rows) != self.length:
            raise ValueError(f"rows has {len(rows)} rows for an image that fills {self.length}; give the unpruned ones")
        left = rows[torch.from_numpy(self.places_of(reduction.anchors)).to(rows.device)]
        for output, embedding in reduction.embeddings.items():
            left[output] = embedding.to(left)
        return left

    def places_of(self, anchors: Ints) -> Ints:
        """Place of every (crop, token) pair, (k,); a token without a place is an error.

        Parameters
        ----------
        anchors
            Pairs (crop, token), or (`SEPARATOR`, index of a separator), (k, 2).
        """
        places = np.empty(len(anchors), dtype=np.int64)
        crops = anchors[:, 0]
        for c in np.unique(crops).tolist():
            if not SEPARATOR <= c < len(self.crops):
                raise ValueError(f"a reduction names crop {c} of an image with {len(self.crops)} crops")
            rows = crops == c
            source = self.separators if c == SEPARATOR else self.crops[c].places
            places[rows] = source[anchors[rows, 1]]
        if len(places) and int(places.min()) < 0:
            crop, token = anchors[int(places.argmin())].tolist()
            raise ValueError(
                f"a reduction keeps token {token} of crop {crop}, which the model drops; keep eligible ones"
            )
        return places


@dataclass(frozen=True, eq=False)
class Reduction:
    """What is left of an image: output tokens in the order in which the language model gets them.

    Attributes
    ----------
    anchors
        Per output token the (crop, token) pair whose place and position it takes, (k, 2); the crop is `SEPARATOR` for
        a kept separator.
    embeddings
        Embedding, (d,), of those output tokens that are not simply their anchor's row, by output index.
    merged
        Sources of those output tokens that were made of other tokens than their anchor alone, by output index: (s, 2).
    record
        The method's record, such as a `Selection` or a `CropSelection`.
    seconds
        Time that the method took.
    """

    anchors: Ints
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)
    merged: Mapping[int, Ints] = field(default_factory=dict)
    record: Any = None
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.anchors)

    @cached_property
    def tokens(self) -> int:
        """Output tokens that are not separators: what a budget counts."""
        return int((self.anchors[:, 0] != SEPARATOR).sum())

    @property
    def sources(self) -> tuple[Ints, ...]:
        """Per output token the (crop, token) pairs that it came from, (s, 2); a separator came from none."""
        return tuple(
            self.merged[i] if i in self.merged else pair[None] if pair[0] != SEPARATOR else pair[None][:0]
            for i, pair in enumerate(self.anchors)
        )

    def timed(self, seconds: float) -> Reduction:
        """The same reduction with the time that it took."""
        return replace(self, seconds=seconds)


def single_crop(
    vision: torch.Tensor,
    projected: torch.Tensor,
    grid: tuple[int, int],
    eligible: Mask | None = None,
    *,
    tau_query: float = 0.02,
) -> EncodedImage:
    """An image of one crop whose tokens fill the language model's rows one by one."""
    n = len(projected)
    return EncodedImage(
        crops=(
            EncodedCrop(
                vision=vision,
                projected=projected,
                grid=grid,
                eligible=np.ones(n, dtype=np.bool_) if eligible is None else eligible,
                places=np.arange(n, dtype=np.int64),
            ),
        ),
        length=n,
        tau_query=tau_query,
    )
