"""A data set in every format, and an engine that answers from the pixels and the question alone."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import run_batch
from stacktok.runtime.asking import Answered
from tests.tiny import picture

JOB = {"model": "stub"}
COLUMNS = Columns(question="question", id="name")


class Stub:
    """Counts what it is given; fails on a question that says so."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.encoded = 0

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        if any("fail" in question for _, question in rows):
            raise RuntimeError("the question\nfails")
        self.calls.append(len(rows))
        self.encoded += len(pictures)
        return [Answered(expected(pictures[index], question), 100, 10, 0.0) for index, question in rows]

    def counts(self) -> tuple[int, int]:
        return self.encoded, self.encoded


def expected(image: Any, question: str) -> str:
    return hashlib.sha256(image.tobytes() + question.encode()).hexdigest()[:12]


def png(seed: int) -> bytes:
    data = io.BytesIO()
    picture(24, 16, seed).save(data, "PNG")
    return data.getvalue()


def records(count: int, per_picture: int = 4) -> list[dict[str, Any]]:
    return [
        {"name": f"n{row}", "image": png(row // per_picture), "question": f'What is {row}, "then"?\n{row}'}
        for row in range(count)
    ]


def write(folder: Path, kind: str, rows: Sequence[dict[str, Any]], files: int = 1) -> str:
    """Write a data set; returns what ``--data`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(rows) // files)
    for file in range(files):
        _write(folder / f"data-{file}.{kind.partition('-')[0]}", kind, rows[file * each : (file + 1) * each])
    return str(folder / f"data-*.{kind.partition('-')[0]}")


def _write(path: Path, kind: str, rows: Sequence[dict[str, Any]]) -> None:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    elif kind == "parquet-struct":
        nested = [{**row, "image": {"bytes": row["image"], "path": None}} for row in rows]
        pq.write_table(pa.Table.from_pylist(nested), path, row_group_size=100)
    elif kind == "jsonl-paths":
        with path.open("w", encoding="utf-8") as stream:
            for row in rows:
                # One file per picture, as questions on one picture name the same.
                name = f"{hashlib.sha256(row['image']).hexdigest()[:8]}.png"
                (path.parent / name).write_bytes(row["image"])
                stream.write(json.dumps({**row, "image": name}) + "\n\n")
    elif kind == "csv-base64":
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "image": base64.b64encode(row["image"]).decode()} for row in rows)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for row in rows:
                fields = json.dumps({"question": row["question"]}).encode()
                for name, data in ((f"{row['name']}.json", fields), (f"{row['name']}.png", row["image"])):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


KINDS = ("parquet", "parquet-struct", "jsonl-paths", "csv-base64", "tar")


def output(folder: Path) -> list[dict[str, Any]]:
    """The rows of all shards but their times, in the order of shards."""
    found = []
    for path in sorted(folder.glob("*.parquet")):
        found += pq.read_table(path).drop_columns(["seconds", "selection_seconds"]).to_pylist()
    return found


def run(data: str, out: str | Path, **options: Any) -> dict[str, Any]:
    return run_batch(Input(data, COLUMNS), out, Stub, JOB, **{"shard_rows": 10, "batch_rows": 4, **options})


def run_and_tell(data: str, out: str, ticks: Any) -> None:
    """A job in a process of its own, which sends a word on every change."""
    run(data, out, report=lambda progress: ticks.send(progress.totals.rows))
    ticks.send(None)
