"""How much of a question the selector sees: every row costs time, and other clients wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

QUERY_CHARACTERS = 4000
"""Longest query that a request may bring."""

QUERY_ROWS = 256
"""Most token ids of a query: more are refused in a request's own query, and cut off a prompt's."""


def own_ids(words: Sequence[str], ids_of: Callable[[str], Sequence[int]]) -> list[int]:
    """Token ids of a query that the request brings, all of them.

    Parameters
    ----------
    words
        The query's.
    ids_of
        Token ids of a word.
    """
    found: list[int] = []
    for word in words:
        found.extend(ids_of(word))
        if len(found) > QUERY_ROWS:
            raise ValueError(f"query has more than {QUERY_ROWS} tokens; give a shorter one")
    return found


def prompt_ids(words: Sequence[str], ids_of: Callable[[str], Sequence[int]]) -> list[int]:
    """Token ids of a question read from a prompt: of a long one the last whole words, as many as are allowed.

    Parameters
    ----------
    words
        The question's.
    ids_of
        Token ids of a word.
    """
    kept: list[Sequence[int]] = []
    count = 0
    for word in reversed(words):
        # A word without end, such as encoded data, is cut like a question without end.
        ids = ids_of(word[-QUERY_CHARACTERS:])[-QUERY_ROWS:]
        count += len(ids)
        if count > QUERY_ROWS:
            break
        kept.append(ids)
    return [token for ids in reversed(kept) for token in ids]
