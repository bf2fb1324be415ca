"""Methods that work inside the language model: what a layer's attention says about the image decides who goes on."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.budget import Budget
from stacktok.core.tokens import Ints
from stacktok.methods.base import Method, Positions


@dataclass(frozen=True)
class LayerMethod(Method):
    """A method that cuts an image's tokens after some decoder layers.

    A cut after layer l ranks the image's tokens by the attention of layer l, which still runs on all of them; the
    layers from l + 1 on run on what is left. Every image of a prompt is cut by itself.
    """

    stage = "inside"

    @property
    def default_positions(self) -> Positions:
        """What ``positions=None`` means where the language model's positions are plain numbers."""
        return "kept"

    @abstractmethod
    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers after which tokens go, ascending, in a language model of ``depth`` layers."""

    @abstractmethod
    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """How many of an image's ``tokens`` tokens stay at each cut of `layers`, made ones not counted."""

    @abstractmethod
    def raters(self, visual: torch.Tensor, text: torch.Tensor) -> Ints:
        """Which text tokens' attention counts.

        Parameters
        ----------
        visual
            Input embeddings of the image's tokens, (n, d).
        text
            Input embeddings of the text tokens after the image, (t, d), t >= 1.
        """

    @abstractmethod
    def score(self, attention: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """What the tokens are ranked by, (n,).

        Parameters
        ----------
        attention
            Attention probabilities of the raters for the image's tokens that are left, (H, R, n).
        rotation
            What rotary positions alone say of the same pairs, (R, n): the product of rotated vectors of ones.
        """

    def recycle(self, states: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, Ints, list[Ints]]:
        """Tokens made of those that go, to stand behind those that stay; none unless a method says otherwise.

        Parameters
        ----------
        states
            Hidden states of the tokens that go, (p, d), in order.
        scores
            Their scores, (p,).

        Returns
        -------
        tuple
            Made tokens, (c, d); for each the token whose place it takes; for each all tokens that it is made of.
        """
        return states[:0], np.empty(0, dtype=np.int64), []


def top(scores: torch.Tensor, count: int) -> Ints:
    """Indices of the ``count`` highest scores, ascending; ties to the lowest index."""
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    chosen: Ints = order.sort().values.cpu().numpy()
    return chosen
