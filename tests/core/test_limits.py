"""Bounds on text from strangers: length, nesting, and errors that stay short."""

from __future__ import annotations

import json

import pytest

from stacktok.core.limits import check_text, parse_json, shown


def test_json_within_bounds_is_read():
    value = {"a": [1, {"b": '[[[[[[ { \\" ]'}], "c": None}
    assert parse_json("body", json.dumps(value), depth=4) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 20 + "]" * 20, "body nests more than 16 deep; give a flatter JSON value"),
        ("[" * 60_000, "body nests more than 16 deep"),
        ('{"a":' * 20 + "1" + "}" * 20, "nests more than 16 deep"),
        ("1" * 70_000, "body has 70000 characters; give at most 64000"),
        ("1" * 50_000, "body is not JSON"),
        ("{", "body is not JSON"),
        # A scanner that starts over at every quote needs a minute for this.
        ('"' + '\\"' * 31_000, "body is not JSON"),
    ],
    ids=["lists", "open lists", "objects", "long", "long number", "open object", "quotes"],
)
def test_json_beyond_bounds_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json("body", text)


def test_values_in_messages_are_cut():
    assert shown("short") == "'short'"
    assert shown("x" * 100) == f"'{'x' * 60}'... (100 characters)"
    assert shown(10**5000) == "(an integer of 16610 bits)"
    assert len(shown(list(range(10_000)))) < 300
    with pytest.raises(ValueError, match="query has 11 characters; give at most 10"):
        check_text("query", "x" * 11, 10)
