"""A server that is started again when it ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

STEADY = 120.0
"""Seconds after which a server counts as having started."""

WRONG_USAGE = 2
"""Exit code of a command that was given what it cannot take."""

ATTEMPTS = 3
"""Starts in a row that may end sooner than that."""


def supervise(command: Sequence[str], *, steady: float = STEADY, attempts: int = ATTEMPTS, pause: float = 1.0) -> int:
    """Run a command again and again until a signal to this process stops it, its usage is wrong, or it never lasts.

    vLLM's server ends with code 0 when its engine was killed, so that code is no reason to stop.

    Parameters
    ----------
    command
        The program and its arguments.
    steady
        Seconds after which a run counts as started.
    attempts
        Runs in a row that may be shorter.
    pause
        Seconds before a run that follows a short one; twice as many before the next.

    Returns
    -------
    int
        Exit code of the last run.
    """
    stopped = threading.Event()
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        for process in running:
            process.send_signal(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        short = 0
        while True:
            begin = time.monotonic()
            # In a session of its own, so that an interrupt at the terminal reaches it once: from here.
            process = subprocess.Popen(command, start_new_session=True)
            running[:] = [process]
            code = process.wait()
            short = 0 if time.monotonic() - begin >= steady else short + 1
            if stopped.is_set() or code == WRONG_USAGE:
                return code
            if short == attempts:
                print(f"the server ended {attempts} times before it was steady, last with code {code}", file=sys.stderr)
                return code
            print(f"the server ended with code {code} and is started again", file=sys.stderr)
            if short:
                stopped.wait(pause * 2 ** (short - 1))
                if stopped.is_set():
                    return code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
