"""Help and usage errors: answered at once, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stacktok

WATCH = """
import sys
sys.argv = ["stacktok", *sys.argv[1:]]
from stacktok.cli import main
try:
    main()
except SystemExit as stopped:
    print("exit", stopped.code)
print("loaded", sorted({"torch", "numba", "transformers", "PIL", "matplotlib"} & set(sys.modules)))
"""
COMMANDS = (
    *("demo", "ask", "batch", "check", "tune", "bench", "models", "view", "serve", "methods", "show", "eval"),
    "report",
)


def run(*arguments: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", WATCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(((command, "--help"), 0) for command in COMMANDS),
        (("--help",), 0),
        (("--version",), 0),
        ((), 2),
        (("nothing",), 2),
        (("ask",), 2),
        (("ask", "--image", "x.png", "--question", "?", "--colour", "red"), 2),
        (("ask", "--image", "x.png", "--question", "?"), 2),
        (("ask", "--image", "x.png", "--question", "?", "--budget", "many"), 2),
        (("ask", "--image", "x.png", "--question", "?", "--set", "depth"), 2),
        (("ask", "--image", "x.png", "--question", "?", "--dtype", "int3"), 2),
        (("ask", "--image", "x.png", "--question", "?", "--model", "embedded/none"), 2),
        (("bench",), 2),
        (("bench", "tiny", "--repeats", "0"), 2),
        (("bench", "tiny", "--budget", "1e30000000%"), 2),
        (("view", "--port", "-1"), 2),
        (("demo", "--scene", "-1"), 2),
        (("demo", "--out", "picture.gif"), 2),
        (("report", "results", "--format", "pdf"), 2),
        (("serve", "--port", "many"), 2),
        (("serve", "--budget", "many"), 2),
        (("show", "--image", "x.png", "--question", "?", "--budget", "many"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_help_and_usage_errors_do_not_load_torch(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    lines = run(*arguments, cwd=tmp_path).splitlines()
    assert lines[-2:] == [f"exit {code}", "loaded []"]


def test_the_version_and_the_module(tmp_path: Path) -> None:
    for start in (["-m", "stacktok"], ["-c", "from stacktok.cli import main; main()"]):
        done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"stacktok {stacktok.__version__}\n"


def test_every_public_name_is_there() -> None:
    for name in stacktok.__all__:
        assert name in dir(stacktok)
        assert getattr(stacktok, name).__module__.startswith("stacktok.")
    with pytest.raises(AttributeError, match="has no attribute 'Stacktok'"):
        stacktok.Stacktok  # noqa: B018
