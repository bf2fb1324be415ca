"""From a prompt or a user's own query to the rows that the selector sees."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stacktok.models.base import ModelAdapter
from stacktok.models.query import decoded_markers, last_user_turn, processor_markers, without_special_tokens, word_ids
from stacktok.runtime.run import PROMPT, FromPrompt, OneQuery


@dataclass(frozen=True, eq=False)
class Question:
    """The query of one row.

    Attributes
    ----------
    embeddings
        (m, d), or None for no query.
    words
        The words that they come from, or None.
    key
        Tells it from other queries while this object lives.
    """

    embeddings: torch.Tensor | None
    words: str | None
    key: Hashable


class QuestionReader:
    """Reads questions for one model.

    Parameters
    ----------
    model, processor, adapter
        The user's model and processor, and the family's adapter.
    """

    def __init__(self, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        self.model, self.adapter = model, adapter
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.markers = () if self.tokenizer is None else decoded_markers(processor_markers(processor), self.tokenizer)
        self._warned = False

    def prompt_words(self, ids: Sequence[int]) -> list[str]:
        """Query words of the last user turn of a prompt, given without placeholders and padding."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        turn = last_user_turn(text, self.markers)
        if turn is None:
            turn = text
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "no user turn of a known chat template was found in the prompt, so all of its text is the query; "
                    "set pruned.query to say what the question is",
                    stacklevel=2,
                )
        return self.adapter.query_words(without_special_tokens(turn, self.tokenizer))

    def has_user_turn(self, ids: Sequence[int]) -> bool:
        """Whether tokens open a user turn."""
        if self.tokenizer is None:
            return False
        return last_user_turn(self.tokenizer.decode(ids, skip_special_tokens=False), self.markers) is not None

    def question(self, query: OneQuery | FromPrompt, prompt: Sequence[int] | None, device: torch.device) -> Question:
        """The query of one row.

        Parameters
        ----------
        query
            What the user set.
        prompt
            The row's token ids without placeholders and padding; None where only embeddings are known.
        device
            Where token ids belong.
        """
        if query is None:
            return Question(None, None, None)
        if isinstance(query, torch.Tensor):
            return Question(query, None, id(query))
        if self.tokenizer is None:
            raise ValueError(
                "a query cannot be read from words without a tokenizer; give the model's processor, or set "
                "pruned.query to embeddings or None"
            )
        if query is PROMPT:
            if prompt is None:
                raise ValueError(
                    "the query cannot be read from inputs_embeds; pass input_ids, or set pruned.query to a text, "
                    "embeddings or None"
                )
            words = self.prompt_words(prompt)
        else:
            words = self.adapter.query_words(str(query))
        ids = word_ids(self.tokenizer, words)
        embeddings = self.model.get_input_embeddings()(torch.tensor(ids, dtype=torch.long, device=device))
        return Question(embeddings.detach(), " ".join(words), tuple(ids))
