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
    assert "tolerance: 1e-04 of the largest logit; token indices, positions and masks exact" in block
    assert "torch: " in block
    assert str(checkpoint.parent) not in out


def test_the_embedded_model_is_the_default_and_passes(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "check", "--repeats", 1, "--json")
    found = json.loads(out)
    assert (code, found["passed"], found["settings"]["model"]) == (0, True, "embedded/llava")
    assert {row["name"] for row in found["checks"] if row["status"] == "skipped"} <= {
        "backend triton equals the reference to the bit"
    }
    assert [set(stage) >= {"prefill", "decode", "total", "peak_MB", "cache_MB"} for stage in found["stages"]] == [
        True,
        True,
    ]


def test_the_tolerance_follows_the_type(checkpoint: Path, monkeypatch: Any, capsys: Any) -> None:
    options = ("--dtype", "bfloat16", "--device", "cpu", "--attention", "sdpa", "--repeats", 1, "--json")
    code, out, _ = shell(monkeypatch, capsys, "check", checkpoint, *options)
    found = json.loads(out)
    assert (code, found["passed"]) == (0, True)
    assert (found["settings"]["dtype"], found["settings"]["attention"]) == ("bfloat16", "sdpa")
    assert found["settings"]["tolerance"].startswith("5e-02")


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
        (("--load-in-4bit",), "load-in-4bit needs bitsandbytes: pip install bitsandbytes"),
        (("--load-in-8bit",), "load-in-8bit needs bitsandbytes"),
        (("--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
        (("--dtype", "int3"), "dtype 'int3' is not known"),
        (("--attention", "flash_attention_9"), "flash_attention_9"),
        (("--vllm", "nowhere"), "is not an address"),
    ],
)
def test_mistakes_are_one_line(
    options: tuple[str, ...], message: str, checkpoint: Path, monkeypatch: Any, capsys: Any
) -> None:
    code, out, err = shell(monkeypatch, capsys, "check", checkpoint, *options, "--json")
    assert (code, out) == (2, "")
    assert message in err
