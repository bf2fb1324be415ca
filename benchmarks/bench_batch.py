"""Batch jobs: throughput against a plain loop over ``generate``, and the cost of our own part per row.

``throughput`` asks the embedded model four questions on each of some scenes: one by one in a plain loop with all tokens
and pruned, then through `stacktok batch` with all tokens, pruned, and with the questions in shuffled order, in one run.
``driver`` passes synthetic rows through readers, grouping, decoding and shards to an engine that answers at once.
``soak`` answers rows in a job whose driver and workers are killed at random moments, and compares with `ask`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stacktok.batch.engines import EngineSpec, TransformersEngine
from stacktok.batch.rows import Columns, Input, Row
from stacktok.batch.run import run_batch
from stacktok.batch.worker import Worker
from stacktok.methods import StackTok
from stacktok.models.pictures import read_picture
from stacktok.models.prompt import prompt_inputs
from stacktok.runtime.asking import Answered, generate_texts
from stacktok.scenes import make_scene, questions, render, seed_for

COLUMNS = Columns(question="question", id="name")
SPEC = EngineSpec("transformers", "embedded/llava", StackTok(budget=64), 16, "float32")


def scene_rows(pictures: int, each: int = 4) -> list[dict[str, Any]]:
    """Questions on scenes, those on one picture together."""
    rows: list[dict[str, Any]] = []
    for index in range(pictures):
        scene, data = make_scene(seed_for("test", index)), io.BytesIO()
        render(scene).save(data, "PNG")
        asked = [question.text for question in questions(scene)][:each]
        rows += [{"name": f"{index}-{n}", "image": data.getvalue(), "question": q} for n, q in enumerate(asked)]
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The rows as a parquet file."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=256)
    return path


def throughput(pictures: int, batch_rows: int) -> Iterator[tuple[str, float, float, int]]:
    """Rows per second, rows per second of processor time and pictures encoded of every way, in one process."""
    rows = scene_rows(pictures)
    shuffled = rows.copy()
    random.Random(0).shuffle(shuffled)
    engine = TransformersEngine(SPEC)

    def loop(budget: int | None) -> None:
        engine.pruned.budget = budget
        for row in rows:
            inputs = prompt_inputs(engine.processor, read_picture(row["image"]), row["question"], engine.model)
            engine.pruned.query = row["question"]
            generate_texts(engine.model, engine.processor, inputs, engine.max_new_tokens)

    def batch(budget: int | None, given: list[dict[str, Any]], *, grouped: bool = True) -> None:
        engine.pruned.budget = budget
        with tempfile.TemporaryDirectory() as folder:
            source = Input(write(Path(folder) / "in.parquet", given), COLUMNS)
            worker = Worker(engine, batch_rows=batch_rows, grouped=grouped)
            worker.answer(row for row, _ in source.read((0, 0), 0))

    ways = {
        "loop over generate, all tokens": lambda: loop(None),
        "loop over generate, 64 tokens": lambda: loop(64),
        "batch, all tokens": lambda: batch(None, rows),
        "batch, 64 tokens": lambda: batch(64, rows),
        "batch, 64 tokens, shuffled and grouped": lambda: batch(64, shuffled),
        "batch, 64 tokens, shuffled, not grouped": lambda: batch(64, shuffled, grouped=False),
    }
    batch(64, rows[: 2 * batch_rows])
    for name, way in ways.items():
        before, begin, used = engine.counts()[0], time.perf_counter(), time.process_time()
        way()
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        encoded = engine.counts()[0] - before if name.startswith("batch") else len(rows)
        yield name, len(rows) / seconds, len(rows) / used, encoded


class Silent:
    """Answers at once."""

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        """The same answer for every row."""
        return [Answered("yes", 576, 64, 0.0)] * len(rows)

    def counts(self) -> tuple[int, int]:
        """Nothing is encoded."""
        return 0, 0


def driver(count: int) -> dict[str, float]:
    """Microseconds per row of reading, grouping, decoding and committing, and the peak of memory on the way."""
    data = io.BytesIO()
    render(make_scene(seed_for("test", 0))).resize((16, 16)).save(data, "PNG")
    picture = data.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.parquet"
        schema = pa.schema([("name", pa.string()), ("image", pa.binary()), ("question", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            for first in range(0, count, 10_000):
                numbers = range(first, min(first + 10_000, count))
                # Four questions on each picture; bytes after the end of a PNG are not read.
                images = [picture + str(number // 4).encode() for number in numbers]
                columns = {"name": [f"n{n}" for n in numbers], "image": images, "question": ["What?"] * len(numbers)}
                writer.write_table(pa.table(columns, schema=schema))
        source = Input(path, COLUMNS)
        begin = time.process_time()
        for _ in range(2000):
            read_picture(picture)
        decoding = (time.process_time() - begin) / 2000 / 4
        peaks: list[int] = []

        def report(progress: Any) -> None:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

        begin = time.process_time()
        options: dict[str, Any] = {"shard_rows": 10_000, "batch_rows": 256, "report": report}
        run_batch(source, Path(folder) / "out", Silent, {"model": "silent"}, **options)
        each = (time.process_time() - begin) / count
        sizes = sum(one.stat().st_size for one in (Path(folder) / "out" / "_job").glob("manifest*"))
    tenth = peaks[len(peaks) // 10]
    return {
        "rows": count,
        "microseconds_per_row": round(1e6 * each, 2),
        "of_which_decoding_pictures": round(1e6 * decoding, 2),
        "peak_megabytes_after_a_tenth": round(tenth / 1024, 1),
        "peak_megabytes_at_the_end": round(peaks[-1] / 1024, 1),
        "manifest_bytes_per_shard": round(sizes / -(-count // 10_000), 1),
    }


def soak(count: int, kills: int, where: Path, *, ray: bool) -> dict[str, Any]:
    """Rows of the embedded model from a job whose driver and workers are killed, against `ask` row by row.

    A kill comes some shards after the one before it, and at a random moment of the shard that is then under way. With
    Ray every other job runs on two workers, of which three are killed before the driver is; what a killed driver leaves
    running is not waited for. A second start with the same folder goes on with it.
    """
    where.mkdir(parents=True, exist_ok=True)
    data = where / "in.parquet"
    if not data.is_file():
        write(data, scene_rows(-(-count // 4))[:count])
    out, chance, killed = where / "killed", random.Random(0), {"driver": 0, "worker": 0}
    command = [sys.executable, __file__, "job", "--data", str(data), "--out", str(out)]
    ended = False
    while not ended:
        spread = ray and killed["driver"] % 2 == 0
        process = subprocess.Popen([*command, *(["--ray"] if spread else [])], stdout=subprocess.DEVNULL)
        victims = [*["worker"] * (3 if spread else 0), "driver"]
        while victims and not ended:
            aim = _shards(out) + chance.randrange(0, 3) if sum(killed.values()) < kills else 10**9
            begin = time.monotonic()
            while not ended and _shards(out) < aim:
                ended = process.poll() is not None
                time.sleep(0.1)
            time.sleep(chance.uniform(0, 1) * min(20.0, time.monotonic() - begin + 5))
            victim, targets = victims.pop(0), list[int]()
            while not targets and not ended:
                ended = process.poll() is not None
                targets = [process.pid] if victim == "driver" else _workers(process.pid)
                time.sleep(0 if targets else 0.3)
            if not ended:
                os.kill(chance.choice(targets), signal.SIGKILL)
                killed[victim] += 1
                print(f"{victim} killed after {_shards(out)} shards", file=sys.stderr, flush=True)
        process.wait()
    if process.returncode:
        raise RuntimeError(f"the last job ended with {process.returncode}")
    names = ["row", "id", "answer", "error", "tokens_before", "tokens_after"]
    found = pa.concat_tables([pq.read_table(path, columns=names) for path in sorted(out.glob("*.parquet"))]).to_pylist()
    given = [row for row, _ in Input(data, COLUMNS).read((0, 0), 0)]
    differ = sum(row != asked for row, asked in zip(found, _asked(given), strict=True))
    return {"rows": len(found), "killed": killed, "unlike_ask": differ, "errors": sum(bool(r["error"]) for r in found)}


def _asked(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Rows as `stacktok ask` answers them, one question at a time; its warm-up, which changes nothing, is left out."""
    engine = TransformersEngine(SPEC)
    for row in rows:
        inputs = prompt_inputs(engine.processor, read_picture(row.picture), row.question, engine.model)
        engine.pruned.query = row.question
        (text,) = generate_texts(engine.model, engine.processor, inputs, SPEC.max_new_tokens)
        counts = {"tokens_before": engine.pruned.before, "tokens_after": engine.pruned.after}
        yield {"row": row.number, "id": row.id, "answer": text, "error": None, **counts}


