"""Bookkeeping of a shortened KV cache: which of its columns are padding, and which positions come next.

The state lives on the cache object itself, so that it goes where the cache goes: into a copy, into a later call, and
away with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

_ATTRIBUTE = "_stacktok_state"


@dataclass(frozen=True, eq=False)
class CacheState:
    """A cache after its last pruned chunk.

    Attributes
    ----------
    valid
        Columns of the cache that are not padding, (B, C).
    padded
        Whether any is.
    next_original
        The position that would come next without pruning, (B,).
    next_used
        The position that comes next in fact, (B,).
    from_prompt
        Whether the kept tokens were chosen for the question in the prompt.
    text_from
        First column after the last image: what follows is text, and may be cut off again.
    places
        Index of every column in the unpruned sequence, (B, C).
    next_place
        The index that comes next there.
    """

    valid: torch.Tensor
    padded: bool
    next_original: torch.Tensor
    next_used: torch.Tensor
    from_prompt: bool
    text_from: int
    places: torch.Tensor
    next_place: int

    @property
    def length(self) -> int:
        """Columns, C."""
        return self.valid.shape[1]

    def expanded(self, batch: int) -> CacheState:
        """The state of a batch whose rows were repeated, as beams and several answers per prompt do."""
        rows = len(self.valid)
        if rows == batch:
            return self
        if batch % rows:
            raise ValueError(
                f"past_key_values was pruned for {rows} prompts and is continued with {batch}; keep the batch as it was"
            )
        times = batch // rows
        return replace(
            self,
            valid=self.valid.repeat_interleave(times, 0),
            next_original=self.next_original.repeat_interleave(times, 0),
            next_used=self.next_used.repeat_interleave(times, 0),
            places=self.places.repeat_interleave(times, 0),
        )

    def cut(self, length: int) -> CacheState:
        """The state of a cache that was cut to ``length`` columns, as assisted decoding does with rejected tokens."""
        if length < self.text_from:
            raise ValueError(
                f"past_key_values was cut to {length} columns, into a pruned image that ends at {self.text_from}; "
                "cut no further, or start without past_key_values"
            )
        lost = self.length - length
        return replace(
            self,
            valid=self.valid[:, :length],
            next_original=self.next_original - lost,
            next_used=self.next_used - lost,
            places=self.places[:, :length],
            next_place=self.next_place - lost,
        )

    def mask(self, past: int, new: torch.Tensor) -> torch.Tensor:
        """The 2-D mask of the cache's columns, those added since, and the new ones, (B, past + q)."""
        valid = self.valid.to(new.device)
        since = torch.ones((len(valid), past - self.length), dtype=torch.bool, device=new.device)
        return torch.cat([valid, since, new], dim=1)

    def placed(self, past: int, new: int) -> torch.Tensor:
        """Indices in the unpruned sequence of the cache's columns, those added since, and new ones, (B, past + q)."""
        more = torch.arange(self.next_place, self.next_place + past - self.length + new, device=self.places.device)
        return torch.cat([self.places, more.expand(len(self.places), -1)], dim=1)


def state_of(cache: Any) -> tuple[CacheState | None, int]:
    """The state of a cache, or None for one that was never pruned, and the columns that it holds."""
    if cache is None:
        return None, 0
    past = int(cache.get_seq_length())
    state: CacheState | None = getattr(cache, _ATTRIBUTE, None)
    if state is not None and past < state.length:
        state = state.cut(past) if past else None
    return state, past


def remember(cache: Any, state: CacheState) -> None:
    """Tie a state to its cache."""
    setattr(cache, _ATTRIBUTE, state)
