"""A server that ends is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from stacktok.serving.supervise import supervise


def program(folder: Path, *codes: int) -> list[str]:
    """A command that ends with one code after another, and notes every start."""
    code = (
        f"import sys; path = {str(folder / 'starts')!r}; starts = open(path, 'a+'); starts.seek(0)\n"
        f"number = len(starts.read()); starts.write('x'); starts.close(); sys.exit({codes!r}[number])"
    )
    return [sys.executable, "-c", code]


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_it_is_started_again_however_it_ended_unless_its_usage_is_wrong(tmp_path: Path) -> None:
    # vLLM's server ends with code 0 when its engine was killed.
    assert supervise(program(tmp_path, 1, 0, 139, 0, 2), steady=0, pause=0) == 2
    assert starts(tmp_path) == 5


def test_a_server_that_never_lasts_is_given_up(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert supervise(program(tmp_path, 1, 0, 3, 0), steady=600, attempts=3, pause=0) == 3
    assert starts(tmp_path) == 3
    assert "ended 3 times before it was steady, last with code 3" in capsys.readouterr().err


def test_a_signal_reaches_the_server_and_ends_both(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = (
        f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7)); open({str(ready)!r}, 'w')"
    )
    inner = [sys.executable, "-c", f"{server}; time.sleep(60)"]
    code = f"import sys; from stacktok.serving.supervise import supervise; sys.exit(supervise({inner!r}))"
    process = subprocess.Popen([sys.executable, "-c", code])
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    while not ready.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 7
    watchdog.cancel()
