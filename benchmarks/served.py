"""A server of ours as a process of its own, and requests to it."""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "pruned"
"""Under which the model is served."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes
    ----------
    url
        Where it listens.
    process
        The server; its engine is a process below it.
    log
        What both print.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, seconds: float = 900) -> Any:
        """An OpenAI client that tries once and waits so long for an answer."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=seconds)

    def get(self, path: str) -> str:
        """The answer to a plain GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def counters(self) -> dict[str, float]:
        """Everything at /metrics that has no labels."""
        lines = [line.split() for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines if "{" not in name}

    def metric(self, name: str) -> float:
        """A metric of vLLM, summed over its labels."""
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return sum(float(value) for key, value in lines if key.split("{")[0] == name)

    def ready(self) -> bool:
        """Whether the engine answers."""
        try:
            self.get("/ready")
        except OSError:
            return False
        return True

    def processes(self) -> dict[int, str]:
        """The names of the server's process and of all below it."""
        names = {}
        for pid in _family(self.process.pid):
            try:
                names[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
            except OSError:
                continue
        return names

    def memory(self) -> int:
        """Bytes that the server and its engine hold, what they share counted once."""
        return sum(_held(pid) for pid in _family(self.process.pid))


@contextmanager
def serving(
    model: str | Path, log: Path, *flags: str, seconds: int = 600, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start ``stacktok serve``, wait until it answers, and stop it in the end.

    Parameters
    ----------
    model
        Folder or hub name.
    log
        File for what it prints.
    flags
        Further flags, ours and vLLM's.
    seconds
        How long it may take to start.
    environment
        Variables of the libraries below, on top of this process's own.
    """
    command = [str(Path(sys.executable).parent / "stacktok"), "serve", str(model)]
    with started(command, log, *flags, seconds=seconds, environment=environment) as server:
        yield server


@contextmanager
def started(
    command: Sequence[str], log: Path, *flags: str, seconds: int = 600, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start any of vLLM's servers, wait until it answers, and stop it in the end.

    Parameters
    ----------
    command
        The program and its first arguments; port and name follow.
    log, flags, seconds, environment
        As in `serving`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--served-model-name", NAME, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait(server, seconds)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(server: Server, seconds: int) -> None:
    for _ in range(seconds):
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{server.log.read_text()[-3000:]}")
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(f"the server does not answer:\n{server.log.read_text()[-3000:]}")


def data_url(image: Any) -> str:
    """A picture as it stands in a request."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return bytes_url(file.getvalue())


def bytes_url(content: bytes) -> str:
    """A file's content as it stands in a request."""
    return "data:image/png;base64," + base64.b64encode(content).decode()


def messages(question: str, *urls: str) -> list[dict[str, Any]]:
    """A conversation of one turn: pictures, then the question."""
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]


def _family(pid: int) -> list[int]:
    """A process and those below it."""
    try:
        children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(one for some in children for child in some for one in _family(int(child)))]


def _held(pid: int) -> int:
    """Proportional set size; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
