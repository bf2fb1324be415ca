"""VScan's scan: tokens by windows of an early layer's attention and by a late layer's; the others merge into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.choice import MergedTokens
from stacktok.methods.crop_methods import MergeMethod
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod


@dataclass(frozen=True)
class VScan(TowerMethod, MergeMethod):
    """Half of the budget evenly over windows of the grid, half over the image; a kept token is a mean of its likes.

    This is the first of the method's two stages, all of which is before the language model and can be served;
    `VScanTwoStage` adds the second.

    Parameters
    ----------
    window
        Tokens along a window's side.
    local_ratio
        Share of the budget that the windows get.
    local_depth
        Share of the tower's layers at whose end the windows are scanned: 6 of 24 on CLIP as published.
    """

    info = MethodInfo(
        name="VScan",
        paper="VScan, arXiv 2505.22654",
        deviations=(
            "the first of its two stages, which can be served; VScanTwoStage (vscan-2) makes both",
            "what the windows cannot share evenly goes to the image as a whole; the original keeps fewer tokens",
            "LLaVA-NeXT: the budget is the image's and split evenly over its crops; the original's is per crop",
            "tokens that may not be kept (padding, letterbox) take no part in merging either",
            "towers without CLS: the attention that a token receives from all",
        ),
    )

    window: int = 6
    local_ratio: float = 0.5
    local_depth: float = 6 / 24

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self.window)
        for name in ("local_ratio", "local_depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} is not a share; give a number in [0, 1]")

    @property
    def tower_signal(self) -> TowerSignal:
        """Two layers."""
        return replace(super().tower_signal, early=self.local_depth)

    def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
        """Local and global tokens, each the mean of itself and the tokens nearest to it."""
        local = self.local_tokens(crop, int(k * self.local_ratio))
        ranked = self.by_attention(crop)
        kept = np.sort(np.concatenate([local, ranked[~np.isin(ranked, local)][: k - len(local)]]))
        others = np.setdiff1d(ranked, kept)
        rows = crop.projected.float()
        unit = torch.nn.functional.normalize(rows, dim=-1)
        nearest = (unit[others] @ unit[kept].T).argmax(1)
        groups = [np.append(kept[place], others[(nearest == place).cpu().numpy()]) for place in range(len(kept))]
        made = [group for group in groups if len(group) > 1]
        anchors = np.array([group[0] for group in made], dtype=np.int64)
        means = torch.stack([rows[group].mean(0) for group in made]) if made else rows[:0]
        return MergedTokens(np.setdiff1d(kept, anchors), anchors, means, [np.sort(group) for group in made])

    def local_tokens(self, crop: EncodedCrop, count: int) -> Ints:
        """The tokens with most attention in the early layer of every window: as many of each as all can have."""
        rows, columns = np.divmod(np.arange(crop.n), crop.grid[1])
        across = -(-crop.grid[1] // self.window)
        windows = rows // self.window * across + columns // self.window
        ranked = self.by_early_attention(crop)
        share = count // len(np.unique(windows))
        parts = [ranked[windows[ranked] == own][:share] for own in np.unique(windows)]
        return np.concatenate(parts)


def _check_window(window: object) -> None:
    if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
        raise ValueError(f"window={window!r} is not a number of tokens; give an integer of at least 1")
