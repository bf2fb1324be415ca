"""Methods that work inside the language model: between two layers they choose which of an image's tokens go on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stacktok.core.attention import row_attention
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.tokens import Ints
from stacktok.methods.base import FeatureMethod, Method, Positions
from stacktok.methods.choice import Indices, MergedTokens

Reading = tuple[torch.Tensor, torch.Tensor, float]
"""Queries, keys, both rotated, and the factor of the logits."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One image of a prompt between a layer that has run and the next.

    Of the image n tokens are left. The text tokens are the t that follow it to the end of the prompt, or the prompt's
    last token where none follows. Properties and methods compute when they are asked; ``rows`` are indices of text
    tokens, negative ones from the end, None for all. The fields are the runtime's.

    Attributes
    ----------
    inputs, input_image, input_text
        Input embeddings of the prompt, (S, d), and the indices of the image's and the text tokens in it.
    entered, left, valid, image, text
        Hidden states that the layer was given and returned, (L, d) each; which tokens are not padding, (L,); indices of
        the image's and the text tokens among them.
    read, read_next
        Queries, (H, L, d_k), keys, (H_kv, L, d_k), and the factor of the logits, in the layer and in the next.
    rotated_ones
        Vectors of ones rotated by every token's position, (L, d_k), in float32.
    norm
        The language model's final norm.
    """

    inputs: torch.Tensor
    input_image: torch.Tensor
    input_text: torch.Tensor
    entered: torch.Tensor
    left: torch.Tensor
    valid: torch.Tensor
    image: torch.Tensor
    text: torch.Tensor
    read: Callable[[], Reading]
    read_next: Callable[[], Reading]
    rotated_ones: Callable[[], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]

    @property
    def embeddings(self) -> torch.Tensor:
        """Input embeddings of all the image's tokens, as they were before any cut, (n_0, d)."""
        return self.inputs[self.input_image]

    @property
    def text_embeddings(self) -> torch.Tensor:
        """Input embeddings of the text tokens, (t, d)."""
        return self.inputs[self.input_text]

    @property
    def entering(self) -> torch.Tensor:
        """Hidden states of the image's tokens that the layer was given, (n, d)."""
        return self.entered[self.image]

    @property
    def states(self) -> torch.Tensor:
        """Hidden states of the image's tokens that the layer returned, (n, d)."""
        return self.left[self.image]

    @property
    def text_states(self) -> torch.Tensor:
        """Hidden states of the text tokens that the layer returned, (t, d)."""
        return self.left[self.text]

    @property
    def keys(self) -> torch.Tensor:
        """The layer's keys of the image's tokens, after rotation, heads concatenated, (n, H_kv d_k)."""
        return self.read()[1][:, self.image].transpose(0, 1).flatten(1)

    @property
    def text_keys(self) -> torch.Tensor:
        """The layer's keys of the text tokens, after rotation, heads concatenated, (t, H_kv d_k)."""
        return self.read()[1][:, self.text].transpose(0, 1).flatten(1)

    def attention(self, rows: Indices | None = None) -> torch.Tensor:
        """Attention probabilities of text tokens for the image's tokens in the layer, (H, R, n), in float32."""
        return self._attend(self.read(), rows)

    def next_attention(self, rows: Indices | None = None) -> torch.Tensor:
        """The same in the next layer, as it would be if all tokens entered it, (H, R, n)."""
        return self._attend(self.read_next(), rows)

    def rotation(self, rows: Indices | None = None) -> torch.Tensor:
        """Rotary weights of text tokens and the image's tokens: products of rotated vectors of ones, (R, n)."""
        ones = self.rotated_ones()
        return ones[self._rows(rows)] @ ones[self.image].T

    def _rows(self, rows: Indices | None) -> torch.Tensor:
        return self.text if rows is None else self.text[torch.as_tensor(rows, device=self.text.device)]

    def _attend(self, reading: Reading, rows: Indices | None) -> torch.Tensor:
        query, key, scaling = reading
        text = self._rows(rows)
        allowed = (torch.arange(len(self.valid))[None, :] <= text[:, None]) & self.valid
        return row_attention(query[:, text], key, scaling, allowed.to(query.device))[..., self.image]


@dataclass(frozen=True)
class LayerMethod(Method):
    """A method that cuts an image's tokens after some decoder layers.

    The layer of a cut still runs on all tokens; the layers from the next on run on those that are left. Every image of
    a prompt is cut by itself.
    """

    stage = "inside"

    @property
    def default_positions(self) -> Positions:
        """The meaning of ``positions=None`` where the language model's positions are plain numbers."""
        return "kept"

    @property
    def entry(self) -> FeatureMethod | None:
        """A method that reduces every image before it enters, given the same budget; None where all tokens enter."""
        return None

    @abstractmethod
    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers after which tokens go, ascending, in a language model of ``depth`` layers."""

    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """How many of an image's tokens stay at each cut of `layers`, made ones not counted: the budget.

        Parameters
        ----------
        depth
            Layers of the language model.
        tokens
            Tokens of the image that enter it.
        budget
            As the user gave it; behind an `entry` a number of tokens, because fractions are of the whole image.
        """
        return (max(1, resolve_budget(budget, tokens, tokens)),) * len(self.layers(depth))

    @abstractmethod
    def choose(self, view: LayerView, k: int) -> Indices | MergedTokens:
        """Indices of the ``k`` tokens that stay, at least 1 and fewer than are left; their order does not matter.

        Tokens that are made of those that go are given as `MergedTokens` (hidden states in place of embeddings, and
        no CLS); they stand behind the tokens that stay.

        Parameters
        ----------
        view
            The image between two layers.
        k
            Number of tokens that stay.
        """


def top(scores: torch.Tensor, count: int) -> Ints:
    """Indices of the ``count`` highest scores, ascending; ties to the lowest index."""
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    chosen: Ints = order.sort().values.cpu().numpy()
    return chosen
