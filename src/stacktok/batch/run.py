"""Running a job: shard after shard here, or over the workers of a Ray cluster; what is finished stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stacktok.batch.rows import Cursor, Input, Row
from stacktok.batch.shards import OWN, Entry, Output, Totals
from stacktok.batch.worker import BATCH_ROWS, Build, Worker
from stacktok.evaluation.cells import write_whole
from stacktok.evaluation.run import duration, one_run

SHARD_ROWS = 1000
"""Default number of rows per shard: what a kill can cost."""

MILLION = 1_000_000


class TooManyErrorsError(ValueError):
    """More rows failed than the caller allows."""


@dataclass
class Progress:
    """How far a job is.

    Attributes
    ----------
    totals
        Of all rows that are done.
    resumed
        Rows that were done before this run.
    share
        Share of the input that is done; that of ``resumed`` rows is ``resumed_share``.
    """

    totals: Totals = field(default_factory=Totals)
    resumed: int = 0
    share: float = 0.0
    resumed_share: float = 0.0
    _begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the start of this run."""
        return time.monotonic() - self._begin

    @property
    def rate(self) -> float:
        """Rows per second of this run."""
        return (self.totals.rows - self.resumed) / max(1e-9, self.seconds)

    def seconds_left(self) -> float | None:
        """Time left, by the share done so far; None before any."""
        done = self.share - self.resumed_share
        return None if done <= 0 else self.seconds / done * max(0.0, 1 - self.share)

    def __str__(self) -> str:
        left, totals = self.seconds_left(), self.totals
        eta = "" if left is None else f", about {duration(left)} left"
        saved = f", {100 * saved_share(totals):.1f}% of tokens saved" if totals.tokens_before else ""
        wrong = f", {totals.errors} errors" if totals.errors else ""
        return f"{totals.rows} rows, {self.rate:.1f} rows/s{saved}{wrong}{eta}"


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Task:
    """A shard to be answered: its number, its first row's number and place, and how many rows at most."""

    shard: int
    first: int
    begin: Cursor
    rows: int


