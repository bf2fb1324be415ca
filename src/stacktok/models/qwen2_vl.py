"""Qwen2-VL: dynamic resolution, 2 x 2 merging, M-RoPE; images and videos."""

from __future__ import annotations

import re

from stacktok.models.merged import MergedPatchAdapter
from stacktok.models.query import question_words

# What the chat template writes before images and videos under add_vision_id.
_NUMBER = re.compile(r"(?:Picture|Video) \d+: (?=<\|vision_start\|>)")


class Qwen2VLAdapter(MergedPatchAdapter):
    """Qwen2VLForConditionalGeneration."""

    family = "Qwen2-VL"
    tau_query = 0.01

    def user_text(self, turn: str) -> str:
        """The turn without the numbers of images and videos."""
        return _NUMBER.sub("", turn)

    def query_words(self, text: str) -> list[str]:
        """The question-prefixed text, unfiltered."""
        return question_words(text)
