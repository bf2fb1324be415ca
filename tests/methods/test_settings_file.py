"""Settings files: what `tune` writes is what `load`, `ask`, `serve` and `eval` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stacktok import Coverage, StackTok, methods
from stacktok.cli.evaluate import _method_part
from stacktok.cli.serve import _from_file
from stacktok.evaluation.plan import load_plan
from stacktok.methods.base import Method
from stacktok.methods.settings import settings_text
from tests.cli.test_commands import shell
from tests.tiny import build, picture


@pytest.mark.parametrize(
    "method",
    [
        StackTok(budget=64),
        StackTok(budget=Coverage(0.95, 192), positions="kept"),
        StackTok(budget="20%", relevance_depth=None, tau_vision=0.3),
        methods.CDPruner(budget=0.1),
        methods.FastV(budget=32, counting="kept"),
    ],
)
def test_a_method_comes_back_as_it_was(method: Method, tmp_path: Path) -> None:
    path = tmp_path / "stacktok.yaml"
    path.write_text(settings_text(method, model="embedded/llava", measured={"kept": 0.99}))
    assert methods.load(path) == method
    assert type(method).load(path) == method


def test_a_class_loads_its_own_settings_alone(tmp_path: Path) -> None:
    path = tmp_path / "stacktok.yaml"
    path.write_text(settings_text(methods.DivPrune(budget=8)))
    with pytest.raises(ValueError, match=r"is for DivPrune, not StackTok; use stacktok\.methods\.load"):
        StackTok.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "does not begin with 'stacktok: 1'"),
        ("stacktok: 2\nmethod: random\nbudget: 3", "does not begin"),
        ("stacktok: 1\nmethod: [", "line 2 is not YAML"),
        ("stacktok: 1\nbudget: 3", "no method or no budget"),
        ("stacktok: 1\nmethod: nothing\nbudget: 3", "no method is called 'nothing'"),
        ("stacktok: 1\nmethod: random\nbudget: -3", "budget=-3 is negative"),
        ("stacktok: 1\nmethod: random\nbudget: 3\nbudgets: 4", "has the entry 'budgets'"),
        ("stacktok: 1\nmethod: random\nbudget: 3\nparameters: {depth: 3}", "cannot be used"),
        ("stacktok: 1\nmethod: random\nbudget: 3\nparameters: 5", "give a mapping"),
        ("stacktok: 1\nmethod: random\nbudget: coverage 90%, at most 64", "adapts to the image"),
    ],
)
def test_mistakes_in_a_file_are_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        methods.load(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        methods.load(tmp_path / "none.yaml")


def test_ask_and_batch_take_it(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    tiny = build("llava")
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.processor.save_pretrained(tmp_path / "model")
    picture(90, 90).save(tmp_path / "one.png")
    path = tmp_path / "stacktok.yaml"
    path.write_text(settings_text(methods.DivPrune(budget=5)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "image": "one.png"}))
    rows = ("batch", "--model", tmp_path / "model", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    code, _, err = shell(
        monkeypatch, capsys, *rows, "--question", "What?", "--settings", path, "--max-new-tokens", 2, "--json"
    )
    assert code == 0, err
    (shard,) = (tmp_path / "out").glob("*.parquet")
    assert pq.read_table(shard).to_pylist()[0]["tokens_after"] == 5
    code, _, err = shell(monkeypatch, capsys, *rows, "--question", "What?", "--settings", path, "--method", "random")
    assert (code, "leave --method out" in err) == (2, True)
    common = ("ask", "--model", tmp_path / "model", "--image", tmp_path / "one.png", "--question", "What?", "--json")
    code, out, _ = shell(monkeypatch, capsys, *common, "--settings", path, "--max-new-tokens", 2)
    assert code == 0
    found = json.loads(out)
    assert (found["method"], found["budget"], found["tokens_after"]) == ("DivPrune", 5, 5)
    code, _, err = shell(monkeypatch, capsys, *common, "--settings", path, "--budget", 3)
    assert code == 2
    assert "leave --budget out" in err


def test_serve_takes_what_vllm_can_do(tmp_path: Path) -> None:
    path = tmp_path / "stacktok.yaml"
    path.write_text(settings_text(StackTok(budget=32, relevance_depth=4)))
    assert _from_file(path) == {"method": "stacktok", "budget": 32, "parameters": {"relevance_depth": 4}}
    for method, message in (
        (StackTok(budget=32, positions="kept"), "cannot be served"),
        (StackTok(budget=Coverage(0.9, 64)), "before the encoder has seen it"),
        (methods.FastV(budget=32), "drops tokens inside the language model"),
    ):
        path.write_text(settings_text(method))
        with pytest.raises(ValueError, match=message):
            _from_file(path)


def test_eval_runs_it_in_place_of_the_plans_methods(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(settings_text(StackTok(budget=Coverage(0.9, 64), positions="kept")))
    plan = load_plan("scenes", {"methods": [_method_part(path)]})
    (method,) = plan.methods
    assert (method.name, method.method) == ("mine", "stacktok")
    assert list(plan.runs_of(plan.models[0], method)) == [("coverage 90%, at most 64", "kept")]
