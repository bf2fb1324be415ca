"""Many clients at a time against one server: no error, answers as in single runs, memory flat.

``python -m tests.serving.soak --minutes 10`` starts the server itself and prints what happened. With ``--faults``
clients go away in the middle of an answer, one request of a hundred is broken, and the engine is killed once, half-way.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.served import NAME, Server, bytes_url, data_url, messages, serving

from stacktok.embedded import path as embedded_path
from stacktok.view.samples import scene_samples

CONCURRENCY = 32
FLAT = 64 << 20
"""Bytes of growth that are no leak: the allocators of some dozen threads."""
# Caches are small, so that they are full early and memory can be looked at: vLLM's key-value cache is touched page by
# page, and with this few blocks requests also evict one another's prefixes.
FLAGS = (
    *("--budget", "64", "--cache-megabytes", "64", "--mm-processor-cache-gb", "0.25"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--num-gpu-blocks-override", "128"),
)


# oneDNN keeps the compiled products of the last 1,024 shapes, some hundred megabytes, and batches come in many shapes.
ENVIRONMENT = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
}


# With faults: shares of requests that are broken, and whose client goes away after the first word.
BROKEN, LEFT = 0.01, 0.05


@contextmanager
def soaked_server(folder: Path, *flags: str) -> Iterator[Server]:
    """A server of the embedded model whose memory can be looked at."""
    with serving(embedded_path(), folder / "log", *FLAGS, *flags, environment=ENVIRONMENT) as server:
        yield server


@dataclass(frozen=True)
class Case:
    """A request."""

    question: str
    urls: tuple[str, ...]
    budget: int | str | None

    def ask(self, client: Any) -> str:
        """The answer."""
        return str(self._request(client).choices[0].message.content)

    def leave(self, client: Any) -> None:
        """Ask for a long answer and go away after its first piece."""
        with self._request(client, stream=True, max_tokens=64, extra={"ignore_eos": True}) as stream:
            next(iter(stream))

    def _request(self, client: Any, extra: dict[str, Any] | None = None, **arguments: Any) -> Any:
        body = dict(extra or {})
        if self.budget != "server":
            body["mm_processor_kwargs"] = {"stacktok": {"budget": self.budget}}
        return client.chat.completions.create(
            model=NAME,
            messages=messages(self.question, *self.urls),
            temperature=0,
            extra_body=body,
            **{"max_tokens": 8, **arguments},
        )


BAD = (
    Case("What is it?", (bytes_url(b"no picture"),), "server"),
    Case("What is it?", (), -1),
    Case("What is it?", ("http://127.0.0.1:9/picture.png",), 16),
)


@dataclass
class Report:
    """The outcome of a soak."""

    seconds: float = 0.0
    requests: int = 0
    refused: int = 0
    left: int = 0
    lost: int = 0
    away: float = 0.0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def growth(self, since: float) -> int:
        """Bytes by which memory grew: the median of the last quarter over that of the quarter that begins at a part."""
        quarter, first = max(1, len(self.memory) // 4), int(since * len(self.memory))
        early, late = sorted(self.memory[first : first + quarter]), sorted(self.memory[-quarter:])
        return late[len(late) // 2] - early[len(early) // 2]

    def __str__(self) -> str:
        return (
            f"{self.requests} requests in {self.seconds:.0f} s from {CONCURRENCY} clients, {len(self.errors)} errors, "
            f"{len(self.wrong)} answers that differ from their single run, memory {self.memory[0] / 2**20:.0f} MiB at "
            f"the start, {self.memory[-1] / 2**20:.0f} MiB at the end, growth from the second quarter to the last "
            f"{self.growth(0.25) / 2**20:.1f} MiB, from the third to the last {self.growth(0.5) / 2**20:.1f} MiB"
        )


def cases() -> list[Case]:
    """Questions on scenes under several budgets, two pictures at a time, and no picture at all."""
    found = []
    samples = scene_samples()
    for sample in samples:
        url = data_url(sample.picture)
        for question in sample.questions[:4]:
            found += [Case(question, (url,), budget) for budget in ("server", 16, "10%", None)]
    pair = (data_url(samples[0].picture), data_url(samples[1].picture))
    found += [Case(question, pair, "server") for question in samples[0].questions[:4]]
    found += [Case(question, (), "server") for question in samples[0].questions[:2]]
    return found


def soak(server: Server, minutes: float, *, faults: bool = False) -> Report:
    """Ask from many threads for some time, and compare every answer with the one given when nobody else asked.

    Parameters
    ----------
    server
        The server; with ``faults`` one that a supervisor starts again.
    minutes
        For how long.
    faults
        Break requests, leave answers, and kill the engine half-way. Memory is then looked at from its return on.
    """
    from openai import BadRequestError

    every = cases()
    client = server.client()
    single = {case: case.ask(client) for case in every}
    report, lock, back = Report(), threading.Lock(), threading.Event()
    back.set()
    begin = time.monotonic()
    end = begin + 60 * minutes

    def ask(seed: int) -> None:
        own, draw = server.client(), random.Random(seed)
        while time.monotonic() < end:
            case, chance = draw.choice(every), draw.random()
            broken, leaves = faults and chance < BROKEN, faults and BROKEN <= chance < BROKEN + LEFT
            up = back.is_set()
            try:
                if broken:
                    draw.choice(BAD).ask(own)
                    outcome = "a broken request was answered"
                elif leaves:
                    case.leave(own)
                    outcome = "left"
                else:
                    outcome, answer = "answered", case.ask(own)
            except BadRequestError as error:
                outcome = "refused" if broken else repr(error)
            except Exception as error:
                # What was under way when the engine was killed, or came before it was back, is lost.
                outcome = repr(error) if up and back.is_set() else "lost"
            if outcome == "lost":
                back.wait(1)
            with lock:
                if outcome == "answered":
                    report.requests += 1
                    if answer != single[case]:
                        report.wrong.append(f"{case.question} ({case.budget}): {answer!r}, alone {single[case]!r}")
                elif outcome in ("refused", "left", "lost"):
                    setattr(report, outcome, getattr(report, outcome) + 1)
                else:
                    report.errors.append(outcome)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if faults and not report.away and time.monotonic() - begin > 30 * minutes:
            back.clear()
            report.away = _kill_engine(server)
            back.set()
            report.memory.clear()
        report.memory.append(server.memory())
        threads[0].join(max(0.5, 60 * minutes / 100))
    for thread in threads:
        thread.join()
    report.seconds = time.monotonic() - begin
    return report


def _kill_engine(server: Server) -> float:
    """Kill the engine's process; seconds until the server is ready again."""
    (engine,) = (pid for pid, name in server.processes().items() if name.startswith("VLLM::EngineCor"))
    os.kill(engine, signal.SIGKILL)
    begin = time.monotonic()
    time.sleep(5)
    while not server.ready():
        if time.monotonic() - begin > 900:
            raise RuntimeError(f"the server is not back after 15 minutes:\n{server.log.read_text()[-3000:]}")
        time.sleep(1)
    return time.monotonic() - begin


def main() -> None:
    """Start a server, soak it, print the report; exit code 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", action="store_true", help="break requests, leave answers, kill the engine once")
    arguments = parser.parse_args()
    begin = time.monotonic()
    restart = ("--restart",) if arguments.faults else ()
    with tempfile.TemporaryDirectory() as folder, soaked_server(Path(folder), *restart) as server:
        print(f"start-up {time.monotonic() - begin:.0f} s", flush=True)
        report = soak(server, arguments.minutes, faults=arguments.faults)
        print(report)
        if arguments.faults:
            print(
                f"{report.refused} broken requests refused, {report.left} answers left, {report.lost} requests lost "
                f"while the engine was away, {report.away:.0f} s until it was ready again"
            )
        print({name: value for name, value in server.counters().items() if name.startswith("stacktok_")})
    for line in (*report.errors[:5], *report.wrong[:5]):
        print(line, file=sys.stderr)
    sys.exit(bool(report.errors or report.wrong or report.growth(0.25) > FLAT))


if __name__ == "__main__":
    main()
