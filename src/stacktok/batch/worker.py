"""Answering rows: windows of bounded size, questions on one picture together, errors in their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stacktok.batch.rows import Row
from stacktok.batch.shards import Totals
from stacktok.models.pictures import read_picture
from stacktok.runtime.asking import Answered

BATCH_ROWS = 16
"""Default number of questions per call of the engine."""

WINDOW_ROWS = 1024
"""Rows within which questions on one picture are found."""

_LONGEST_ERROR = 500


class Engine(Protocol):
    """A model under a method."""

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        """Answers to questions, each with the index of its picture."""

    def counts(self) -> tuple[int, int]:
        """Pictures encoded, and pictures prepared for the method, since the start."""


Build = Callable[[], Engine]
"""Makes an engine; travels to workers."""


@dataclass
class Answers:
    """Columns of the output, and counts."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)

    def sorted(self) -> dict[str, list[Any]]:
        """The columns in the order of the input."""
        order = sorted(range(len(self.columns.get("row", ()))), key=self.columns.get("row", []).__getitem__)
        return {name: [values[index] for index in order] for name, values in self.columns.items()}

    def add(self, row: Row, answer: Answered | None, error: str | None, seconds: float) -> None:
        """Add one row, with its answer or an error."""
        values = {
            "row": row.number,
            "id": row.id,
            "answer": None if answer is None else answer.text,
            "error": error,
            "tokens_before": None if answer is None else answer.before,
            "tokens_after": None if answer is None else answer.after,
            "seconds": seconds,
            "selection_seconds": None if answer is None else answer.seconds,
        }
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)
        self.totals.rows += 1
        self.totals.errors += error is not None
        self.totals.seconds += seconds
        if answer is not None:
            self.totals.tokens_before += answer.before
            self.totals.tokens_after += answer.after


class Worker:
    """Answers rows with one engine.

    Parameters
    ----------
    engine
        The engine.
    batch_rows
        Questions per call of it.
    window_bytes
        Bytes of pictures and questions that are held at a time; one row may be larger.
    grouped
        Ask the questions on one picture together; one by one in the order of the input otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batch_rows: int = BATCH_ROWS,
        window_bytes: int = 64 << 20,
        grouped: bool = True,
    ) -> None:
        if batch_rows < 1:
            raise ValueError(f"batch-rows={batch_rows} is less than 1; give a number such as {BATCH_ROWS}")
        self.engine, self.batch_rows, self.window_bytes, self.grouped = engine, batch_rows, window_bytes, grouped

    def answer(self, rows: Iterable[Row], tick: Callable[[Totals], None] = lambda totals: None) -> Answers:
        """Answer rows.

        Parameters
        ----------
        rows
            Read as they are needed.
        tick
            Callback, called with the counts after every call of the engine.
        """
        answers = Answers()
        for window in windows(rows, self.window_bytes):
            before = self.engine.counts()
            groups = group(window) if self.grouped else [[row] for row in window if row.error is None]
            for row in window:
                if row.error is not None:
                    answers.add(row, None, row.error, 0.0)
            answers.totals.pictures += len(groups)
            for batch in batches(groups, self.batch_rows):
                self._batch(batch, answers)
                tick(answers.totals)
            encoded, prepared = self.engine.counts()
            answers.totals.encoded += encoded - before[0]
            answers.totals.prepared += prepared - before[1]
        return answers

    def _batch(self, batch: list[list[Row]], answers: Answers) -> None:
        """Ask one batch; a picture that cannot be read is an error in the rows that show it."""
        begin = time.perf_counter()
        pictures: list[Any] = []
        asked: list[tuple[int, Row]] = []
        for rows in batch:
            try:
                pictures.append(read_picture(rows[0].picture))
            except Exception as error:  # a file may be broken in any way
                for row in rows:
                    answers.add(row, None, message(error), time.perf_counter() - begin)
                continue
            asked += [(len(pictures) - 1, row) for row in rows]
        if asked:
            found = self._ask(pictures, asked)
            seconds = (time.perf_counter() - begin) / len(asked)
            for (_, row), (answer, problem) in zip(asked, found, strict=True):
                answers.add(row, answer, problem, seconds)

    def _ask(
        self, pictures: Sequence[Any], asked: Sequence[tuple[int, Row]]
    ) -> list[tuple[Answered | None, str | None]]:
        """Answers or errors; a batch that fails is asked again in halves, down to the row that is the cause."""
        used = sorted({index for index, _ in asked})
        own = [pictures[index] for index in used]
        try:
            found = self.engine.answer(own, [(used.index(index), row.question) for index, row in asked])
            return [(answer, None) for answer in found]
        except Exception as error:  # one row's failure is that row's, whatever it is
            if len(asked) == 1:
                return [(None, message(error))]
        half = len(asked) // 2
        return [*self._ask(pictures, asked[:half]), *self._ask(pictures, asked[half:])]


def message(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (ValueError, OSError)):
        text = f"{type(error).__name__}: {text}"
    return text[:_LONGEST_ERROR]


def windows(rows: Iterable[Row], window_bytes: int, window_rows: int = WINDOW_ROWS) -> Iterator[list[Row]]:
    """Rows in lists of bounded size."""
    window: list[Row] = []
    size = 0
    for row in rows:
        if window and (size + row.size > window_bytes or len(window) == window_rows):
            yield window
            window, size = [], 0
        window.append(row)
        size += row.size
    if window:
        yield window


def group(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows without an error by picture, in the order in which the pictures come first."""
    found: dict[bytes | str, list[Row]] = {}
    for row in rows:
        if row.error is None:
            found.setdefault(row.key, []).append(row)
    return list(found.values())


def batches(groups: Sequence[list[Row]], rows: int) -> Iterator[list[list[Row]]]:
    """Groups in batches of at most so many rows; a group is cut only where it is larger than a batch."""
    batch: list[list[Row]] = []
    count = 0
    for whole in groups:
        for first in range(0, len(whole), rows):
            part = whole[first : first + rows]
            if count + len(part) > rows:
                yield batch
                batch, count = [], 0
            batch.append(part)
            count += len(part)
    if batch:
        yield batch
