"""DART: pivots with large keys; each takes the image tokens that are least like it. Inside the language model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from stacktok.core.budget import Budget, budget_share
from stacktok.core.tokens import Ints
from stacktok.methods.fastv import check_layers
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView

IMAGE_PIVOTS = 4
TEXT_PIVOTS = 4


@dataclass(frozen=True)
class DART(LayerMethod):
    """One cut, by dissimilarity to pivots: the 4 image and the 4 later text tokens whose keys have the largest L1 norm.

    Every pivot in turn takes its share of the image tokens that are left, those of lowest cosine of final-normed hidden
    states; the image's pivots stay too.

    Parameters
    ----------
    full_layers
        K, the number of layers that see every token; keys and hidden states are those of layer K - 1 (from 0).
    counting
        What the budget T means. "published": a pivot takes T // 8 tokens and the image's pivots come on top, so that
        4 + 8 (T // 8) stay, 196 for 192; "kept": exactly T stay.
    pivot_order
        Whose turn it is. "published": the order in which CPython iterates over the set of the pivots' indices in the
        prompt, as in the authors' code; "ascending": by index.
    """

    query_aware = True
    info = MethodInfo(
        name="DART",
        paper="DART, EMNLP 2025",
        deviations=(
            "cosines and norms in float32 whatever the model's type; ties go to the lowest index",
            "with fewer than four text tokens behind the image all of them are pivots; the original fails",
            "several images of a prompt are cut each by itself, and padding does not change the order of pivots",
        ),
    )

    full_layers: int = 2
    counting: Literal["published", "kept"] = "published"
    pivot_order: Literal["published", "ascending"] = "published"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.full_layers)
        for name, known in (("counting", ("published", "kept")), ("pivot_order", ("published", "ascending"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; use {known[0]!r} or {known[1]!r}")

    def layers(self, depth: int) -> tuple[int, ...]:
        """The last layer that sees every token."""
        if self.full_layers >= depth:
            raise ValueError(
                f"full_layers={self.full_layers} leaves nothing to prune in a language model of {depth} layers; "
                f"give at most {depth - 1}"
            )
        return (self.full_layers - 1,)

    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """Tokens that stay, by the chosen way of counting."""
        if self.counting == "kept":
            return super().keeps(depth, tokens, budget)
        share = budget_share(budget)
        asked = share * tokens if isinstance(share, Fraction) else Fraction(share)
        if asked >= tokens:
            return (tokens,)
        pivots = IMAGE_PIVOTS + TEXT_PIVOTS
        each = max(0, int(min(asked, Fraction(tokens - IMAGE_PIVOTS)) // pivots))
        return (min(tokens, IMAGE_PIVOTS + pivots * each),)

    def choose(self, view: LayerView, k: int) -> Ints:
        """The image's pivots, and what all pivots take in turn."""
        image = ranked(view.keys.float().abs().sum(1))[: min(IMAGE_PIVOTS, k)]
        text = ranked(view.text_keys.float().abs().sum(1))[:TEXT_PIVOTS]
        tokens, words = view.norm(view.states), view.norm(view.text_states)
        # Indices in the prompt, padding not counted.
        place = view.valid.cumsum(0) - 1
        indices = [*place[view.image[image]].tolist(), *place[view.text[text]].tolist()]
        pivots = dict(zip(indices, torch.cat([tokens[image], words[text]]), strict=True))
        order = sorted(indices) if self.pivot_order == "ascending" else set_order(indices)
        similarity = cosines_of(torch.stack([pivots[index] for index in order]), tokens)
        return np.sort(grow(similarity, image, k))


def set_order(indices: list[int]) -> list[int]:
    """The order in which CPython iterates over a set of small integers that was filled from a list.

    The hash of a small integer is the integer, and a set of up to 18 has a table of 32 slots once it holds five: the
    order is that of the remainders by 32, except where two fall on one slot.
    """
    return list(set(indices))


def ranked(scores: torch.Tensor) -> list[int]:
    """Indices by descending score; ties to the lowest index."""
    order: list[int] = torch.argsort(scores, descending=True, stable=True).tolist()
    return order


def cosines_of(pivots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cosines of pivots, (p, d), and tokens, (n, d), in float32, (p, n)."""
    a, b = (torch.nn.functional.normalize(rows.float(), dim=1, eps=1e-8) for rows in (pivots, tokens))
    return a @ b.T


def grow(similarity: torch.Tensor, kept: list[int], k: int) -> list[int]:
    """The kept tokens and those that the pivots take in turn, in order of choice, k in all.

    Parameters
    ----------
    similarity
        Cosines of the pivots in the order of their turns and the tokens, (p, n).
    kept
        Tokens that stay from the start.
    k
        Number of tokens; a pivot takes an even share of those that are still to come, rounded up.
    """
    found = list(kept)
    for turn, row in enumerate(similarity):
        row = row.clone()
        row[found] = float("inf")
        left = len(similarity) - turn
        share = -(-(k - len(found)) // left)
        found += torch.argsort(row, stable=True)[:share].tolist()
    return found
