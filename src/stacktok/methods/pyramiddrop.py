"""PyramidDrop: cuts at equal distances, by the attention that the last token would pay in the layer to come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from stacktok.core.budget import Budget, budget_share
from stacktok.core.tokens import Ints
from stacktok.methods.base import Positions
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView, top

_STAGES = 4


@dataclass(frozen=True)
class PyramidDrop(LayerMethod):
    """Three cuts, after a quarter, a half and three quarters of the layers, that keep n r, n r^2 and n r^3 of n tokens.

    The published schedule is r = 1/2 in 32 layers, an average of 46.875 % per layer: ``budget="46.875%"``.

    Parameters
    ----------
    counting
        What the budget means. "average": tokens per layer averaged over all layers; r is solved for; "kept": tokens
        that stay after the last cut, r the cube root of their share.
    """

    query_aware = True
    info = MethodInfo(
        name="PyramidDrop",
        paper="PyramidDrop, CVPR 2025",
        deviations=(
            "one schedule is published, ratios 1/2, 1/4 and 1/8: other budgets solve for a common ratio that meets the "
            "layer average, or with counting='kept' the count after the last cut",
            "cuts move with the depth: after a quarter, a half and three quarters of the layers, 8, 16 and 24 of 32",
            "M-RoPE positions are kept, since renumbering them is not defined",
            "several images of a prompt are cut each by itself",
        ),
    )

    counting: Literal["average", "kept"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counting not in ("average", "kept"):
            raise ValueError(f"counting={self.counting!r} is not known; use 'average' or 'kept'")

    @property
    def default_positions(self) -> Positions:
        """Renumbered after every cut."""
        return "compact"

    def layers(self, depth: int) -> tuple[int, ...]:
        """The last layers of the first three quarters; in a shallow model those that are different layers."""
        ends = sorted({max(1, stage * depth // _STAGES) for stage in range(1, _STAGES)} - {depth})
        if not ends:
            raise ValueError(f"a language model of {depth} layers leaves PyramidDrop nothing to prune; it needs 2")
        return tuple(end - 1 for end in ends)

    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """Tokens that stay at each cut, rounded down as in the original."""
        share = budget_share(budget)
        asked = share * tokens if isinstance(share, Fraction) else Fraction(share)
        cuts = self.layers(depth)
        if asked >= tokens:
            return (tokens,) * len(cuts)
        if self.counting == "kept":
            ratio = (max(1.0, float(asked)) / tokens) ** (1 / len(cuts))
        else:
            ratio = self._ratio(depth, tokens, asked, budget)
        # The root of an exact power comes out a little below it.
        return tuple(max(1, math.floor(tokens * ratio ** (number + 1) + 1e-6)) for number in range(len(cuts)))

    def _ratio(self, depth: int, tokens: int, asked: Fraction, budget: Budget) -> float:
        """The common ratio whose layer average is ``asked``, by bisection."""
        ends = [cut + 1 for cut in self.layers(depth)] + [depth]
        lengths = [ends[0], *(later - sooner for sooner, later in pairwise(ends))]

        def average(ratio: float) -> float:
            return tokens * sum(length * ratio**stage for stage, length in enumerate(lengths)) / depth

        least = average(0.0)
        if float(asked) <= least:
            raise ValueError(
                f"budget={budget!r} as an average over {depth} layers cannot be met: the first {lengths[0]} layers, "
                f"which see all {tokens} tokens, alone take {least:g}; give more than {least:g}, or counting='kept'"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if average(middle) < float(asked) else (low, middle)
        return high

    def choose(self, view: LayerView, k: int) -> Ints:
        """By the last token's attention in the next layer, the mean over heads."""
        return top(view.next_attention([-1]).mean(0)[0], k)
