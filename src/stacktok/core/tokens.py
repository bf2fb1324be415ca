"""The data that passes between a model adapter, a method and the runtime.

An adapter describes an image in two steps. Its `ImageLayout` follows from the picture's size alone: crops, grids, which
tokens may be kept, and where each one stands in the language model's input. An `EncodedImage` adds the features. A
crop is one encoder input: the image of a fixed-resolution encoder, base view and tiles of a multi-crop one, a frame of
a video. A method answers with a `Reduction`: output tokens in order. Nothing downstream needs to know which method it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask
from stacktok.kernels.transfer import upload

Ints = NDArray[np.int64]

SEPARATOR = -1
"""Crop number of an output token that is a separator (a newline of the layout), not an image token."""


@dataclass(frozen=True, eq=False)
class CropLayout:
    """One encoder input without its features.

    Attributes
    ----------
    grid
        Rows and columns of tokens, h w = n_c, raster order.
    eligible
        Tokens that may be kept, (n_c,).
    offsets
        Index of each token among the image's tokens in the language model's input, (n_c,); -1 where the model itself
        drops the token, which then is not eligible.
    separators
        Index into `ImageLayout.separators` of the separator that closes the token's line, (n_c,), -1 for none; None
        where no line is closed.
    """

    grid: tuple[int, int]
    eligible: Mask
    offsets: Ints
    separators: Ints | None = None

    @property
    def n(self) -> int:
        """Number of encoded tokens."""
        return len(self.offsets)

    @classmethod
    def raster(cls, grid: tuple[int, int], first: int = 0) -> CropLayout:
        """A crop that is fed whole, in raster order, from offset ``first`` on."""
        n = grid[0] * grid[1]
        return cls(grid, np.ones(n, dtype=np.bool_), np.arange(first, first + n, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """One image or video without its features: counts, grids and offsets, known before the encoder runs.

    Attributes
    ----------
    crops
        Encoder inputs, L >= 1.
    length
        Tokens that the unpruned image fills in the language model's input, separators included.
    separators
        Offsets of the layout's separators (LLaVA-NeXT's newlines), in order.
    base
        The crop that shows the whole picture where the others show its parts; None where there is none.
    """

    crops: tuple[CropLayout, ...]
    length: int
    separators: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    base: int | None = None

    @classmethod
    def raster(cls, *grids: tuple[int, int]) -> ImageLayout:
        """Crops that are fed whole, one after the other, each in raster order."""
        ends = np.cumsum([0, *(rows * columns for rows, columns in grids)]).tolist()
        crops = tuple(CropLayout.raster(grid, first) for grid, first in zip(grids, ends[:-1], strict=True))
        return cls(crops, ends[-1])

    @property
    def n(self) -> int:
        """Number of encoded tokens of all crops."""
        return sum(crop.n for crop in self.crops)

    @property
    def capacity(self) -> int:
        """Number of tokens that may be kept."""
        return sum(int(crop.eligible.sum()) for crop in self.crops)

    def with_eligible(self, eligible: Mask | None) -> ImageLayout:
        """The layout with another mask of the tokens that may be kept, (n,); None leaves it as it is."""
        if eligible is None:
            return self
        ends = np.cumsum([crop.n for crop in self.crops])
        masks = np.split(eligible, ends[:-1])
        return replace(
            self, crops=tuple(replace(crop, eligible=mask) for crop, mask in zip(self.crops, masks, strict=True))
        )

    def keep(self, indices: Sequence[Ints], *, record: Any = None, keep_newlines: bool = False) -> Reduction:
        """The reduction that keeps some tokens as they are, in the order of the unpruned image.

        Parameters
        ----------
        indices
            Kept tokens of every crop.
        record
            The method's record of its run.
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
        order = np.argsort(self.offsets_of(found), kind="stable")
        return Reduction(anchors=found[order], record=record)

    def offsets_of(self, anchors: Ints) -> Ints:
        """Offset of every (crop, token) pair, (k,); a token that the model drops is an error.

        Parameters
        ----------
        anchors
            Pairs (crop, token), or (`SEPARATOR`, index of a separator), (k, 2).
        """
        offsets = self._offsets(anchors)
        if len(offsets) and int(offsets.min()) < 0:
            crop, token = anchors[int(offsets.argmin())].tolist()
            raise ValueError(
                f"a reduction keeps token {token} of crop {crop}, which the model drops; keep eligible ones"
            )
        return offsets

    def fed(self, pairs: Ints) -> Ints:
        """Offsets of those (crop, token) pairs, (k, 2), that the language model is fed."""
        offsets = self._offsets(pairs)
        return offsets[offsets >= 0]

    def _offsets(self, pairs: Ints) -> Ints:
        offsets = np.empty(len(pairs), dtype=np.int64)
        crops = pairs[:, 0]
        for c in np.unique(crops).tolist():
            if not SEPARATOR <= c < len(self.crops):
                raise ValueError(f"a reduction names crop {c} of an image with {len(self.crops)} crops")
            own = crops == c
            source = self.separators if c == SEPARATOR else self.crops[c].offsets
            offsets[own] = source[pairs[own, 1]]
        return offsets