def _shards(folder: Path) -> int:
    return len(list(folder.glob("part-*.parquet")))


def _workers(driver: int) -> list[int]:
    """Processes below a driver that hold an engine."""
    parents, names = dict[int, int](), dict[int, bytes]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_bytes()
        except OSError:
            continue

    def below(process: int) -> bool:
        return process == driver or (process in parents and below(parents[process]))

    return [process for process, name in names.items() if b"ShardWorker" in name and below(process)]


def job(data: str, out: str, *, ray: bool) -> None:
    """One job of `soak`."""
    more: dict[str, Any] = {"ray": "local", "workers": (2, 2)} if ray else {}
    run_batch(Input(data, COLUMNS), out, SPEC, SPEC.job(), shard_rows=20, **more)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("throughput", "driver", "soak", "job"))
    parser.add_argument("--pictures", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ray", action="store_true", help="also kill workers of Ray")
    parser.add_argument("--data")
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.part == "job":
        job(given.data, given.out, ray=given.ray)
    elif given.part == "driver":
        print(json.dumps(driver(given.rows or 1_000_000)))
    elif given.part == "soak":
        with tempfile.TemporaryDirectory() as folder:
            where = Path(given.out or folder)
            print(json.dumps(soak(given.rows or 2000, given.kills, where, ray=given.ray)))
    else:
        print("| way | rows/s | against the first | rows per CPU s | pictures encoded |\n|---|---|---|---|---|")
        first = None
        for name, rate, used, encoded in throughput(given.pictures, given.batch_rows):
            first = first or rate
            print(f"| {name} | {rate:.2f} | {rate / first:.2f} | {used:.2f} | {encoded} |", flush=True)


if __name__ == "__main__":
    main()
