"""Qwen2-VL: dynamic resolution, 2 x 2 merging, M-RoPE; images and videos."""

from __future__ import annotations

from stacktok.models.merged import MergedPatchAdapter
from stacktok.models.query import question_words


class Qwen2VLAdapter(MergedPatchAdapter):
    """Qwen2VLForConditionalGeneration."""

    family = "Qwen2-VL"
    tau_query = 0.01

    def query_words(self, text: str) -> list[str]:
        """The question-prefixed text, unfiltered."""
        return question_words(text)
