"""A method from outside the package: what docs/add-a-method.md says, done."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stacktok
from stacktok.cli import main
from stacktok.methods import Method, available, method_class
from tests.methods.guide import DOC, code_of, package
from tests.models.test_pruned_models import greedy
from tests.tiny import build, picture

__all__ = ["package"]


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
    assert json.loads(capsys.readouterr().out)[package]["name"] == method.info.name


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_the_method_inside_the_language_model_does_what_it_says(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "most_changed.py").write_text(code_of(DOC, "python", 1))
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("most_changed").MostChanged(budget=5)
    sys.modules.pop("most_changed")
    tiny = build(family, 6)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(120, 90)]])
    with torch.no_grad():
        states = tiny.model(**inputs, output_hidden_states=True).hidden_states
        with method(tiny.model, tiny.processor) as pruned:
            tiny.model(**inputs)
    image = (inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[:, 0]
    change = (states[2] - states[1])[0, image].norm(dim=1).tolist()
    most = sorted(range(len(image)), key=lambda i: -change[i])[:5]
    assert pruned.per_layer == (len(image),) * 2 + (5,) * 4
    result = pruned.last[0]
    assert sorted(result.image.offsets_of(result.reduction.anchors).tolist()) == sorted(most)


def test_the_examples_pass_strict_type_checks(tmp_path: Path) -> None:
    files = [tmp_path / f"example_{i}.py" for i in range(DOC.read_text().count("```python\n"))]
    for number, file in enumerate(files):
        file.write_text(code_of(DOC, "python", number))
    # From the repository's root, whose cache of checked libraries it shares.
    root = Path(stacktok.__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, files)],
        cwd=root,
        env={**os.environ, "MYPYPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(files) == 2
    assert found.returncode == 0, found.stdout + found.stderr


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
    info = method.info
    assert info.name
    assert info.paper
    assert method.stage in ("before", "inside")
    assert info.deviations or info.paper == "control"
    page = (DOC.parent / "methods.md").read_text()
    assert f"## {info.name}" in page
