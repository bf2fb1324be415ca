"""VScan as published: its scan of the image before the language model, and a cut in the middle of it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from stacktok.core.attention import TowerSignal
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.tokens import EncodedImage, Ints
from stacktok.methods.base import Positions
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView, top
from stacktok.methods.vscan import VScan


@dataclass(frozen=True)
class FirstStage(VScan):
    """The scan, which keeps half as many tokens again as the layer average that the budget asks for."""

    def shares(self, image: EncodedImage, budget: Budget) -> list[int]:
        """How many tokens each crop keeps: 96 in all for a budget of 64."""
        asked = resolve_budget(budget, image.n, image.capacity)
        return super().shares(image, min(image.capacity, asked * 3 // 2))


@dataclass(frozen=True)
class VScanTwoStage(LayerMethod):
    """Scan the image, merge, and after half of the layers keep what the last token attends to in the next one.

    The budget T is the average over the layers: 3 T / 2 tokens enter, and T / 2 are left after the cut.

    Parameters
    ----------
    window, local_ratio, local_depth, signal
        Of the scan; see `VScan`.
    """

    query_aware = True
    merges = True
    reads_tower = True
    info = MethodInfo(
        name="VScan, both stages",
        paper="VScan, arXiv 2505.22654",
        deviations=(
            *VScan.info.deviations[1:],
            "one pair of counts is published, 96 and 32 for an average of 64 in 32 layers: other budgets keep its "
            "proportion, and the cut is after half of the layers whatever their number",
            "M-RoPE positions are kept, since renumbering them is not defined",
        ),
    )

    window: int = 6
    local_ratio: float = 0.5
    local_depth: float = 6 / 24
    signal: Literal["cls", "received"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Its parameters are checked there.
        _ = self.entry

    @property
    def entry(self) -> FirstStage:
        """The scan."""
        return FirstStage(
            budget=self.budget,
            window=self.window,
            local_ratio=self.local_ratio,
            local_depth=self.local_depth,
            signal=self.signal,
        )

    @property
    def tower_signal(self) -> TowerSignal:
        """Two layers."""
        return self.entry.tower_signal

    @property
    def default_positions(self) -> Positions:
        """Renumbered before the language model and after the cut."""
        return "compact"

    def layers(self, depth: int) -> tuple[int, ...]:
        """The last layer of the first half."""
        if depth < 2:
            raise ValueError(f"a language model of {depth} layers leaves VScanTwoStage nothing to prune; it needs 2")
        return (depth // 2 - 1,)

    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """Tokens that stay of those that entered, so that the layers have the budget as their average."""
        asked = resolve_budget(budget, tokens, tokens)
        first = depth // 2
        return (max(1, int(Fraction(asked * depth - tokens * first, depth - first))),)

    def choose(self, view: LayerView, k: int) -> Ints:
        """By the last token's attention in the next layer, the mean over heads."""
        return top(view.next_attention([-1]).mean(0)[0], k)
