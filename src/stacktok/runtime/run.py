"""The record of a run, and what a user may change while it lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from stacktok.core.budget import Budget, check_budget
from stacktok.core.limits import QUERY_CHARACTERS, check_text
from stacktok.core.tokens import EncodedImage, Reduction


class FromPrompt(Enum):
    """The query is read from the prompt's last user turn."""

    PROMPT = "the prompt's last user turn"


PROMPT = FromPrompt.PROMPT
"""Value of `Pruned.query` that reads the query from the prompt."""

OneQuery = str | torch.Tensor | None
Query = OneQuery | FromPrompt | Sequence[OneQuery]


@dataclass(frozen=True, eq=False)
class ImageResult:
    """The result of pruning one image of the last prompt.

    Attributes
    ----------
    row, modality
        Row of the batch (of prompts, whatever the number of beams), and "image" or "video".
    before, after
        Rows of the language model's input that the image took without and with pruning, separators included; for a
        method that works inside the language model, what entered its last layer.
    query
        The words that the selector saw, or None where it was given embeddings or no query.
    image, reduction
        What the method was given and what it returned.
    per_layer
        Tokens of the image that entered each layer of the language model: the one way in which all methods are counted.
    not_encoded
        Tokens of the image that a method before the vision tower removed.
    caching
        Which layers keep keys and values of every token; all where it is empty. Recurrent layers keep a state, and
        layers that share those of an earlier one keep none.
    """

    row: int
    modality: str
    before: int
    after: int
    query: str | None
    image: EncodedImage
    reduction: Reduction
    per_layer: tuple[int, ...] = ()
    caching: tuple[bool, ...] = ()
    not_encoded: int = 0

    @property
    def average(self) -> float:
        """Tokens per layer, averaged over the layers."""
        return sum(self.per_layer) / max(1, len(self.per_layer))

    @property
    def removed(self) -> dict[str, int]:
        """Tokens that each stage removed: before the vision tower, before the language model, and inside it."""
        entered = self.per_layer[0] if self.per_layer else self.after
        return {
            "before the tower": self.not_encoded,
            "before the language model": self.before - self.not_encoded - entered,
            "inside the language model": entered - self.after,
        }

    @property
    def cache_entries(self) -> int:
        """Pairs of key and value that the image leaves in the cache, over all layers that keep them."""
        caching = self.caching or (True,) * len(self.per_layer)
        return sum(tokens for tokens, keeps in zip(self.per_layer, caching, strict=True) if keeps)

    @property
    def selection(self) -> Any:
        """The method's record: a `Selection`, or a `CropSelection` for several crops."""
        return self.reduction.record

    @property
    def seconds(self) -> float:
        """Time of the selection."""
        return self.reduction.seconds

    def __repr__(self) -> str:
        return (
            f"ImageResult(row {self.row}, {self.modality}: {self.before} -> {self.after} tokens in "
            f"{1000 * self.seconds:.1f} ms, query {self.query!r}, {self.selection!r})"
        )


_STATE = ("last", "_kept_positions", "seconds", "layer_seconds", "_budget", "_query")


class Pruned:
    """A model while it is pruned.

    Attributes
    ----------
    last
        One `ImageResult` per image of the last pruned prompt or batch, in order. Where a GPU selected, looking at a
        record or at which tokens were kept reads the device; counts are known without.
    seconds
        Time of the host spent on the last pruned prompt or batch beyond the model's own: query, selection and
        compaction. What a GPU does meanwhile is not in it; where the host selects, its wait for the encoder is.
    layer_seconds
        The part of it that was spent between the layers of the language model, by a method that works there.
    """

    def __init__(self, budget: Budget | None) -> None:
        self.last: tuple[ImageResult, ...] = ()
        self._kept_positions: torch.Tensor | None = None
        self.seconds = self.layer_seconds = 0.0
        self._budget = budget
        self._query: Query = PROMPT

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelt setting would otherwise be an attribute that nobody reads.
        if not hasattr(type(self), name) and name not in _STATE:
            raise AttributeError(f"pruned has no attribute {name!r} to set; give 'budget' or 'query'")
        super().__setattr__(name, value)

    @property
    def kept_positions(self) -> torch.Tensor | None:
        """For every column that the language model was given, the column of the unpruned prompt that it stands for.

        (B, L), -1 in padding: logits of a plain ``forward`` have these columns. None where the last prompt had no image
        or no budget. Looking at it waits for a device.
        """
        return None if self._kept_positions is None else self._kept_positions.cpu()

    @kept_positions.setter
    def kept_positions(self, positions: torch.Tensor | None) -> None:
        self._kept_positions = positions

    @property
    def budget(self) -> Budget | None:
        """Tokens to keep, for the calls to come; None bypasses pruning."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        if budget is not None:
            check_budget(budget)
        self._budget = budget

    @property
    def query(self) -> Query:
        """The query, for the calls to come.

        `PROMPT` (the default) reads it from each prompt; a text is treated as a user's words; a tensor (m, d) is taken
        as embeddings; None selects by coverage alone. A list gives one of these per row of the batch.
        """
        return self._query

    @query.setter
    def query(self, query: Query) -> None:
        entries = query if isinstance(query, (list, tuple)) else [query]
        for entry in entries:
            if not (entry is None or entry is PROMPT or isinstance(entry, (str, torch.Tensor))):
                raise TypeError(
                    f"query has type {type(entry).__name__}; give a text, embeddings (m, d), None, PROMPT, or a list "
                    "with one of them per row"
                )
            if isinstance(entry, str):
                check_text("query", entry, QUERY_CHARACTERS)
        self._query = query

    @property
    def before(self) -> int:
        """Tokens of all images of the last pruned call, without pruning."""
        return sum(result.before for result in self.last)

    @property
    def after(self) -> int:
        """Tokens of all images of the last pruned call, as the language model got them."""
        return sum(result.after for result in self.last)

    @property
    def per_layer(self) -> tuple[int, ...]:
        """Tokens of all images of the last pruned call that entered each layer."""
        return tuple(map(sum, zip(*(result.per_layer for result in self.last), strict=True)))

    @property
    def average(self) -> float:
        """Tokens of all images of the last pruned call per layer, averaged over the layers."""
        return sum(result.average for result in self.last)

    @property
    def cache_entries(self) -> int:
        """Pairs of key and value that all images of the last pruned call leave in the cache."""
        return sum(result.cache_entries for result in self.last)

    def __repr__(self) -> str:
        return f"Pruned(budget={self.budget!r}, last={list(self.last)!r})"
