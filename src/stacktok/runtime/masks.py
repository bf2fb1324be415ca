"""Ready attention masks of a shorter sequence, for families whose language model is given them.

Such a mask lets the tokens of an image see each other: one that is built again from the padding would be causal. It is
gathered for the kept tokens. A sliding window stays that of the unpruned sequence, here and in later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stacktok.models.base import KeptTokens

SLIDING = "sliding_attention"


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns that a call sees: those of the cache, then the new ones.

    Attributes
    ----------
    valid
        Which are not padding, (B, past + q).
    places
        Index of each in the unpruned sequence, (B, past + q).
    past
        Columns of the cache.
    """

    valid: torch.Tensor
    places: torch.Tensor
    past: int

    @property
    def new(self) -> int:
        """New columns, q."""
        return self.valid.shape[1] - self.past


class ReadyMasks:
    """Makes the masks of one language model.

    Parameters
    ----------
    language_model
        The decoder stack; its config names the kinds of its layers, the window and the attention backend.
    """

    def __init__(self, language_model: Any) -> None:
        self.config: Any = language_model.config

    @property
    def used(self) -> bool:
        """Whether the backend is given such masks; FlashAttention is told about padding alone."""
        return self.config._attn_implementation in ("sdpa", "eager")

    def gathered(
        self, masks: Mapping[str, torch.Tensor | None], kept: KeptTokens, columns: Columns, cache: Any, embeds: Any
    ) -> dict[str, torch.Tensor | None]:
        """The masks of a prompt's kept tokens, by kind of layer.

        Parameters
        ----------
        masks
            Of the unpruned prompt, (B or 1, 1, S, keys), boolean or additive; None is causal.
        kept
            The kept tokens.
        columns
            The cache's columns and the kept ones.
        cache
            As the call finds it.
        embeds
            Of the unpruned prompt, (B, S, d).
        """
        found: dict[str, torch.Tensor | None] = {}
        for kind, mask in masks.items():
            if mask is None and not columns.past and not kept.ragged:
                found[kind] = None
                continue
            among = (
                _causal(kept.indices) if mask is None else self._among(kind, mask, kept, columns.past, cache, embeds)
            )
            found[kind] = self._made(kind, among, columns, cache, embeds)
        return found

    def step(self, columns: Columns, cache: Any, embeds: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The masks of later tokens, which see what stands before them.

        Parameters
        ----------
        columns
            The cache's columns and the new ones.
        cache
            As the call finds it.
        embeds
            Of the new tokens, (B, q, d).
        """
        new = columns.places[:, columns.past :]
        return {
            kind: self._made(kind, _causal(new) & self._near(kind, new, new), columns, cache, embeds)
            for kind in dict.fromkeys(self.config.layer_types)
        }

    def _among(
        self, kind: str, mask: torch.Tensor, kept: KeptTokens, past: int, cache: Any, embeds: torch.Tensor
    ) -> torch.Tensor:
        """Which kept tokens see which, as in the unpruned mask, (B, L, L)."""
        batch, length = embeds.shape[:2]
        keys, offset = self._sizes(kind, length, cache, past)
        if mask.shape[-2:] != (length, keys):
            raise ValueError(
                f"attention_mask for {kind} has shape {tuple(mask.shape)} for {length} tokens and {keys} keys; give a "
                "2-D mask (batch, tokens), or none"
            )
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        allowed = allowed[:, 0, :, past - offset : past - offset + length].expand(batch, -1, -1)
        rows = kept.gather(allowed)
        return kept.gather(rows.transpose(1, 2)).transpose(1, 2)

    def _made(self, kind: str, among: torch.Tensor, columns: Columns, cache: Any, embeds: torch.Tensor) -> torch.Tensor:
        """A mask in the backend's form, (B, 1, q, keys).

        Parameters
        ----------
        kind
            Of the layers.
        among
            Which new tokens see which, (B, q, q).
        columns
            The cache's columns and the new ones.
        cache
            As the call finds it.
        embeds
            Whose type and device the mask has.
        """
        past, new = columns.past, columns.new
        among, valid, places = (part.to(embeds.device) for part in (among, columns.valid, columns.places))
        before = self._near(kind, places[:, past:], places[:, :past])
        allowed = torch.cat([before, among], dim=-1) & valid[:, None, :]
        # Padding sees itself, so that no row of probabilities is empty.
        itself = torch.eye(new, dtype=torch.bool, device=embeds.device) & ~valid[:, past:, None]
        allowed[..., past:] |= itself
        keys, offset = self._sizes(kind, new, cache, past)
        allowed = allowed[..., offset : offset + keys]
        allowed = torch.nn.functional.pad(allowed, (0, keys - allowed.shape[-1]), value=False)[:, None]
        if self.config._attn_implementation == "sdpa":
            return allowed
        return torch.zeros(allowed.shape, dtype=embeds.dtype, device=embeds.device).masked_fill(
            ~allowed, torch.finfo(embeds.dtype).min
        )

    def _near(self, kind: str, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys lie in the window of each row, (B, rows, keys); both are given by their places."""
        distance = rows[:, :, None] - keys[:, None, :]
        return distance < self.config.sliding_window if kind == SLIDING else torch.ones_like(distance, dtype=torch.bool)

    def _sizes(self, kind: str, new: int, cache: Any, past: int) -> tuple[int, int]:
        """Keys that the layers of a kind are given, and the column of the first."""
        if cache is None:
            return past + new, 0
        length, offset = cache.get_mask_sizes(new, self.config.layer_types.index(kind))
        return int(length), int(offset)


def _causal(places: torch.Tensor) -> torch.Tensor:
    """Every token sees itself and those before it, (B, q, q)."""
    new = places.shape[1]
    return torch.ones(new, new, dtype=torch.bool, device=places.device).tril().expand(len(places), -1, -1)
