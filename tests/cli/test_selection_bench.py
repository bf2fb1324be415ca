"""``stacktok bench`` without a model: selection time of every method, and the table of all methods in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stacktok.bench import all_methods
from stacktok.bench.all_methods import selection_times
from stacktok.cli.selection import facts, markdown, write_into
from stacktok.methods import SCOPE, DivPrune, PyramidDrop, available
from stacktok.methods.settings import KEPT, build_methods
from tests.cli.test_commands import shell

DOCS = Path(__file__).parents[2] / "docs"


def test_every_method_is_timed_at_every_size(monkeypatch: Any) -> None:
    monkeypatch.setattr(all_methods, "WIDTH", 64)
    monkeypatch.setattr(all_methods, "VISION", 64)
    monkeypatch.setattr(all_methods, "_CROP", 36)
    sizes = ((36, 9), (144, 16))
    times = selection_times(build_methods(None, {}, KEPT), sizes, repeats=1)
    assert set(times) == set(available())
    for name, own in times.items():
        if available()[name].stage not in ("before", "inside"):
            assert "its time" in own.refused
            continue
        assert not own.refused, (name, own.refused)
        for found in (own.first, own.further):
            assert set(found) == set(sizes)
            assert all(value > 0 for value in found.values())


def test_a_method_that_cannot_run_says_why(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(all_methods, "WIDTH", 64)
    monkeypatch.setattr(all_methods, "SIZES", ((576, 64),))
    args = ("bench", "--methods", "pyramiddrop,uniform", "--set", "pyramiddrop.counting=average", "--repeats", 1)
    code, out, err = shell(monkeypatch, capsys, *args, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "budget" in found["pyramiddrop"]["refused"]
    assert found["uniform"]["[576, 64]"]["first"] > 0


def test_rows_of_the_table_in_the_docs_are_facts() -> None:
    """Made again by stacktok bench --methods all --into docs/methods.md."""
    block = (DOCS / "methods.md").read_text().split("<!-- stacktok bench -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.strip().splitlines()[2:]]
    known = {found[0]: found for found in map(facts, build_methods(None, {}, KEPT).values())}
    assert len(rows) > 20
    for row in rows:
        assert tuple(row[:5]) == known[row[0]]


def test_facts_of_some_methods() -> None:
    assert facts(SCOPE()) == ("SCOPE", "vision tower", "no", "yes", "the budget")
    assert facts(PyramidDrop()) == ("PyramidDrop", "language model", "yes", "no", "falls, layer by layer")


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nothing here.")
    with pytest.raises(ValueError, match="has no place for the table"):
        write_into(page, "| table |")
    page.write_text("Before\n<!-- stacktok bench -->old<!-- end -->\nbehind")
    write_into(page, markdown({"divprune": DivPrune()}, {}, ((576, 64),)))
    text = page.read_text()
    assert "old" not in text
    assert "| DivPrune | no | no | yes | the budget | - |" in text
