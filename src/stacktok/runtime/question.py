"""From a prompt or a user's own query to the rows that the selector sees."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stacktok.kernels.transfer import upload
from stacktok.models.base import ModelAdapter
from stacktok.models.query import word_ids
from stacktok.models.reader import PromptReader
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


class QuestionReader(PromptReader):
    """Reads questions for one model.

    Parameters
    ----------
    model, processor, adapter
        The user's model and processor, and the family's adapter.
    rows
        "words" embeds every word by itself, "prompt" takes the words' tokens as they stand in the prompt.
    keep_blanks
        As in `word_ids`.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        adapter: ModelAdapter,
        rows: Literal["words", "prompt"] = "words",
        *,
        keep_blanks: bool = False,
    ) -> None:
        super().__init__(processor, adapter, "set pruned.query to say what the question is")
        self.model, self.rows, self.keep_blanks = model, rows, keep_blanks

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
            known, words = None, self.prompt_words(prompt)
        else:
            known, words = str(query), self.question_words(str(query))
        ids = self.prompt_rows(prompt, words, known) if self.rows == "prompt" and prompt is not None else []
        # A query of one's own need not stand in the prompt.
        ids = ids or word_ids(self.tokenizer, words, keep_blanks=self.keep_blanks)
        embeddings = self.model.get_input_embeddings()(upload(ids, device, torch.long))
        return Question(embeddings.detach(), " ".join(words), tuple(ids))
