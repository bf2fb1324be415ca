"""FastV: after the first layers, keep the image tokens that the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Literal

from stacktok.core.budget import Budget, budget_share
from stacktok.core.tokens import Ints
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView, top


@dataclass(frozen=True)
class FastV(LayerMethod):
    """One cut, by the attention of the prompt's last token, averaged over heads.

    Parameters
    ----------
    full_layers
        K, the number of layers that see every token; the attention of layer K - 1 (from 0) ranks them.
    counting
        What the budget means. "average": tokens per layer averaged over all layers, so that
        K N + (L - K) n = L budget gives the n that stay; "kept": the n that stay after the cut.
    """

    query_aware = True
    info = MethodInfo(
        name="FastV",
        paper="FastV, ECCV 2024",
        deviations=(
            "one row of one layer's attention is computed; the original runs a layer eagerly or all of them",
            "no published setting exists for the paper's budgets: counting='average' follows SparseVLM's and "
            "VisionZip's tables, counting='kept' LightCompress and others",
            "tokens are ranked once, at prefill; the original without a cache ranks again at every step",
            "several images of a prompt are cut each by itself",
        ),
    )

    full_layers: int = 2
    counting: Literal["average", "kept"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.full_layers)
        if self.counting not in ("average", "kept"):
            raise ValueError(f"counting={self.counting!r} is not known; use 'average' or 'kept'")

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
        share = budget_share(budget)
        asked = share * tokens if isinstance(share, Fraction) else Fraction(share)
        if asked >= tokens:
            return (tokens,)
        if self.counting == "kept":
            return super().keeps(depth, tokens, budget)
        exact = (depth * asked - self.full_layers * tokens) / (depth - self.full_layers)
        count = int(exact + Fraction(1, 2))
        if count < 1:
            least = Fraction(self.full_layers * tokens + depth - self.full_layers, depth)
            raise ValueError(
                f"budget={budget!r} as an average over {depth} layers cannot be met with full_layers="
                f"{self.full_layers}, which alone take more; give at least {-int(-least // 1)} of {tokens} tokens, or "
                "counting='kept'"
            )
        return (count,)

    def choose(self, view: LayerView, k: int) -> Ints:
        """By the last token's attention, the mean over heads."""
        return top(view.attention([-1]).mean(0)[0], k)


def check_layers(full_layers: object) -> None:
    """Refuse a number of full layers that is not one."""
    if isinstance(full_layers, bool) or not isinstance(full_layers, Integral) or full_layers < 1:
        raise ValueError(f"full_layers={full_layers!r} must be an integer of at least 1")
