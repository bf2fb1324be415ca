"""Tokens that a method keeps of one set: the result of a method that merges, and the record of every choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints

Indices: TypeAlias = "torch.Tensor | NDArray[np.integer] | Sequence[int]"


@dataclass(frozen=True, eq=False)
class MergedTokens:
    """Tokens that stay and tokens that are made of several: the result of a method that merges.

    Attributes
    ----------
    kept
        Tokens that stay as they are, (a,), in any order.
    anchors
        Tokens whose places the made ones take, (b,), none of them in `kept`.
    made
        Embeddings of the made tokens, (b, d).
    sources
        Tokens that each was made of, its anchor included.
    cls
        Embedding, (d,), of the CLS token where the method keeps that too.
    """

    kept: Indices
    anchors: Indices
    made: torch.Tensor
    sources: Sequence[Ints]
    cls: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """The record of what a method keeps of one set of tokens.

    Attributes
    ----------
    n
        Number of encoded positions.
    indices
        Kept tokens, ascending, (k,).
    order
        The same tokens in order of choice, (k,).
    embeddings
        Embedding, (d,), of kept tokens that are not simply their own row, by token index.
    sources
        Tokens that such a kept token was made of, itself included, by token index.
    cls
        Embedding, (d,), of the CLS token where the method keeps that too.
    """

    n: int
    indices: Ints
    order: Ints
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sources: Mapping[int, Ints] = field(default_factory=dict)
    cls: torch.Tensor | None = None

    @classmethod
    def of(cls, order: NDArray[np.integer], n: int) -> Choice:
        """A plain subset, given in any order."""
        picks: Ints = np.asarray(order, dtype=np.int64)
        return cls(n=n, indices=np.sort(picks), order=picks)

    @property
    def k(self) -> int:
        """Number of output tokens, CLS counted."""
        return len(self.indices) + (self.cls is not None)

    def gather(self, projected: torch.Tensor) -> torch.Tensor:
        """The output tokens from ``projected`` (n, d): CLS first where it is kept, then by index, (k, d)."""
        rows = projected[torch.from_numpy(self.indices).to(projected.device)].clone()
        for at, token in enumerate(self.indices.tolist()):
            if token in self.embeddings:
                rows[at] = self.embeddings[token].to(rows)
        return rows if self.cls is None else torch.cat([self.cls[None].to(rows), rows])

    def __repr__(self) -> str:
        merged = f", {len(self.embeddings)} merged" if self.embeddings else ""
        return f"Choice({self.k} of {self.n} tokens{merged}{', CLS' if self.cls is not None else ''})"


def checked_indices(tokens: MergedTokens, eligible: Mask, name: str) -> tuple[Ints, Ints]:
    """Kept tokens and anchors in host memory, if they are distinct tokens that may be kept.

    Parameters
    ----------
    tokens
        What a method returned.
    eligible
        Tokens that may be kept, (n,).
    name
        The function that returned them.
    """
    kept, anchors = _indices(tokens.kept, name), _indices(tokens.anchors, name)
    if not len(anchors) == len(tokens.made) == len(tokens.sources):
        raise ValueError(
            f"{name} returned {len(anchors)} anchors, {len(tokens.made)} made tokens and {len(tokens.sources)} "
            "sources; give one of each per made token"
        )
    both = np.sort(np.concatenate([kept, anchors]))
    outside = both[(both < 0) | (both >= len(eligible))]
    if len(outside):
        raise ValueError(f"{name} returned token {outside[0]}; give indices from 0 to {len(eligible) - 1}")
    if (np.diff(both) == 0).any():
        raise ValueError(
            f"{name} returned token {both[1:][np.diff(both) == 0][0]} more than once; give distinct tokens"
        )
    if not eligible[both].all():
        raise ValueError(f"{name} returned token {both[~eligible[both]][0]}, which may not be kept; heed crop.eligible")
    return kept, anchors


def _indices(tokens: Indices, name: str) -> Ints:
    found = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
        raise TypeError(f"{name} returned shape {found.shape} and type {found.dtype}; give token indices, (k,)")
    return found.astype(np.int64)
