"""From reductions to a shorter input of the language model: pure functions on tensors, usable without hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import DeviceReduction, EncodedImage, Ints, Reduction
from stacktok.kernels.transfer import upload
from stacktok.models.base import KeptTokens

Made = tuple[int, int, torch.Tensor]
"""Row, index and embedding, (d,), of an output token that is not simply a token of the unpruned input."""


@dataclass(frozen=True, eq=False)
class Span:
    """An image inside a prompt.

    Attributes
    ----------
    indices
        Tokens of the prompt that the unpruned image fills, ascending, (image.length,).
    image
        The image.
    reduction
        Its output tokens.
    """

    indices: Ints
    image: EncodedImage
    reduction: Reduction

    @property
    def unchanged(self) -> bool:
        """Whether the language model would get the very tokens that it gets without pruning."""
        kept = self.reduction
        if kept.embeddings or len(kept) != self.image.length:
            return False
        return isinstance(kept, DeviceReduction) or bool((np.diff(self.image.offsets_of(kept.anchors)) > 0).all())


def compact(
    valid: Mask, spans: Sequence[Sequence[Span]], device: torch.device, *, pad_right: bool = False
) -> tuple[KeptTokens, list[Made]]:
    """Drop every token that no reduction keeps, and pad the rows to one length.

    Lengths are known on the host. Where every image was decided on a device, which tokens they are stays there.

    Parameters
    ----------
    valid
        Tokens that are not padding, (B, S).
    spans
        The images of every row.
    device
        Where the kept tokens are gathered.
    pad_right
        Pad on the right; generation needs the left, the default.

    Returns
    -------
    tuple
        The kept tokens, and the output tokens that were made of several.
    """
    visual = sum(len(span.reduction) for row in spans for span in row)
    texts = [_text(*row) for row in zip(valid, spans, strict=True)]
    sizes = [len(text) + sum(len(span.reduction) for span in row) for text, row in zip(texts, spans, strict=True)]
    length = max(sizes)
    kept = torch.zeros((len(valid), length), dtype=torch.bool)
    for row, size in enumerate(sizes):
        kept[row, slice(size) if pad_right else slice(length - size, None)] = True
    if visual and all(isinstance(span.reduction, DeviceReduction) for row in spans for span in row):
        return KeptTokens(_device_indices(texts, spans, kept, valid.shape[1], device), kept, visual=visual), []
    rows = [_compact_row(*row) for row in zip(texts, spans, strict=True)]
    indices = torch.zeros((len(rows), length), dtype=torch.long)
    made: list[Made] = []
    merged: list[tuple[int, int, torch.Tensor]] = []
    for row, (source, own, sources) in enumerate(rows):
        start = 0 if pad_right else length - len(source)
        indices[row, start : start + len(source)] = torch.from_numpy(source)
        made.extend((row, start + token, embedding) for token, embedding in own)
        merged.extend((row, start + token, torch.from_numpy(of)) for token, of in sources)
    return KeptTokens(upload(indices, device), kept, merged, visual), made


def _text(valid: Mask, spans: Sequence[Span]) -> Ints:
    """Tokens of a row that are neither padding nor an image's, ascending."""
    text = valid.copy()
    for span in spans:
        text[span.indices] = False
    found: Ints = np.flatnonzero(text)
    return found


def _device_indices(
    texts: Sequence[Ints], spans: Sequence[Sequence[Span]], kept: torch.Tensor, length: int, device: torch.device
) -> torch.Tensor:
    """Index in the unpruned sequence of every kept token, (B, L), from reductions that are on a device.

    Image tokens are dropped where they stand, so that a row's tokens in ascending order are its compacted sequence: one
    sort of all rows, whatever text stands between the tokens of an image.
    """
    places = [row * length + span.indices for row, own in enumerate(spans) for span in own]
    images = upload(np.concatenate(places), device)
    starts = np.cumsum([0, *map(len, places)]).tolist()
    reductions = [span.reduction for own in spans for span in own]
    chosen = [
        images[start:end][reduction.offsets.to(device)]
        for reduction, start, end in zip(reductions, starts, starts[1:], strict=False)
        if isinstance(reduction, DeviceReduction)
    ]
    text = upload(np.concatenate([row * length + own for row, own in enumerate(texts)]), device)
    ordered = torch.cat([text, *chosen]).sort().values % length
    indices = torch.zeros(kept.numel(), dtype=torch.long, device=device)
    slots = upload(np.flatnonzero(kept.numpy()), device)
    return indices.scatter_(0, slots, ordered).reshape(kept.shape)


