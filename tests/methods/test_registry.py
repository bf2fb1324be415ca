"""A method from outside the package: what docs/add-a-method.md says, done."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stacktok.cli import main
from stacktok.methods import Method, available, method_class
from tests.models.test_pruned_models import greedy
from tests.tiny import build, picture

DOC = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def code_of(document: Path, language: str) -> str:
    """The first block of a language in a page."""
    return document.read_text().split(f"```{language}\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's package, installed beside this one: its module and the entry point of its pyproject."""
    (tmp_path / "loudest_tokens.py").write_text(code_of(DOC, "python"))
    entry = code_of(DOC, "toml").split("]", 1)[1]
    name, value = (part.strip().strip('"') for part in entry.strip().split("="))
    metadata = tmp_path / "loudest_tokens-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loudest-tokens\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[stacktok.methods]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop("loudest_tokens", None)


def test_an_installed_method_works_like_a_built_in_one(package: str, monkeypatch: Any, capsys: Any) -> None:
    method = method_class(package)(budget=5)
    assert isinstance(method, Method)
    assert type(method).__module__ == "loudest_tokens"
    assert list(available())[-1] == package
    for family in ("llava", "llava_next", "qwen2_5_vl"):
        tiny = build(family)
        inputs = tiny.inputs(["Is there a dog?"], [[picture(120, 90)]])
        with method(tiny.model, tiny.processor) as pruned:
            greedy(tiny.model, inputs, 2)
        assert pruned.after == 5
        image = pruned.last[0].image
        norms = [(float(crop.projected[i].norm()), c, i) for c, crop in enumerate(image.crops) for i in range(crop.n)]
        loud = sorted(norms, reverse=True)
        loud = [entry for entry in loud if image.crops[entry[1]].eligible[entry[2]]][:5]
        assert {tuple(pair) for pair in pruned.last[0].reduction.anchors.tolist()} == {(c, i) for _, c, i in loud}
    monkeypatch.setattr(sys, "argv", ["stacktok", "methods", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)[package]["name"] == method.facts.name


def test_an_entry_point_that_is_no_method_is_refused(package: str, tmp_path: Path) -> None:
    (tmp_path / "loudest_tokens-1.0.dist-info" / "entry_points.txt").write_text("[stacktok.methods]\nx = json:loads\n")
    with pytest.raises(TypeError, match=r"entry point 'x'.*must name a subclass of Method"):
        available()


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no method is called 'best'; the methods are stacktok, mmtok, divprune"):
        method_class("best")
    assert method_class("DivPrune") is available()["divprune"]


@pytest.mark.parametrize("method", available().values())
def test_every_method_says_what_a_table_needs(method: Any) -> None:
    facts = method.facts
    assert facts.name
    assert facts.paper
    assert method.stage in ("before", "inside")
    assert (method.stage == "inside") == (facts.attention == "language model")
    assert facts.deviations or facts.paper == "control"
    page = (DOC.parent / "methods.md").read_text()
    assert f"## {facts.name}" in page
