"""Reading the question out of a prompt that is already token ids."""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from stacktok.models.base import ModelAdapter
from stacktok.models.query import (
    decoded_markers,
    last_user_turn,
    placeholders,
    processor_markers,
    spans_of_words,
    without,
    without_special_tokens,
)

# Of a longer turn the last tokens are looked at.
_TURN_TOKENS = 1024


class PromptReader:
    """Reads the last user turn of prompts in one processor's format.

    Parameters
    ----------
    processor
        The user's; its tokenizer and chat template are used. None, or one without a tokenizer, reads nothing.
    adapter
        The family's adapter, which says what becomes of a user's words.
    remedy
        What a caller can do where no user turn is found, for the warning.
    """

    def __init__(self, processor: Any, adapter: ModelAdapter, remedy: str) -> None:
        self.adapter, self.remedy = adapter, remedy
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.markers = () if self.tokenizer is None else decoded_markers(processor_markers(processor), self.tokenizer)
        self._placeholders = placeholders(processor)
        self._warned = False

    def question_words(self, question: str) -> list[str]:
        """Query words of a question that is known; a placeholder in it is none."""
        return self.adapter.query_words(without(question, self._placeholders))

    def prompt_words(self, ids: Sequence[int]) -> list[str]:
        """Query words of the last user turn of a prompt, given without placeholders and padding."""
        turn = self._turn(self.tokenizer.decode(ids, skip_special_tokens=False))
        return self.adapter.query_words(without_special_tokens(self.adapter.user_text(turn), self.tokenizer))

    def prompt_rows(self, ids: Sequence[int], words: Sequence[str], question: str | None = None) -> list[int]:
        """Those of a prompt's token ids that query words are made of, as they stand in the last user turn.

        Parameters
        ----------
        ids
            The prompt, without placeholders and padding.
        words
            The query's; those that do not stand there are left out.
        question
            The user's text, where it is known: where it stands in the prompt, no turn is looked for.
        """
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        turn = question if question and question in text else self._turn(text)
        first = text.rfind(turn)
        spans = [(first + start, first + stop) for start, stop in spans_of_words(turn, words)]

        def end(token: int) -> int:
            """Characters up to and including a token: it begins where the decoded prefix before it ends."""
            return len(self.tokenizer.decode(ids[: token + 1], skip_special_tokens=False))

        tokens = range(len(ids))
        last = bisect_left(tokens, first + len(turn), key=end)
        window = range(max(bisect_right(tokens, first, key=end), last + 1 - _TURN_TOKENS), min(last + 1, len(ids)))
        ends = [end(token) for token in window]
        begins = [end(window.start - 1) if window.start else 0, *ends]
        return [
            ids[token]
            for token, begin, stop in zip(window, begins, ends, strict=False)
            if any(a < stop and begin < b for a, b in spans)
        ]

    def _turn(self, text: str) -> str:
        turn = last_user_turn(text, self.markers)
        if turn is None:
            turn = text
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "no user turn of a known chat template was found in the prompt, so all of its text is the query; "
                    + self.remedy,
                    stacklevel=3,
                )
        return turn

    def has_user_turn(self, ids: Sequence[int]) -> bool:
        """Whether tokens open a user turn."""
        if self.tokenizer is None:
            return False
        return last_user_turn(self.tokenizer.decode(ids, skip_special_tokens=False), self.markers) is not None
