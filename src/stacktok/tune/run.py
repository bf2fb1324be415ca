"""One search from data to files: race, held-out test, timing; started again, it goes on where it was."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stacktok.evaluation.cells import digest_of, write_whole
from stacktok.evaluation.run import duration, one_run
from stacktok.evaluation.scenes_loop import Columns, Journal
from stacktok.evaluation.statistics import Interval, mean_interval
from stacktok.tune.data import Sample
from stacktok.tune.engine import Engine, Setting
from stacktok.tune.race import FINALISTS, Floats, Measured, Verdict, cheapest, race, rungs, split_pictures, verdicts

CHUNK = 16
"""Samples that are measured between two entries of the journal, about: pictures stay whole."""

TIMED = 5
"""Held-out samples on which finalists are timed."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Full:
    key: str = "full"


@dataclass
class Found:
    """The result of a search.

    Attributes
    ----------
    quality
        "accuracy" and the like, or "unchanged answers" where samples have no labels.
    full
        Quality of the full model on the held-out samples.
    rows
        Finalists on the held-out samples, in the order of their tests.
    best
        The recommendation; None where no setting keeps the promise.
    seconds
        Median end-to-end time of the full model (key "full") and of finalists, by key.
    searched
        Kept share and tokens per layer of every setting, on the samples of the search that it was measured on.
    held_out
        Numbers of the held-out samples.
    columns
        Outcomes on the held-out samples, by key.
    """

    quality: str
    full: Interval
    rows: list[Verdict[Setting]]
    best: Verdict[Setting] | None
    seconds: dict[str, float]
    searched: dict[str, tuple[int, float, float]]
    held_out: list[int]
    columns: dict[str, Columns] = field(default_factory=dict)

    def speed_up(self, key: str) -> float:
        """Of end-to-end time, against the full model."""
        return self.seconds["full"] / self.seconds[key]


