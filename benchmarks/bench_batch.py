"""Batch jobs: throughput against a plain loop over ``generate``, and the cost of our own part per row.

``throughput`` asks the embedded model four questions on each of some scenes: one by one in a plain loop with all tokens
and pruned, then through `stacktok batch` with all tokens, pruned, and with the questions in shuffled order, in one run.
``driver`` passes synthetic rows through readers, grouping, decoding and shards to an engine that answers at once.
``soak`` answers rows in a process that is killed at random moments, and compares with an uninterrupted run.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stacktok.batch.engines import EngineSpec, TransformersEngine
from stacktok.batch.rows import Columns, Input
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


def throughput(pictures: int, batch_rows: int) -> list[tuple[str, float, int]]:
    """Rows per second and pictures encoded of every way, in one process."""
    rows = scene_rows(pictures)
    shuffled = rows.copy()
    random.Random(0).shuffle(shuffled)
    engine = TransformersEngine(SPEC)
    found = []

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
        before, begin = engine.counts()[0], time.perf_counter()
        way()
        seconds = time.perf_counter() - begin
        encoded = engine.counts()[0] - before if name.startswith("batch") else len(rows)
        found.append((name, len(rows) / seconds, encoded))
    return found


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
        sizes = sum(one.stat().st_size for one in (Path(folder) / "out").glob("manifest*"))
    tenth = peaks[len(peaks) // 10]
    return {
        "rows": count,
        "microseconds_per_row": round(1e6 * each, 2),
        "of_which_decoding_pictures": round(1e6 * decoding, 2),
        "peak_megabytes_after_a_tenth": round(tenth / 1024, 1),
        "peak_megabytes_at_the_end": round(peaks[-1] / 1024, 1),
        "manifest_bytes_per_shard": round(sizes / -(-count // 10_000), 1),
    }


def soak(count: int, kills: int) -> dict[str, Any]:
    """Rows of the embedded model from a job that is killed at random moments, against those of one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        data = write(where / "in.parquet", scene_rows(-(-count // 4))[:count])
        chance, killed = random.Random(0), 0
        command = [sys.executable, __file__, "job", "--data", str(data), "--out"]
        while True:
            process = subprocess.Popen([*command, str(where / "killed")], stdout=subprocess.DEVNULL)
            try:
                # From before the model is loaded to well into the answers.
                process.wait(chance.uniform(1, 12) if killed < kills else None)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
        subprocess.run([*command, str(where / "whole")], check=True, stdout=subprocess.DEVNULL)
        names = ["row", "id", "answer", "error", "tokens_before", "tokens_after"]
        tables = [
            pa.concat_tables([pq.read_table(path, columns=names) for path in sorted((where / name).glob("*.parquet"))])
            for name in ("killed", "whole")
        ]
        engine = TransformersEngine(SPEC)
        differ = 0
        for row, given in zip(tables[1].to_pylist(), Input(data, COLUMNS).read((0, 0), 0), strict=True):
            asked = given[0]
            inputs = prompt_inputs(engine.processor, read_picture(asked.picture), asked.question, engine.model)
            engine.pruned.query = asked.question
            (text,) = generate_texts(engine.model, engine.processor, inputs, SPEC.max_new_tokens)
            counts = (row["tokens_before"], row["tokens_after"])
            differ += (text, engine.pruned.before, engine.pruned.after) != (row["answer"], *counts)
        same = tables[0].equals(tables[1])
    return {"rows": tables[1].num_rows, "kills": killed, "same_output": same, "rows_unlike_ask": differ}


def job(data: str, out: str) -> None:
    """One job of `soak`."""
    run_batch(Input(data, COLUMNS), out, SPEC, SPEC.job(), shard_rows=50)


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("throughput", "driver", "soak", "job"))
    parser.add_argument("--pictures", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--data")
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.part == "job":
        job(given.data, given.out)
    elif given.part == "driver":
        print(json.dumps(driver(given.rows or 1_000_000)))
    elif given.part == "soak":
        print(json.dumps(soak(given.rows or 2000, given.kills)))
    else:
        found = throughput(given.pictures, given.batch_rows)
        print("| way | rows/s | against the loop with all tokens | pictures encoded |\n|---|---|---|---|")
        for name, rate, encoded in found:
            print(f"| {name} | {rate:.2f} | {rate / found[0][1]:.2f} | {encoded} |")


if __name__ == "__main__":
    main()