@dataclass(frozen=True, eq=False)
class TowerAttention:
    """The vision tower's attention to the tokens of one crop; only read where a method needs it.

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
    early
        Scores in the second layer that the method reads, (n_c,).
    """

    scores: torch.Tensor
    keys: torch.Tensor
    cls: torch.Tensor | None = None
    project: Callable[[torch.Tensor], torch.Tensor] | None = None
    early: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class EncodedCrop:
    """One encoder input: an image, a base view, a tile, a frame.

    Attributes
    ----------
    vision
        Pre-projector features, (n_c, d_v).
    projected
        Post-projector embeddings, (n_c, d).
    layout
        Grid, eligible tokens and offsets.
    attention
        The vision tower's attention, for the methods that need it; None otherwise.
    """

    vision: torch.Tensor
    projected: torch.Tensor
    layout: CropLayout
    attention: TowerAttention | None = None

    @property
    def n(self) -> int:
        """Number of encoded tokens."""
        return self.layout.n

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.layout.grid

    @property
    def eligible(self) -> Mask:
        """Tokens that may be kept, (n_c,)."""
        return self.layout.eligible


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image or video as the encoder left it.

    Attributes
    ----------
    layout
        Crops, eligible tokens and offsets.
    crops
        The features of every crop of the layout.
    tau_query
        The model family's temperature of the query affinities, for a method that is not told another.
    modality
        "image", or "video", whose crops are frames.
    further
        Features that the language model is given further on for every token of the unpruned image (DeepStack),
        (length, e); None for none. Only where the host hands them over with the embeddings.
    """

    layout: ImageLayout
    crops: tuple[EncodedCrop, ...]
    tau_query: float = 0.02
    modality: str = "image"
    further: torch.Tensor | None = None

    @classmethod
    def of(
        cls, layout: ImageLayout, vision: torch.Tensor, projected: torch.Tensor, tau_query: float = 0.02
    ) -> EncodedImage:
        """An image from its layout and the features of all crops, (n, d_v) and (n, d), crop after crop."""
        sizes = [crop.n for crop in layout.crops]
        if [len(vision), len(projected)] != [layout.n] * 2:
            raise ValueError(
                f"vision has {len(vision)} and projected {len(projected)} rows for an image of {layout.n} tokens; "
                "give one row per token"
            )
        parts = zip(torch.split(vision, sizes), torch.split(projected, sizes), layout.crops, strict=True)
        return cls(layout, tuple(EncodedCrop(x, z, crop) for x, z, crop in parts), tau_query)

    @property
    def n(self) -> int:
        """Number of encoded tokens of all crops."""
        return self.layout.n

    @property
    def capacity(self) -> int:
        """Number of tokens that may be kept."""
        return self.layout.capacity

    @property
    def length(self) -> int:
        """Tokens that the unpruned image fills in the language model's input, separators included."""
        return self.layout.length

    def with_eligible(self, eligible: Mask) -> EncodedImage:
        """The image with those of its eligible tokens, (n,), that a mask allows."""
        own = np.concatenate([crop.eligible for crop in self.layout.crops])
        layout = self.layout.with_eligible(own & eligible)
        crops = zip(self.crops, layout.crops, strict=True)
        return replace(self, layout=layout, crops=tuple(replace(crop, layout=new) for crop, new in crops))

    def with_attention(self, attention: Sequence[TowerAttention]) -> EncodedImage:
        """The image with the tower's attention to every crop."""
        crops = zip(self.crops, attention, strict=True)
        return replace(self, crops=tuple(replace(crop, attention=own) for crop, own in crops))

    def with_early(self, early: EncodedImage) -> EncodedImage:
        """The image with the scores of another reading of the tower as those of the second layer."""
        attention = [
            replace(own.attention, early=other.attention.scores)
            for own, other in zip(self.crops, early.crops, strict=True)
            if own.attention is not None and other.attention is not None
        ]
        return self.with_attention(attention)

    def keep(self, indices: Sequence[Ints], *, record: Any = None, keep_newlines: bool = False) -> Reduction:
        """The reduction that keeps some tokens of every crop as they are; see `ImageLayout.keep`."""
        return self.layout.keep(indices, record=record, keep_newlines=keep_newlines)

    def offsets_of(self, anchors: Ints) -> Ints:
        """Offset of every (crop, token) pair, (k,); see `ImageLayout.offsets_of`."""
        return self.layout.offsets_of(anchors)

    def kept_offsets(self, reduction: Reduction, device: torch.device) -> torch.Tensor:
        """Offset of every output token, (k,), on ``device``; a reduction that was made there is not read back."""
        if isinstance(reduction, DeviceReduction):
            return reduction.offsets.to(device)
        return upload(self.offsets_of(reduction.anchors), device)

    def gather(self, embeddings: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """The embeddings of the output tokens, (k, d), in order.

        Parameters
        ----------
        embeddings
            Those of the unpruned image in the language model's input, (length, d).
        reduction
            The method's answer.
        """
        if len(embeddings) != self.length:
            raise ValueError(
                f"embeddings has {len(embeddings)} rows for an image that fills {self.length}; give the unpruned ones"
            )
        kept = embeddings[self.kept_offsets(reduction, embeddings.device)]
        for output, embedding in reduction.embeddings.items():
            kept[output] = embedding.to(kept)
        return kept

    def gather_further(self, reduction: Reduction) -> torch.Tensor | None:
        """Further features of the output tokens, (k, e); those of a merged token are averaged.

        Parameters
        ----------
        reduction
            The method's answer.
        """
        if self.further is None:
            return None
        kept = self.further[self.kept_offsets(reduction, self.further.device)]
        for output, sources in reduction.merged.items():
            rows = upload(self.layout.fed(sources), self.further.device)
            kept[output] = self.further[rows].mean(0)
        return kept


@dataclass(frozen=True, eq=False)
class Reduction:
    """The output tokens of an image, in the order in which the language model gets them.

    Attributes
    ----------
    anchors
        Per output token the (crop, token) pair whose offset and position it takes, (k, 2); the crop is `SEPARATOR` for
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

    def read(self) -> Reduction:
        """The same reduction in host memory."""
        return self


class DeviceReduction(Reduction):
    """A reduction that keeps tokens as they are and was decided on a device, which nobody has waited for.

    Its length is known and its offsets are there to gather with. Looking at anchors or record reads the device.

    Parameters
    ----------
    layout
        Of the image.
    offsets
        Offset of every output token, ascending, (k,), on the device.
    record
        Makes the method's record.
    seconds
        As in `Reduction`: the time until the work was queued.
    """

    def __init__(
        self, layout: ImageLayout, offsets: torch.Tensor, record: Callable[[], Any], seconds: float = 0.0
    ) -> None:
        for name, value in (("layout", layout), ("offsets", offsets), ("make_record", record), ("seconds", seconds)):
            object.__setattr__(self, name, value)
        for name in ("embeddings", "merged"):
            object.__setattr__(self, name, {})

    layout: ImageLayout
    offsets: torch.Tensor
    make_record: Callable[[], Any]

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def anchors(self) -> Ints:
        """As in `Reduction`."""
        pairs = np.full((self.layout.length, 2), SEPARATOR, dtype=np.int64)
        for c, crop in enumerate(self.layout.crops):
            fed = np.flatnonzero(crop.offsets >= 0)
            pairs[crop.offsets[fed]] = np.stack([np.full(len(fed), c), fed], axis=1)
        found: Ints = pairs[self.offsets.cpu().numpy()]
        return found

    @cached_property
    def record(self) -> Any:
        """As in `Reduction`."""
        return self.make_record()

    @property
    def tokens(self) -> int:
        """As in `Reduction`: no separator is among them."""
        return len(self)

    def timed(self, seconds: float) -> Reduction:
        """The same reduction with the time that it took."""
        return DeviceReduction(self.layout, self.offsets, self.make_record, seconds)

    def read(self) -> Reduction:
        """The same reduction in host memory."""
        return Reduction(self.anchors, record=self.record, seconds=self.seconds)

    def __repr__(self) -> str:
        return f"DeviceReduction({len(self)} tokens on {self.offsets.device})"


class KeptOnDevice(NamedTuple):
    """The tokens a method keeps of an image, decided on a device.

    Attributes
    ----------
    masks
        Which tokens of every crop are kept, (n_c,), bool.
    size
        How many they are.
    record
        Makes the method's record, which reads the device.
    """

    masks: Sequence[torch.Tensor]
    size: int
    record: Callable[[], Any]


def device_reductions(layouts: Sequence[ImageLayout], kept: Sequence[KeptOnDevice]) -> list[DeviceReduction]:
    """The reductions of several images, which nobody waits for.

    Parameters
    ----------
    layouts
        Of the images.
    kept
        Their kept tokens, all on one device.
    """
    device = kept[0].masks[0].device
    starts = np.cumsum([0, *(layout.length for layout in layouts)])
    places = [
        np.where(crop.offsets >= 0, start + crop.offsets, starts[-1])
        for layout, start in zip(layouts, starts.tolist(), strict=False)
        for crop in layout.crops
    ]
    # The last place takes the tokens that the models drop, which are never kept.
    fed = torch.zeros(int(starts[-1]) + 1, dtype=torch.int64, device=device)
    masks = torch.cat([mask for own in kept for mask in own.masks])
    fed.scatter_(0, upload(np.concatenate(places), device), masks.long())
    # One stable sort brings the kept tokens of every image before its others; a search for ones would have to be waited
    # for, since the host does not know their number.
    image = upload(np.repeat(np.arange(len(layouts)), np.diff(starts)), device)
    order = (2 * image - fed[:-1]).sort(stable=True).indices
    return [
        DeviceReduction(layout, order[start : start + own.size] - start, own.record)
        for layout, own, start in zip(layouts, kept, starts.tolist(), strict=False)
    ]


def single_crop(
    vision: torch.Tensor,
    projected: torch.Tensor,
    grid: tuple[int, int],
    eligible: Mask | None = None,
    *,
    tau_query: float = 0.02,
) -> EncodedImage:
    """An image of one crop whose tokens the language model is fed one by one."""
    return EncodedImage.of(ImageLayout.raster(grid).with_eligible(eligible), vision, projected, tau_query)