class Search:
    """A search over settings.

    Parameters
    ----------
    engine
        The model.
    samples
        The data.
    settings
        What is searched; those of one method stand together.
    folder
        Where the journal and all results go.
    identity
        What else decides outcomes, such as the checkpoint: a folder with another one is refused.
    keep
        Share of the full model's quality that is promised.
    report
        Called with a line on every change.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Sequence[Sample],
        settings: Sequence[Setting],
        folder: Path,
        identity: Mapping[str, Any],
        *,
        keep: float = 0.98,
        quality: str = "unchanged answers",
        seed: int = 0,
        report: Report = lambda text: None,
    ) -> None:
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep} is not a share of the full model's quality; give one such as 0.98")
        self.engine, self.samples, self.settings, self.folder = engine, list(samples), list(settings), folder
        self.keep, self.quality, self.report = keep, quality, report
        self.groups = [sample.group for sample in samples]
        self.search, self.held_out = split_pictures(self.groups, seed)
        self._chunks = [*_chunks(self.search, self.groups), *_chunks(self.held_out, self.groups)]
        self._chunk_of = {n: c for c, chunk in enumerate(self._chunks) for n in chunk}
        self._identity = digest_of([dict(identity), seed, [[s.group, s.question, list(s.answers)] for s in samples]])
        self._unit: list[float] = []
        self._planned = 0
        self._done = 0

    def run(self) -> Found:
        """Search, test on held-out samples, and time the finalists."""
        with one_run(self.folder):
            self._check_folder()
            self.journal = Journal(self.folder / "journal.jsonl")
            self._planned = self._most(len(self.settings))
            self.report(self._beforehand())
            finalists = race(
                self.settings,
                self._measure,
                _Lazy(self),  # type: ignore[arg-type]
                self.groups,
                self.search,
                self.keep,
                rung_done=self._rung,
            )
            found = self._measure(finalists, self.held_out)
            full = self._quality_of_full(self.held_out)
            own = [self.groups[n] for n in self.held_out]
            rows = verdicts(finalists, found, full, own, self.keep)
            self.report("timing the finalists")
            seconds = self._time(finalists)
            result = Found(
                self.quality,
                mean_interval(full, groups=own),
                rows,
                cheapest(rows),
                seconds,
                self._searched(),
                self.held_out,
                {
                    "full": self._gather(_Full(), self.held_out),
                    **{setting.key: self._gather(setting, self.held_out) for setting in finalists},
                },
            )
            write_whole(self.folder / "tune.json", self._summary(result))
        return result

    def _beforehand(self) -> str:
        """How long a new search will take, from all settings on one sample."""
        sample = self.samples[self.search[0]]
        if self.journal.get(_Full(), self._chunk_of[sample.number]) is not None:
            return "going on where the journal ends"
        begin = time.monotonic()
        full = self.engine.full([sample])
        middle = time.monotonic()
        self.engine.measure(self.settings, [sample], full)
        each = (time.monotonic() - middle) / len(self.settings)
        answers = (middle - begin) * (len(self.samples) + TIMED * (1 + FINALISTS))
        most = duration(each * self._planned + answers)
        return f"{len(self.settings)} settings, {len(self.samples)} samples: at most about {most}"

    def _check_folder(self) -> None:
        path = self.folder / "run.json"
        known = json.loads(path.read_text(encoding="utf-8")).get("identity") if path.is_file() else None
        if known not in (None, self._identity):
            raise ValueError(f"{self.folder} holds a search on other data or another model; give another --out")
        write_whole(path, {"identity": self._identity, "keep": self.keep})

    def _most(self, left: int) -> int:
        """Samples times settings that a search measures at most."""
        total, before = 0, 0
        for size in rungs(len(self.search), 32):
            total += left * (size - before)
            before, left = size, max(FINALISTS, -(-left // 2))
        return total + FINALISTS * len(self.held_out)

    def _measure(self, settings: Sequence[Setting], numbers: Sequence[int]) -> dict[Setting, Measured]:
        """Outcomes of settings on samples; what the journal knows is not measured again."""
        for c in dict.fromkeys(self._chunk_of[n] for n in numbers):
            chunk = [self.samples[n] for n in self._chunks[c]]
            begin = time.monotonic()
            if self.journal.get(_Full(), c) is None:
                self.journal.add(c, {"full": self.engine.full(chunk)})
            todo = [setting for setting in settings if self.journal.get(setting, c) is None]
            if todo:
                self.journal.add(c, self.engine.measure(todo, chunk, self.journal.get(_Full(), c) or {}))
                self._unit.append((time.monotonic() - begin) / (len(todo) * len(chunk)))
            self._done += len(todo) * len(chunk)
            self.report(self._left(len(settings)))
        return {setting: self._measured(setting, numbers) for setting in settings}

    def _left(self, settings: int) -> str:
        per = statistics.fmean(self._unit) if self._unit else 0.0
        left = duration(max(0.0, per * (self._planned - self._done)))
        share = min(0.99, self._done / max(1, self._planned))
        return f"{100 * share:.0f} %, at most about {left} left; {settings} settings in the race"

    def _rung(self, size: int, left: Sequence[Setting]) -> None:
        before = [one for one in rungs(len(self.search), 32) if one > size]
        rest, count, last = 0, len(left), size
        for one in before:
            rest, last, count = rest + count * (one - last), one, max(FINALISTS, -(-count // 2))
        self._planned = self._done + rest + FINALISTS * len(self.held_out)
        self.report(f"{size} samples: {len(left)} settings left, the first {left[0]}")

    def _gather(self, setting: Any, numbers: Sequence[int]) -> Columns:
        columns: Columns = {}
        for n in numbers:
            c = self._chunk_of[n]
            known = self.journal.get(setting, c)
            if known is None:
                raise ValueError(f"{self.folder / 'journal.jsonl'} lost samples while it was used; start again")
            for name, values in known.items():
                columns.setdefault(name, []).append(values[self._chunks[c].index(n)])
        return columns

    def _measured(self, setting: Setting, numbers: Sequence[int]) -> Measured:
        columns = self._gather(setting, numbers)
        quality = columns["unchanged"] if self.engine.metric is None else columns["score"]
        return Measured(*(np.array(own, dtype=np.float64) for own in (quality, columns["log_prob"], columns["tokens"])))

    def _quality_of_full(self, numbers: Sequence[int]) -> Floats:
        if self.engine.metric is None:
            return np.ones(len(numbers))
        return np.array(self._gather(_Full(), numbers)["score"], dtype=np.float64)

    def _searched(self) -> dict[str, tuple[int, float, float]]:
        found = {}
        for setting in self.settings:
            known = [n for n in self.search if self.journal.get(setting, self._chunk_of[n]) is not None]
            if known:
                own, full = self._measured(setting, known), self._quality_of_full(known)
                share = float(own.quality.sum() / full.sum()) if full.sum() else float("nan")
                found[str(setting)] = (len(known), share, float(own.cost.mean()))
        return found

    def _time(self, finalists: Sequence[Setting]) -> dict[str, float]:
        """Median seconds of one answer from picture to last word, the full model and finalists in turn."""
        chosen = [self.samples[n] for n in self.held_out[:TIMED]]
        times: dict[str, list[float]] = {}
        for repeat in range(-1, len(chosen)):
            sample = chosen[max(0, repeat)]
            sample.open()
            for setting in (None, *finalists):
                self.engine.forget()
                begin = time.perf_counter()
                self.engine.answer(setting, sample)
                if repeat >= 0:
                    times.setdefault("full" if setting is None else setting.key, []).append(time.perf_counter() - begin)
        return {key: statistics.median(own) for key, own in times.items()}

    def _summary(self, found: Found) -> dict[str, Any]:
        return {
            "keep": self.keep,
            "quality": found.quality,
            "samples": len(self.samples),
            "pictures": len(set(self.groups)),
            "held_out": len(self.held_out),
            "full": _plain(found.full),
            "full_seconds": found.seconds["full"],
            "recommended": None if found.best is None else str(found.best.setting),
            "finalists": [
                {
                    "setting": str(row.setting),
                    "kept": _plain(row.kept),
                    "kept_at_least": round(row.at_least, 6),
                    "log_prob": _plain(row.log_prob),
                    "tokens": row.cost,
                    "tested": row.tested,
                    "passed": row.passed,
                    "seconds": found.seconds[row.setting.key],
                    "speed_up": found.speed_up(row.setting.key),
                }
                for row in found.rows
            ],
            "searched": {
                name: {"samples": count, "kept": None if share != share else share, "tokens": cost}
                for name, (count, share, cost) in found.searched.items()
            },
        }


class _Lazy:
    """Quality of the full model, known for samples that were measured."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def __getitem__(self, numbers: Sequence[int]) -> Floats:
        return self._search._quality_of_full(numbers)


def _chunks(numbers: Sequence[int], groups: Sequence[str]) -> list[list[int]]:
    """Consecutive samples, a picture's together."""
    found: list[list[int]] = []
    for n in numbers:
        if not found or (len(found[-1]) >= CHUNK and groups[found[-1][-1]] != groups[n]):
            found.append([])
        found[-1].append(n)
    return found


def _plain(interval: Interval) -> list[float | None]:
    values = (interval.estimate, interval.low, interval.high)
    return [None if value != value else round(value, 6) for value in values]
