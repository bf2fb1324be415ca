"""From result files to the numbers of a table: scores, retention, intervals and paired tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stacktok.core.budget import Budget
from stacktok.evaluation.cells import Results
from stacktok.evaluation.paper import PublishedAverage, published_ablations, published_cross_model, published_rows
from stacktok.evaluation.plan import FULL, Plan
from stacktok.evaluation.retention import retention
from stacktok.evaluation.statistics import Comparison, Interval, paired_comparison

RESAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of one cell.

    Attributes
    ----------
    score
        In the benchmark's unit.
    items
        Score of every item, (N,), in the unit of the score's mean; None where the score is no mean over items.
    groups
        Cluster of every item, or None.
    replicates
        Bootstrap replicates of a score that is no mean over items, or None.
    tokens
        Mean of the realised visual tokens.
    """

    score: float
    items: Floats | None
    groups: tuple[Any, ...] | None
    replicates: Floats | None
    tokens: float

    @classmethod
    def from_result(cls, result: dict[str, Any]) -> Measured:
        """The result of a file."""
        rows, scale = result["items"], result["settings"]["task"]["scale"]
        values = [row["score"] for row in rows]
        groups = [row["group"] for row in rows]
        replicates = None if result["replicates"] is None else np.array(result["replicates"])
        mean = replicates is None and None not in values
        items = scale * np.array(values, dtype=np.float64) if mean else None
        if items is not None and not np.isclose(items.mean(), result["score"], rtol=1e-9, atol=1e-9):
            items = None
        return cls(
            result["score"],
            items,
            None if None in groups else tuple(groups),
            replicates,
            float(np.mean([row["tokens"] for row in rows])),
        )

    def resampled(self) -> Floats | None:
        """Bootstrap replicates whose draws depend on the items alone, so that those of two methods are paired."""
        if self.items is None:
            return self.replicates
        labels = np.arange(len(self.items)) if self.groups is None else np.unique(self.groups, return_inverse=True)[1]
        sums, sizes = np.bincount(labels, weights=self.items), np.bincount(labels).astype(np.float64)
        rng = np.random.default_rng(0)
        means = np.empty(RESAMPLES)
        for start in range(0, RESAMPLES, 50):
            drawn = rng.integers(len(sums), size=(min(50, RESAMPLES - start), len(sums)))
            means[start : start + 50] = sums[drawn].sum(1) / sizes[drawn].sum(1)
        return means

    def interval(self) -> Interval | None:
        """The score with its 95 % interval; None where it cannot be had."""
        return _interval(self.score, self.resampled())


@dataclass(frozen=True, eq=False)
class Row:
    """One method at one budget on one model.

    Attributes
    ----------
    model, method, budget
        Names as in the plan; the budget is None for the unpruned model.
    cells
        Results by benchmark; those not run are absent.
    average
        Relative retention in percent with its interval, or None while a benchmark is missing; without an interval
        (low = high = NaN) where some score has none.
    """

    model: str
    method: str
    budget: Budget | None
    cells: dict[str, Measured]
    average: Interval | None


@dataclass(frozen=True, eq=False)
class Study:
    """A plan's rows, model by model, the unpruned one first."""

    plan: Plan
    rows: tuple[Row, ...]
    missing: int

    def row(self, model: str, method: str, budget: Budget | None) -> Row | None:
        """A row by its names."""
        for row in self.rows:
            if (row.model, row.method, row.budget) == (model, method, budget):
                return row
        return None


def read_study(results: Results) -> Study:
    """The rows of a plan's results, with what is missing left out."""
    plan = results.plan()
    found: dict[tuple[str, str, Budget | None], dict[str, Measured]] = {}
    for result in results.read():
        settings = result["settings"]
        key = (settings["model"], settings["label"], settings["budget"])
        found.setdefault(key, {})[settings["task"]["name"]] = Measured.from_result(result)
    rows = []
    for (model, method, budget), cells in found.items():
        full = found.get((model, FULL, None), {})
        rows.append(Row(model, method, budget, cells, _average(cells, full, plan.columns)))
    return Study(plan, tuple(rows), len(results.missing()))


def _average(cells: dict[str, Measured], full: dict[str, Measured], columns: Sequence[str]) -> Interval | None:
    if any(name not in cells or name not in full or full[name].score <= 0 for name in columns):
        return None
    scores = {name: cells[name].score for name in columns}
    whole = {name: full[name].score for name in columns}
    estimate = retention(scores, whole, columns)
    ratios = [_ratio(cells[name], full[name]) for name in columns]
    return _interval(estimate, _mean(ratios)) or Interval(estimate, float("nan"), float("nan"))


