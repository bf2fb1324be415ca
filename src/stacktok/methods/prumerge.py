"""PruMerge+: tokens of outstanding attention and tokens of a grid, each with its likes added."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.budget import Budget
from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints, TowerAttention
from stacktok.methods.choice import MergedTokens
from stacktok.methods.crop_methods import MergeMethod
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod

# Tokens that are added to a kept one.
_NEAREST = 32


@dataclass(frozen=True)
class PruMergePlus(TowerMethod, MergeMethod):
    """Kept tokens plus their 32 nearest, weighted by attention; one more token is the weighted sum of all others.

    Parameters
    ----------
    adaptive
        Let the attention decide how many tokens stay, as published, the budget being the most that may: the outliers of
        the attention, and evenly spaced tokens, about three times as many. Otherwise the budget is met: the extra
        token, a quarter of the rest by attention, the others evenly spaced.
    """

    info = MethodInfo(
        name="PruMerge+",
        paper="PruMerge, ICCV 2025",
        deviations=(
            "a budget that is met, which the original has not: one token for all that go, a quarter of the rest by "
            "attention, three quarters evenly spaced (adaptive=True is the original)",
            "tokens stay in the order of the image, and the extra one takes the place of the last that goes; the "
            "original orders by attention, then the grid, then the extra one",
            "at least every token is on the grid, and without outliers only the extra token and one by attention are "
            "kept; the original divides by zero",
            "tokens that may not be kept (padding, letterbox) take no part in merging either",
            "towers without CLS: the attention that a token receives from all; vLLM builds no layer behind the "
            "features, there the layer that feeds the projector is read",
        ),
    )

    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.adaptive, bool):
            raise TypeError(f"adaptive={self.adaptive!r} is not a bool; give True or False")

    @property
    def tower_signal(self) -> TowerSignal:
        """The last layer, its heads as one."""
        return replace(super().tower_signal, joined=True)

    def shares(self, image: EncodedImage, budget: Budget) -> list[int]:
        """An equal share each, or where adaptive at most that."""
        shares = super().shares(image, budget)
        if not self.adaptive:
            return shares
        return [
            min(share, len(self.outstanding(crop)) + 1) if share else 0
            for crop, share in zip(image.crops, shares, strict=True)
        ]

    def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
        """Kept tokens with their likes, and one for all others."""
        kept = self.outstanding(crop) if self.adaptive else np.empty(0, dtype=np.int64)
        if len(kept) != k - 1:
            kept = self.budgeted(crop, k - 1)
        eligible = np.flatnonzero(crop.eligible)
        rest = np.setdiff1d(eligible, kept)
        made, sources = add_likes(crop, self.attention_of(crop), kept, eligible, rest)
        return MergedTokens([], np.append(kept, rest[-1]), made, [*sources, rest])

    def outstanding(self, crop: EncodedCrop) -> Ints:
        """Outliers of the attention, most first, then the tokens of the grid that their share calls for."""
        ranked, eligible = self.by_attention(crop), np.flatnonzero(crop.eligible)
        scores = self.attention_of(crop).scores.float().cpu().numpy()[eligible]
        low, high = np.percentile(scores, [25, 75])
        share = float((scores > high + 1.5 * (high - low)).mean())
        if share == 0:
            return ranked[:1]
        outliers = ranked[: int(len(eligible) * share)]
        grid = eligible[: len(eligible) - 1 : max(1, int(1 / share) // 3)]
        found = np.concatenate([outliers, grid[~np.isin(grid, outliers)]])
        # One token at least is left to be merged.
        return found[: len(eligible) - 1]

    def budgeted(self, crop: EncodedCrop, count: int) -> Ints:
        """A quarter by attention, the others evenly spaced among what is left."""
        ranked = self.by_attention(crop)
        first = ranked[: round(count / 4)]
        left = np.setdiff1d(ranked, first)
        spaced = left[np.arange(count - len(first)) * len(left) // max(1, count - len(first))]
        return np.concatenate([first, spaced])


def add_likes(
    crop: EncodedCrop, attention: TowerAttention, kept: Ints, eligible: Ints, rest: Ints
) -> tuple[torch.Tensor, list[Ints]]:
    """Each kept token plus the attention-weighted sum of its nearest others by key; last, that of the rest.

    Returns
    -------
    tuple
        Embeddings, (len(kept) + 1, d), and for each kept token the tokens that it was made of.
    """
    rows = (crop.projected if attention.project is None else crop.vision).float()
    weighted = attention.scores.float().to(rows.device)[:, None] * rows
    keys = torch.nn.functional.normalize(attention.keys.float(), dim=-1)
    likeness = keys[kept] @ keys[eligible].T
    likeness[torch.from_numpy(kept[:, None] == eligible).to(likeness.device)] = -torch.inf
    count = min(_NEAREST, len(eligible) - 1)
    nearest = eligible[likeness.topk(count, dim=1).indices.cpu().numpy()]
    merged = torch.cat([rows[kept] + weighted[nearest].sum(1), weighted[rest].sum(0, keepdim=True)])
    if attention.project is not None:
        merged = attention.project(merged.to(crop.vision.dtype))
    return merged, [np.sort(np.append(own, token)) for token, own in zip(kept, nearest, strict=True)]
