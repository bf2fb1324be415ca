"""Files to run a server: containers, a unit of systemd, a dashboard."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stacktok.serving.counters import Counters, exposition

DEPLOY = Path(__file__).parents[2] / "deploy"


def expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_exposed_and_for_all_of_it() -> None:
    exposed = set(re.findall(r"^(stacktok_\w+)", exposition([Counters().snapshot()]), re.MULTILINE))
    asked = {name for text in expressions() for name in re.findall(r"stacktok_\w+", text)}
    assert asked <= exposed
    derived = {name for name in exposed if name.endswith(("_sum", "_count"))}
    assert exposed - derived == asked


def test_the_dashboard_asks_vllm_for_what_it_has() -> None:
    loggers = pytest.importorskip("vllm.v1.metrics.loggers", reason="needs vLLM: make test-vllm")
    known = set(re.findall(r'"(vllm:\w+)"', Path(loggers.__file__).read_text()))
    asked = {name for text in expressions() for name in re.findall(r"vllm:\w+", text)}
    assert asked
    assert {re.sub(r"_(total|bucket)$", "", name) for name in asked} <= known


@pytest.mark.parametrize("name", ["Dockerfile.gpu", "Dockerfile.cpu"])
def test_containers_pass_the_linter(name: str) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("needs hadolint, which the extra dev brings")
    done = subprocess.run([str(linter), str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    # Everything that is copied is there.
    for line in re.findall(r"^COPY (.*)", (DEPLOY / name).read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source


def test_the_unit_starts_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from stacktok.cli import main

    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "stacktok.service")
    assert unit["Service"]["Restart"] == "always"
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/stacktok")
    flags: list[Any] = []
    monkeypatch.setattr("stacktok.serving.launch.serve", flags.append)
    monkeypatch.setattr("stacktok.cli.serve.find_spec", lambda name: True)
    # The model itself is not here to be served.
    arguments[arguments.index("llava-hf/llava-1.5-7b-hf")] = "embedded/llava"
    monkeypatch.setattr(sys, "argv", ["stacktok", *arguments, "--port", "0"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "--logging-config.formatter" in flags[0]
