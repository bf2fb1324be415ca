"""The command `stacktok check`, as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stacktok.runtime import before
from tests.cli.test_commands import shell
from tests.tiny import build, picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private") / "my-llava"
    tiny = build("llava")
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    return folder


def test_a_sound_model_ends_with_0_and_a_block_without_paths(checkpoint: Path, monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "check", checkpoint, "--repeats", 1, "--attention", "eager")
    assert code == 0
    block = out[out.index("```text") :]
    assert "stacktok check: passed" in block
    assert "model: my-llava" in block
    assert "attention: eager" in block
    assert str(checkpoint.parent) not in out


def test_a_fault_ends_with_1(checkpoint: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "one.png"
    picture(96, 64).save(path)
    count = before.count_positions
    monkeypatch.setattr(before, "count_positions", lambda valid: count(valid) + 1)
    code, out, _ = shell(monkeypatch, capsys, "check", checkpoint, "--images", path, "--repeats", 1, "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["passed"]
    assert {"pass", "fail", "skipped"} == {row["status"] for row in found["checks"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--images", "missing.png"), "image missing.png does not exist"),
        (("--method", "fastv"), "works inside the language model"),
        (("--load-in-4bit", "--load-in-8bit"), "exclude each other"),
        (("--vllm", "nowhere"), "is not an address"),
    ],
)
def test_mistakes_are_one_line(
    options: tuple[str, ...], message: str, checkpoint: Path, monkeypatch: Any, capsys: Any
) -> None:
    code, out, err = shell(monkeypatch, capsys, "check", checkpoint, *options, "--json")
    assert (code, out) == (2, "")
    assert message in err
