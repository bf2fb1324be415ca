"""Attention scores of the wanted rows alone, from queries and keys: never a whole map of all heads at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# Entries of a block of probabilities.
_BLOCK = 1 << 24


@dataclass(frozen=True)
class TowerSignal:
    """Which attention of the vision tower a method reads.

    Attributes
    ----------
    rows
        Whose attention: "cls", "received" from all tokens, None for CLS where the tower has one.
    early
        A second layer to read, as the share of the tower's depth that it ends: 0.5 is layer 12 of 24, from 1.
    joined
        Read the last layer of the tower, its heads as one, in place of the layer that feeds the projector.
    """

    rows: Literal["cls", "received"] | None = None
    early: float | None = None
    joined: bool = False

    def early_layer(self, depth: int) -> int | None:
        """Index, from 0, of the second layer in a tower of ``depth`` layers."""
        return None if self.early is None else min(max(round(self.early * depth), 1), depth) - 1


def row_attention(
    query: torch.Tensor, key: torch.Tensor, scaling: float, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention probabilities of some query rows, (H, R, S), in float32.

    Parameters
    ----------
    query
        The rows' queries, (H, R, d).
    key
        All keys, (H_kv, S, d); H is a multiple of H_kv.
    scaling
        Factor of the logits.
    allowed
        Keys that each row may see, (R, S); None for all.
    """
    heads, rows, _ = query.shape
    groups = len(key)
    logits = torch.matmul(
        query.float().reshape(groups, heads // groups * rows, -1), key.float().transpose(-1, -2)
    ).reshape(heads, rows, -1)
    logits = logits * scaling
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits.softmax(-1)


def received_attention(
    query: torch.Tensor, key: torch.Tensor, scaling: float, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention that every token receives from all, mean over heads and summed over queries, (S,).

    Parameters
    ----------
    query, key
        (H, Q, d) and (H_kv, S, d).
    scaling
        Factor of the logits.
    allowed
        Keys that each query may see, (Q, S); None for all.
    """
    heads, count, _ = query.shape
    step = max(1, _BLOCK // max(1, heads * key.shape[1]))
    total = torch.zeros(key.shape[1], dtype=torch.float32, device=key.device)
    for start in range(0, count, step):
        seen = None if allowed is None else allowed[start : start + step]
        total += row_attention(query[:, start : start + step], key, scaling, seen).mean(0).sum(0)
    return total