def run_batch(
    source: Input,
    out: str | Path,
    build: Build,
    job: Mapping[str, Any],
    *,
    shard_rows: int = SHARD_ROWS,
    batch_rows: int = BATCH_ROWS,
    window_bytes: int = 64 << 20,
    grouped: bool = True,
    max_errors: int | None = None,
    ray: str | None = None,
    workers: tuple[int, int] = (1, 1),
    gpus: float = 0,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Answer the rows that have no answer yet, and return the summary.

    Parameters
    ----------
    source
        The input.
    out
        Folder of the output; with Ray one that all machines see.
    build
        Makes the engine, here or in every worker.
    job
        What decides the answers, as plain values; a folder that holds another job's output is refused.
    shard_rows
        Rows per shard.
    batch_rows, window_bytes, grouped
        Of `Worker`.
    max_errors
        Rows with an error that end the job early; None for no end.
    ray
        Address of a Ray cluster ("local" starts one here); None runs here.
    workers, gpus
        On Ray, the least and the most workers, and the GPUs that one takes; a part of one is possible.
    report
        Callback, called as rows are done.
    """
    if shard_rows < 1:
        raise ValueError(f"shard-rows={shard_rows} is less than 1; give a number such as {SHARD_ROWS}")
    if not 1 <= workers[0] <= workers[1]:
        raise ValueError(f"workers={workers[0]}:{workers[1]} is not a range from 1 on; give for example 1:8")
    how = {"batch_rows": batch_rows, "window_bytes": window_bytes, "grouped": grouped}
    with one_run(Path(out) / OWN):
        output = Output(out, numbered=source.numbered)
        whole = {**job, "data": source.digest(), "columns": asdict(source.columns), "shard_rows": shard_rows}
        done = output.start(whole)
        progress = Progress()
        for entry in done.values():
            progress.totals.add(entry.totals)
            share = source.share(entry.end) - source.share(entry.begin)
            progress.resumed_share += share
        progress.share, progress.resumed = progress.resumed_share, progress.totals.rows
        checked = _checked(progress, max_errors)
        checked()
        report(progress)
        if ray is None:
            finished = _here(source, output, build, how, shard_rows, done, progress, report, checked)
        else:
            from stacktok.batch.scale import over_ray

            tasks = list(pending(source, done, shard_rows))
            finished = over_ray(tasks, source, output, build, how, address=ray, workers=workers, gpus=gpus)
        shards = len(done)
        for entry in finished:
            shards += 1
            if ray is not None:
                output.note(entry)
                progress.totals.add(entry.totals)
                progress.share += source.share(entry.end) - source.share(entry.begin)
                checked()
            report(progress)
        summary = summarize(progress, shards)
        write_whole(output.own / "summary.json", summary)
        return summary


def _checked(progress: Progress, max_errors: int | None) -> Callable[[], None]:
    def check() -> None:
        errors = progress.totals.errors
        if max_errors is not None and errors > max_errors:
            raise TooManyErrorsError(
                f"{errors} of {progress.totals.rows} rows have an error, more than max-errors={max_errors}; finished "
                "shards are intact: look at their column error, and start again with a larger number to go on"
            )

    return check


def _here(
    source: Input,
    output: Output,
    build: Build,
    how: Mapping[str, Any],
    shard_rows: int,
    done: Mapping[int, Entry],
    progress: Progress,
    report: Report,
    check: Callable[[], None],
) -> Iterator[Entry]:
    """Answer and commit the missing shards in this process."""
    worker: Worker | None = None
    shard, cursor, number = 0, (0, 0), 0
    while True:
        entry = done.get(shard)
        if entry is None:
            base = Totals(**asdict(progress.totals))

            def tick(totals: Totals, base: Totals = base) -> None:
                progress.totals = Totals(**asdict(base))
                progress.totals.add(totals)
                check()
                report(progress)

            # The model is loaded only where something is left to do.
            worker = worker or Worker(build(), **how)
            task = Task(shard, number, cursor, shard_rows)
            entry, columns = answer_shard(worker, source, task, tick)
            if not entry.totals.rows:
                return
            tick(entry.totals)
            output.commit(entry, columns)
            progress.share += source.share(entry.end) - source.share(entry.begin)
            yield entry
        shard, cursor, number = shard + 1, entry.end, entry.first + entry.totals.rows
        if entry.totals.rows < shard_rows:
            return


def answer_shard(
    worker: Worker, source: Input, task: Task, tick: Callable[[Totals], None] = lambda totals: None
) -> tuple[Entry, dict[str, list[Any]]]:
    """Answer the rows of a shard."""
    end = task.begin

    def rows() -> Iterator[Row]:
        nonlocal end
        for row, end in source.read(task.begin, task.first, task.rows):  # noqa: B007 - the last place is the shard's end
            yield row

    answers = worker.answer(rows(), tick)
    return Entry(task.shard, task.first, task.begin, end, answers.totals), answers.sorted()


def pending(source: Input, done: Mapping[int, Entry], shard_rows: int) -> Iterator[Task]:
    """Shards that are not finished; only as much of the input is read as tells where they begin."""
    shard, cursor, number = 0, (0, 0), 0
    while True:
        entry = done.get(shard)
        if entry is not None:
            rows, after = entry.totals.rows, entry.end
        else:
            after, rows = source.skip(cursor, shard_rows)
            if rows:
                yield Task(shard, number, cursor, rows)
        if rows < shard_rows:
            return
        shard, cursor, number = shard + 1, after, number + rows


def summarize(progress: Progress, shards: int) -> dict[str, Any]:
    """The summary of a job: counts over all rows, times of this run."""
    totals = progress.totals
    return {
        **{name: value for name, value in asdict(totals).items() if name != "seconds"},
        "resumed_rows": progress.resumed,
        "shards": shards,
        "tokens_saved": round(saved_share(totals), 4),
        "answering_seconds": round(totals.seconds, 3),
        "seconds": round(progress.seconds, 3),
        "rows_per_second": round(progress.rate, 3),
    }


def saved_share(totals: Totals) -> float:
    """The share of tokens that pruning saved."""
    return 1 - totals.tokens_after / totals.tokens_before if totals.tokens_before else 0.0


def estimate(
    source: Input, build: Build, *, rows: int, price: float | None = None, batch_rows: int = BATCH_ROWS
) -> dict[str, Any]:
    """Measure the rate on the first rows, and say what all of them and a million would take.

    Parameters
    ----------
    source, build
        The input, and what makes the engine.
    rows
        Rows to answer; a first batch before them, which pays for loading and compiling, is not counted.
    price
        Of an hour of this machine; None leaves costs out.
    batch_rows
        As in `run_batch`.
    """
    worker = Worker(build(), batch_rows=batch_rows)
    worker.answer(row for row, _ in source.read((0, 0), 0, batch_rows))
    begin, end = time.perf_counter(), (0, 0)
    measured: list[Row] = []
    for row, end in source.read((0, 0), 0, rows):  # noqa: B007 - the last place says how much was read
        measured.append(row)
    totals = worker.answer(iter(measured)).totals
    rate = totals.rows / (time.perf_counter() - begin)
    count = source.count()
    if count is None:
        count = round(totals.rows / max(1e-12, source.share(end)))
    found: dict[str, Any] = {
        "measured_rows": totals.rows,
        "errors": totals.errors,
        "rows_per_second": round(rate, 3),
        "tokens_saved": round(saved_share(totals), 4),
        "rows": count,
        "hours": round(count / rate / 3600, 4),
        "hours_per_million": round(MILLION / rate / 3600, 4),
    }
    if price is not None:
        found |= {"cost": round(price * count / rate / 3600, 4)}
        found |= {"cost_per_million": round(price * MILLION / rate / 3600, 4)}
    return found
