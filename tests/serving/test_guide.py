"""The commands and snippets of docs/serving.md, run with the embedded model in place of a large one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from benchmarks.served import started

from stacktok.embedded import path as embedded_path
from stacktok.view.samples import scene_samples

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
MODEL = "llava-hf/llava-1.5-7b-hf"
# Small machines; nothing of this is the guide's business.
SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> list[str]:
    """The commands of all shell blocks, each on one line and without its comment."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the snippets run: a picture is there, and the environment's programs come first."""
    scene_samples(1)[0].picture.save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return tmp_path


@pytest.mark.parametrize("command", [line for line in commands() if "stacktok serve" in line])
def test_flags_of_our_command_are_flags_of_vllm(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from stacktok.cli import main

    words = shlex.split(command.replace(MODEL, "embedded/llava"))
    while not words[0].endswith("stacktok"):
        assert "=" in words.pop(0)
    flags: list[Any] = []
    monkeypatch.setattr("stacktok.serving.launch.serve", flags.append)
    monkeypatch.setattr(sys, "argv", [*words, "--port", "0"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(flags[0])
    assert parsed.model == str(embedded_path())
    assert parsed.hf_overrides["stacktok"]["budget"] == 64
    assert parsed.trust_request_mm_kwargs


def test_vllms_own_server_and_the_clients(folder: Path) -> None:
    (command,) = (line for line in commands() if "vllm.entrypoints" in line)
    command = command.replace(MODEL, str(embedded_path()))
    with started(["sh", "-c", f'exec env {command} "$@"', "sh"], folder / "log", *SMALL) as server:
        names: dict[str, Any] = {}
        for snippet in blocks("python"):
            if "base_url" in snippet or "extra_body" in snippet:
                exec(snippet.replace("http://127.0.0.1:8000", server.url), names)
                assert names["reply"].choices[0].message.content
        assert names["reply"].usage.prompt_tokens < 64
        assert "stacktok_images_total 2" in server.get("/metrics")
        assert server.get("/ready")


def test_offline(folder: Path) -> None:
    (snippet,) = (one for one in blocks("python") if "from vllm import LLM" in one)
    ready = snippet.replace(f'LLM("{MODEL}", ', f'LLM("{embedded_path()}", dtype="float32", enforce_eager=True, ')
    assert ready != snippet
    # vLLM may start its engine by running the program again.
    body = "\n".join(f"    {line}" for line in ready.splitlines())
    (folder / "offline.py").write_text(f'if __name__ == "__main__":\n{body}\n')
    done = subprocess.run([sys.executable, "offline.py"], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'images': 1" in done.stdout