def _ratio(mine: Measured, full: Measured) -> Floats | None:
    """Bootstrap replicates of a score's retention in percent."""
    first, second = mine.resampled(), full.resampled()
    if first is None or second is None or (second <= 0).any():
        return None
    size = min(len(first), len(second))
    ratio: Floats = 100 * first[:size] / second[:size]
    return ratio


def _mean(ratios: Sequence[Floats | None]) -> Floats | None:
    """Replicates of a mean over benchmarks, which are independent of each other."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    size = min(len(ratio) for ratio in known)
    mean: Floats = np.mean([ratio[:size] for ratio in known], axis=0)
    return mean


def _interval(estimate: float, replicates: Floats | None) -> Interval | None:
    if replicates is None:
        return None
    low, high = np.quantile(replicates, [0.025, 0.975])
    return Interval(estimate, float(low), float(high))


@dataclass(frozen=True, eq=False)
class Difference:
    """A method against a baseline at one model, budget and benchmark; None for benchmark is the average."""

    model: str
    budget: Budget
    method: str
    benchmark: str | None
    comparison: Comparison


def differences(study: Study, baseline: str) -> list[Difference]:
    """Every method against a baseline, benchmark by benchmark, over the items that both answered.

    Scores that are means over items get a sign-flip test, others the bootstrap's two-sided tail.
    """
    names = {row.method for row in study.rows}
    if baseline not in names:
        raise ValueError(f"baseline {baseline!r} is not among the results; there are {', '.join(sorted(names))}")
    found = []
    for row in study.rows:
        other = study.row(row.model, baseline, None if baseline == FULL else row.budget)
        if row.budget is None or row.method == baseline or other is None:
            continue
        for name in (task.name for task in study.plan.tasks):
            if name in row.cells and name in other.cells:
                compared = _compare(row.cells[name], other.cells[name])
                if compared is not None:
                    found.append(Difference(row.model, row.budget, row.method, name, compared))
        average = compare_average(study, row, other)
        if average is not None:
            found.append(Difference(row.model, row.budget, row.method, None, average))
    return found


def _compare(mine: Measured, its: Measured) -> Comparison | None:
    if mine.items is not None and its.items is not None and len(mine.items) == len(its.items):
        return paired_comparison(mine.items, its.items, groups=mine.groups)
    return _tail(mine.score - its.score, mine.resampled(), its.resampled())


def compare_average(study: Study, row: Row, other: Row) -> Comparison | None:
    """Difference of two rows' relative retention, paired item by item; None where one has no average or no interval."""
    full = study.row(row.model, FULL, None)
    columns = study.plan.columns
    if full is None or row.average is None or other.average is None:
        return None
    first = _mean([_ratio(row.cells[name], full.cells[name]) for name in columns])
    second = _mean([_ratio(other.cells[name], full.cells[name]) for name in columns])
    return _tail(row.average.estimate - other.average.estimate, first, second)


def _tail(difference: float, first: Floats | None, second: Floats | None) -> Comparison | None:
    if first is None or second is None:
        return None
    size = min(len(first), len(second))
    moved = first[:size] - second[:size]
    interval = _interval(difference, moved)
    if interval is None:
        return None
    if not moved.any():
        return Comparison(interval, 1.0)
    # Counting the observed sample keeps the p-value above zero.
    tail = min((moved <= 0).sum(), (moved >= 0).sum())
    return Comparison(interval, min(1.0, 2 * (int(tail) + 1) / (size + 1)))


def published(model: str, method: str, budget: Budget | None, *, fine_tuned: bool = False) -> dict[str | None, float]:
    """What the paper prints for a method: scores by benchmark, and its average under None; empty where it has none.

    Parameters
    ----------
    model, method, budget
        Names as in the plans; the budget is not looked at for the unpruned model.
    fine_tuned
        The fine-tuned variant of the method, which the paper lists and ranks nowhere.
    """
    for row in published_rows():
        there = (row.model, row.method) == (model, method) and (method == FULL or row.budget == str(budget))
        if there and row.fine_tuned == fine_tuned:
            scores: dict[str | None, float] = dict(row.scores.items())
            return scores | {None: row.average}
    averages: list[PublishedAverage] = [*published_cross_model(), *published_ablations()]
    for cell in averages:
        if cell.fine_tuned == fine_tuned and (cell.model, cell.method, cell.budget) == (model, method, str(budget)):
            return {None: cell.average}
    return {}
