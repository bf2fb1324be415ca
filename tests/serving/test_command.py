"""``stacktok serve`` before vLLM comes in."""

from __future__ import annotations

import json
import socket
import subprocess
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
        port = () if "--port" in arguments else ("--port", "0")
        monkeypatch.setattr(sys, "argv", ["stacktok", "serve", *port, *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, error = capsys.readouterr()
        printed.append(out)
        return int(stopped.value.code or 0), error, flags

    printed: list[str] = []
    run.printed = printed

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


def test_a_port_in_use_is_told_in_one_line_before_anything_is_loaded(shell: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        code, error, flags = shell("--port", port, "no-such-model")
    assert code == 2
    assert error.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; give another --port" in error
    assert not flags


def test_it_says_what_is_served_and_how_to_ask(shell: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, _ = shell("--budget", "20%", "--served-model-name", "it's mine")
    assert code == 0
    (said,) = shell.printed
    assert "model name  it's mine\n" in said
    assert "20% of tokens per image, by stacktok, for the question of each request\n" in said
    assert "family      LLaVA-1.5, as StackTokLlavaForConditionalGeneration\n" in said
    assert "videos      not served\n" in said
    assert "http://127.0.0.1:0/v1" in said
    # The line to try is run, with a stand-in for curl that shows what it was given.
    (tmp_path / "picture.png").write_bytes(b"pixels")
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$@" >&2\ncat\n')
    (tmp_path / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    line = said.split("try         ", 1)[1]
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "http://127.0.0.1:0/v1/chat/completions" in done.stderr
    body = json.loads(done.stdout)
    assert body["model"] == "it's mine"
    assert body["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,cGl4ZWxz"


def test_flags_of_logs_and_domains(shell: Any) -> None:
    arguments = ("--log-json", "--allow-media-domain", "a.example", "--allow-media-domain", "b.example")
    code, _, (flags,) = shell(*arguments)
    assert code == 0
    assert flags[flags.index("--logging-config.formatter") + 1] == "json"
    place = flags.index("--allowed-media-domains")
    assert flags[place + 1 : place + 4] == ["a.example", "b.example", "--logging-config.formatter"]
    # Lines that are not JSON would break what reads the logs.
    assert shell.printed == [""]
    code, error, _ = shell("--allow-media-domain", "a.example", "--allowed-media-domains", "b.example")
    assert code == 2
    assert "give one of them" in error


def test_a_supervised_server_is_the_same_command_without_the_flag(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("stacktok.serving.supervise.supervise", lambda command: commands.append(command) or 3)
    code, _, flags = shell("--restart", "--budget", "20%", "--enforce-eager")
    assert code == 3
    assert not flags
    assert commands[0][0] == sys.executable
    assert commands[0][-3:] == ["--budget", "20%", "--enforce-eager"]
    assert "--restart" not in commands[0]