def _compact_row(
    text: Ints, spans: Sequence[Span]
) -> tuple[Ints, list[tuple[int, torch.Tensor]], list[tuple[int, Ints]]]:
    """The kept tokens of a row, the embeddings of those that were made, and the tokens that those were made of."""
    sources = [text]
    # Image tokens are dropped where they stand, unless a method reorders them: an image whose output keeps the
    # order of its tokens may have text between them (frames, rows).
    order_by = [sources[0]]
    rank = [np.zeros(len(sources[0]), dtype=np.int64)]
    made: list[tuple[int, torch.Tensor]] = []
    merged: list[tuple[int, Ints]] = []
    count = len(sources[0])
    for span in spans:
        kept = span.indices[span.image.offsets_of(span.reduction.anchors)]
        sources.append(kept)
        in_order = bool((np.diff(kept) > 0).all())
        order_by.append(kept if in_order else np.full(len(kept), span.indices[0]))
        rank.append(np.arange(len(kept)))
        made.extend((count + output, embedding) for output, embedding in span.reduction.embeddings.items())
        merged.extend(
            (count + output, span.indices[span.image.layout.fed(pairs)])
            for output, pairs in span.reduction.merged.items()
        )
        count += len(kept)
    order = np.lexsort((np.concatenate(rank), np.concatenate(order_by)))
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    return (
        np.concatenate(sources)[order],
        [(int(place[output]), embedding) for output, embedding in made],
        [(int(place[output]), of) for output, of in merged],
    )


def end_of_images(valid: Mask, spans: Sequence[Sequence[Span]], kept: KeptTokens) -> int:
    """First token of the compacted batch that follows every image."""
    ends = [0]
    for own, row, left in zip(valid, spans, kept.valid.numpy(), strict=True):
        if row:
            last = max(int(span.indices[-1]) for span in row)
            ends.append(int(np.flatnonzero(left)[-1]) + 1 - int(own[last + 1 :].sum()))
    return max(ends)


def count_positions(valid: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, ... of the tokens that are not padding, 0 in padding, (B, L)."""
    return (valid.long().cumsum(-1) - 1).clamp_min(0)


def padding_of(attention_mask: Any, length: int, past: int = 0, *, causal: bool = True) -> Mask | None:
    """Which of the last ``length`` tokens are not padding, (B, length); None where all are.

    Parameters
    ----------
    attention_mask
        None; (B, tokens); the 4-D causal mask that generation prepares for a static cache, boolean or additive; or a
        mapping from layer type to such masks.
    length
        Tokens of the input at hand.
    past
        Tokens that the cache holds already.
    causal
        Refuse a 4-D mask that is anything but causal.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim not in (2, 4):
        kind = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
        raise ValueError(f"attention_mask {kind} cannot be pruned; give a 2-D mask (batch, tokens), or none")
    if attention_mask.ndim == 2:
        valid = attention_mask[:, -length:].bool()
    else:
        allowed = attention_mask[:, 0, :, past : past + length]
        allowed = allowed if allowed.dtype == torch.bool else allowed > torch.finfo(allowed.dtype).min / 2
        # The last query sees every key that is not padding; anything but causal attention to those is a custom mask.
        valid = allowed[:, -1]
        lower = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
        if causal and (allowed.shape[1] != length or not bool((allowed == (lower & valid[:, None]))[valid].all())):
            raise ValueError("a custom 4-D attention_mask cannot be pruned; give a 2-D mask (batch, tokens), or none")
    found: Mask = valid.cpu().numpy()
    return None if found.all() else found
