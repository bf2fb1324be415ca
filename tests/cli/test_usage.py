"""Help and usage errors: answered at once, without torch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import stacktok
from stacktok.cli.common import progress_bar

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


def test_progress_is_one_bar_on_a_terminal_and_plain_lines_elsewhere() -> None:
    texts = [f"{number} rows, a text that is longer than a narrow window, {'and' * 20}" for number in range(3)]
    written = {}
    for terminal in (True, False):
        stream = io.StringIO()
        with progress_bar(Console(file=stream, force_terminal=terminal, width=80)) as show:
            for number, text in enumerate(texts):
                show(number / 2, text)
        written[terminal] = stream.getvalue()
    assert written[False].splitlines() == texts
    # The last state of the one bar stays.
    assert "100%" in written[True]
    assert written[True].count("━" * 20) >= 1
    stream = io.StringIO()
    with progress_bar(Console(file=stream, force_terminal=False), every=1000.0) as show:
        for text in texts:
            show(0.0, text)
    assert stream.getvalue().splitlines() == texts[:1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str, tmp_path: Path) -> None:
    def complete(line: str) -> str:
        words = line.split(" ")
        asked = {"bash": "complete_bash", "zsh": "complete_zsh", "fish": "complete_fish"}[shell]
        environment = os.environ | {"_STACKTOK_COMPLETE": asked, "_TYPER_COMPLETE_ARGS": line}
        environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": words[-1]}
        command = [sys.executable, "-c", "import sys; sys.argv = ['stacktok']; from stacktok.cli import main; main()"]
        return subprocess.run(command, capture_output=True, text=True, env=environment).stdout

    found = complete("stacktok ")
    assert all(command in found for command in COMMANDS)
    assert "--budget" in complete("stacktok ask --bu")
    # What a shell is given to source, by name: detecting the shell needs one around it.
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(
        [sys.executable, "-m", "stacktok", "--show-completion", shell], capture_output=True, text=True, env=environment
    )
    assert shown.returncode == 0, shown.stderr
    assert "_STACKTOK_COMPLETE" in shown.stdout


def test_every_public_name_is_there() -> None:
    for name in stacktok.__all__:
        assert name in dir(stacktok)
        assert getattr(stacktok, name).__module__.startswith("stacktok.")
    with pytest.raises(AttributeError, match="has no attribute 'Stacktok'"):
        stacktok.Stacktok  # noqa: B018
