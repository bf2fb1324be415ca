"""Many clients at a time against one server: no error, answers as in single runs, memory flat.

``python -m tests.serving.soak --minutes 10`` starts the server itself and prints what happened.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.served import NAME, Server, data_url, messages, serving

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


@contextmanager
def soaked_server(folder: Path) -> Iterator[Server]:
    """A server of the embedded model whose memory can be looked at."""
    with serving(embedded_path(), folder / "log", *FLAGS, environment=ENVIRONMENT) as server:
        yield server


@dataclass(frozen=True)
class Case:
    """A request."""

    question: str
    urls: tuple[str, ...]
    budget: int | str | None

    def ask(self, client: Any) -> str:
        body: dict[str, Any] = {}
        if self.budget != "server":
            body["mm_processor_kwargs"] = {"stacktok": {"budget": self.budget}}
        reply = client.chat.completions.create(
            model=NAME, messages=messages(self.question, *self.urls), temperature=0, max_tokens=8, extra_body=body
        )
        return str(reply.choices[0].message.content)


@dataclass
class Report:
    """The outcome of a soak."""

    seconds: float = 0.0
    requests: int = 0
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


def soak(server: Server, minutes: float) -> Report:
    """Ask from many threads for some time, and compare every answer with the one given when nobody else asked."""
    every = cases()
    client = server.client()
    single = {case: case.ask(client) for case in every}
    report, lock = Report(), threading.Lock()
    begin = time.monotonic()
    end = begin + 60 * minutes

    def ask(seed: int) -> None:
        own, draw = server.client(), random.Random(seed)
        while time.monotonic() < end:
            case = draw.choice(every)
            try:
                answer = case.ask(own)
            except Exception as error:
                with lock:
                    report.errors.append(repr(error))
                continue
            with lock:
                report.requests += 1
                if answer != single[case]:
                    report.wrong.append(f"{case.question} ({case.budget}): {answer!r}, alone {single[case]!r}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        report.memory.append(server.memory())
        threads[0].join(max(0.5, 60 * minutes / 100))
    for thread in threads:
        thread.join()
    report.seconds = time.monotonic() - begin
    return report


def main() -> None:
    """Start a server, soak it, print the report; exit code 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, soaked_server(Path(folder)) as server:
        report = soak(server, arguments.minutes)
        print(report)
        print({name: value for name, value in server.counters().items() if name.startswith("stacktok_")})
    for line in (*report.errors[:5], *report.wrong[:5]):
        print(line, file=sys.stderr)
    sys.exit(bool(report.errors or report.wrong or report.growth(0.25) > FLAT))


if __name__ == "__main__":
    main()
