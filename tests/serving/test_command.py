"""``stacktok serve`` before vLLM comes in."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stacktok.cli import main


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Exit code and errors of the command; flags that would reach vLLM are kept in ``flags``."""
    flags: list[list[str]] = []
    monkeypatch.setattr("stacktok.serving.launch.serve", flags.append)

    def run(*arguments: str, vllm: bool = True) -> tuple[int, str, list[list[str]]]:
        monkeypatch.setattr("stacktok.cli.serve.find_spec", lambda name: vllm or None)
        monkeypatch.setattr(sys, "argv", ["stacktok", "serve", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), capsys.readouterr().err, flags

    return run


def test_without_vllm_one_line_says_what_to_install(shell: Any) -> None:
    code, error, flags = shell("--budget", "64", vllm=False)
    assert code == 2
    assert error.count("\n") == 1
    assert "stacktok[vllm]" in error
    assert not flags


def test_flags_of_vllm_go_through(shell: Any) -> None:
    code, _, (flags,) = shell("--budget", "20%", "--max-model-len", "512", "--enforce-eager")
    assert code == 0
    assert flags[-3:] == ["--max-model-len", "512", "--enforce-eager"]
    assert flags[flags.index("--host") + 1] == "127.0.0.1"
    assert '"budget": "20%"' in flags[flags.index("--hf-overrides") + 1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--method", "sparsevlm"), "inside the language model"),
        (("--budget", "0"), "budget=0"),
        (("--budget", "lots"), "lots"),
        (("--parameters", "{"), "not JSON"),
        (("--parameters", '{"no": 1}'), "'no'"),
        (("--worker-extension-cls", "x"), "--worker-extension-cls"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(shell: Any, arguments: tuple[str, ...], reason: str) -> None:
    code, error, flags = shell(*arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert reason in error
    assert not flags
