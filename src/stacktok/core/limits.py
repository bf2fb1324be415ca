"""Bounds on text that may come from a stranger: its length, and how deep JSON nests."""

from __future__ import annotations

import json
import re
from typing import Any

QUESTION_CHARACTERS = 1000
"""Longest question to a page or a server."""

QUERY_CHARACTERS = 20_000
"""Longest text from which a query is read."""

JSON_CHARACTERS = 64_000
"""Longest JSON of a request."""

JSON_DEPTH = 16
"""Deepest nesting of lists and objects in JSON of a request."""

# Strings first: a bracket inside of one opens nothing. One that is never closed runs to the end, in linear time.
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def shown(value: object, characters: int = 60) -> str:
    """A value as error messages show it: its ``repr``, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"(an integer of {value.bit_length()} bits)"
    if isinstance(value, (str, bytes)) and len(value) > characters:
        return f"{value[:characters]!r}... ({len(value)} characters)"
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integer of more than 4300 digits.
        text = f"({type(value).__name__})"
    return text if len(text) <= 4 * characters else f"{text[: 4 * characters]}..."


def check_text(name: str, text: str, characters: int) -> str:
    """The text itself, or a ValueError where it is longer than allowed.

    Parameters
    ----------
    name
        Of the argument, for the error.
    text
        What was given.
    characters
        Longest that is accepted.
    """
    if len(text) > characters:
        raise ValueError(f"{name} has {len(text)} characters; give at most {characters}")
    return text


def parse_json(name: str, text: str, *, characters: int = JSON_CHARACTERS, depth: int = JSON_DEPTH) -> Any:
    """The value of a JSON text that is neither longer nor deeper than allowed.

    Parameters
    ----------
    name
        Of the argument, for errors.
    text
        JSON.
    characters, depth
        Longest text and deepest nesting that are accepted.
    """
    check_text(name, text, characters)
    deep = 0
    for match in _BRACKETS.finditer(text):
        deep += 1 if match.group() in "[{" else -1 if match.group() in "]}" else 0
        if deep > depth:
            raise ValueError(f"{name} nests more than {depth} deep; give a flatter JSON value")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}; give a value such as '{{}}'") from None
