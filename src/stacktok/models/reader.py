"""Reading the question out of a prompt that is already token ids."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from stacktok.models.base import ModelAdapter
from stacktok.models.query import decoded_markers, last_user_turn, processor_markers, without_special_tokens


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
                    + self.remedy,
                    stacklevel=2,
                )
        return self.adapter.query_words(without_special_tokens(turn, self.tokenizer))

    def has_user_turn(self, ids: Sequence[int]) -> bool:
        """Whether tokens open a user turn."""
        if self.tokenizer is None:
            return False
        return last_user_turn(self.tokenizer.decode(ids, skip_special_tokens=False), self.markers) is not None
