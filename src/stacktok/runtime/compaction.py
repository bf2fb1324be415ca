"""From reductions to a shorter input of the language model: pure functions on tensors, usable without hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, Reduction

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Span:
    """An image inside a prompt.

    Attributes
    ----------
    columns
        Columns of the prompt that the unpruned image fills, ascending, (image.length,).
    image
        The image.
    reduction
        What is left of it.
    """

    columns: Ints
    image: EncodedImage
    reduction: Reduction

    @property
    def unchanged(self) -> bool:
        """Whether the language model would get the very rows that it gets without pruning."""
        kept = self.reduction
        return (
            not kept.embeddings
            and len(kept) == self.image.length
            and bool((np.diff(self.image.places_of(kept.anchors)) > 0).all())
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every column of the compacted batch comes from.

    Attributes
    ----------
    columns
        Column of the unpruned prompt, (B, L), 0 in padding.
    valid
        Which entries are not padding, (B, L).
    embeddings
        (row, column, embedding) of output tokens that are not simply a row of the unpruned input.
    """

    columns: torch.Tensor
    valid: torch.Tensor
    embeddings: tuple[tuple[int, int, torch.Tensor], ...]

    @property
    def origin(self) -> torch.Tensor:
        """Column of the unpruned prompt, (B, L), -1 in padding."""
        return self.columns.masked_fill(~self.valid, -1)

    @property
    def ragged(self) -> bool:
        """Whether any row is padded."""
        return not bool(self.valid.all())


def lay_out(valid: Mask, spans: Sequence[Sequence[Span]], *, pad_right: bool = False) -> Layout:
    """Drop every column that no reduction keeps, and pad the rows to one length.

    Parameters
    ----------
    valid
        Columns that are not padding, (B, S).
    spans
        The images of every row.
    pad_right
        Pad on the right; generation needs the left, the default.
    """
    rows = [_compact_row(valid[row], spans[row]) for row in range(len(valid))]
    length = max(len(columns) for columns, _ in rows)
    columns = torch.zeros((len(rows), length), dtype=torch.long)
    kept = torch.zeros((len(rows), length), dtype=torch.bool)
    embeddings: list[tuple[int, int, torch.Tensor]] = []
    for row, (source, made) in enumerate(rows):
        start = 0 if pad_right else length - len(source)
        columns[row, start : start + len(source)] = torch.from_numpy(source)
        kept[row, start : start + len(source)] = True
        embeddings.extend((row, start + column, embedding) for column, embedding in made)
    return Layout(columns, kept, tuple(embeddings))


def _compact_row(valid: Mask, spans: Sequence[Span]) -> tuple[Ints, list[tuple[int, torch.Tensor]]]:
    text = valid.copy()
    for span in spans:
        text[span.columns] = False
    sources = [np.flatnonzero(text)]
    # Output tokens stand where their image begins, in the reduction's order.
    first = [sources[0]]
    rank = [np.zeros(len(sources[0]), dtype=np.int64)]
    made: list[tuple[int, torch.Tensor]] = []
    count = len(sources[0])
    for span in spans:
        kept = span.columns[span.image.places_of(span.reduction.anchors)]
        sources.append(kept)
        first.append(np.full(len(kept), span.columns[0]))
        rank.append(np.arange(len(kept)))
        made.extend((count + output, embedding) for output, embedding in span.reduction.embeddings.items())
        count += len(kept)
    order = np.lexsort((np.concatenate(rank), np.concatenate(first)))
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    return np.concatenate(sources)[order], [(int(place[output]), embedding) for output, embedding in made]


def gather_embeddings(inputs_embeds: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The compacted input embeddings, (B, L, d), from those of the unpruned prompt, (B, S, d)."""
    columns = layout.columns.to(inputs_embeds.device)
    gathered = inputs_embeds[torch.arange(len(columns), device=columns.device)[:, None], columns]
    for row, column, embedding in layout.embeddings:
        gathered[row, column] = embedding.to(gathered)
    return gathered


def gather_columns(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Values per column, (..., B or 1, S), of the kept columns, (..., B, L)."""
    columns = layout.columns.to(values.device)
    values = values.expand(*values.shape[:-2], len(columns), values.shape[-1])
    return values.gather(-1, columns.expand(*values.shape[:-1], columns.shape[-1]))


def count_positions(valid: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, ... of the columns that are not padding, 0 in padding, (B, L)."""
    return (valid.long().cumsum(-1) - 1).clamp_min(0)


def padding_of(attention_mask: Any, length: int, past: int = 0) -> Mask | None:
    """Which of the last ``length`` columns are not padding, (B, length); None where all are.

    Parameters
    ----------
    attention_mask
        None; (B, columns); the 4-D causal mask that generation prepares for a static cache, boolean or additive; or a
        mapping from layer type to such masks.
    length
        Columns of the input at hand.
    past
        Columns that the cache holds already.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim not in (2, 4):
        kind = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
        raise ValueError(f"attention_mask {kind} cannot be pruned; give a 2-D mask (batch, columns), or none")
    if attention_mask.ndim == 2:
        valid = attention_mask[:, -length:].bool()
    else:
        allowed = attention_mask[:, 0, :, past : past + length]
        allowed = allowed if allowed.dtype == torch.bool else allowed > torch.finfo(allowed.dtype).min / 2
        # The last query sees every key that is not padding; anything but causal attention to those is a custom mask.
        valid = allowed[:, -1]
        causal = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
        if allowed.shape[1] != length or not bool((allowed == (causal & valid[:, None]))[valid].all()):
            raise ValueError("a custom 4-D attention_mask cannot be pruned; give a 2-D mask (batch, columns), or none")
    found: Mask = valid.cpu().numpy()
    return None if found.all() else found
