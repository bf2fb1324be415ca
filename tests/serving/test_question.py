"""How much of a question a server's selector sees."""

from __future__ import annotations

from typing import Any

import pytest

from stacktok.serving.question import QUERY_CHARACTERS, QUERY_ROWS, own_ids, prompt_ids
from stacktok.serving.settings import RequestOptions


def letters(word: str) -> list[int]:
    """A token per letter."""
    return [ord(letter) for letter in word]


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_short_questions_are_seen_whole() -> None:
    words = ["is", "there", "a", "dog"]
    assert text(prompt_ids(words, letters)) == text(own_ids(words, letters)) == "isthereadog"
    assert prompt_ids([], letters) == own_ids([], letters) == []


def test_of_a_long_prompt_the_last_whole_words_are_seen() -> None:
    words = ["old"] * 1000 + ["n" * 10] * 25 + ["last"]
    found = text(prompt_ids(words, letters))
    # 254 letters; the next word would make 257.
    assert found == "n" * 250 + "last"
    assert len(found) <= QUERY_ROWS < len(found) + len("old")


def test_a_word_without_end_is_cut_before_it_is_tokenised() -> None:
    lengths: list[int] = []

    def ids_of(word: str) -> list[int]:
        lengths.append(len(word))
        return letters(word)

    assert text(prompt_ids(["x" * 100_000 + "end"], ids_of)).endswith("xend")
    assert lengths == [QUERY_CHARACTERS]


def test_words_that_are_not_seen_are_not_tokenised() -> None:
    seen: list[str] = []

    def ids_of(word: str) -> list[int]:
        seen.append(word)
        return [1]

    prompt_ids([str(n) for n in range(100_000)], ids_of)
    assert len(seen) == QUERY_ROWS + 1


@pytest.mark.parametrize("query", ["x" * (QUERY_CHARACTERS + 1), "dog " * 1001])
def test_a_query_of_too_many_characters_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=f"query has .* characters; give at most {QUERY_CHARACTERS}"):
        RequestOptions.read({"query": query}, 64)


def test_a_query_of_too_many_tokens_is_refused() -> None:
    assert len(own_ids(["ab"] * (QUERY_ROWS // 2), letters)) == QUERY_ROWS
    with pytest.raises(ValueError, match=f"more than {QUERY_ROWS} tokens; give a shorter one"):
        own_ids(["ab"] * (QUERY_ROWS // 2) + ["c"], letters)


def test_the_refusal_comes_before_the_rest_is_tokenised() -> None:
    count: list[Any] = []
    with pytest.raises(ValueError, match="tokens"):
        own_ids(["a"] * 4000, lambda word: count.append(word) or [1])
    assert len(count) == QUERY_ROWS + 1
