"""From result files to the numbers of a table: scores, retention, intervals and paired tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stacktok.core.budget import Budget
from stacktok.evaluation.cells import Results
from stacktok.evaluation.paper import PublishedAverage, published_ablations, published_cross_model, published_rows
from stacktok.evaluation.plan import FULL, Plan
from stacktok.evaluation.retention import retention
from stacktok.evaluation.statistics import (
    SMALLEST_BOOTSTRAP,
    Comparison,
    Interval,
    holm,
    paired_comparison,
    percentile_interval,
    resampled_means,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of one cell, or of a part of its items.

    Attributes
    ----------
    score
        In the benchmark's unit.
    items
        Score of every item, (N,), in the unit of the score's mean; None where the score is not a mean over items.
    clusters
        Cluster of every item, (N,); an item that belongs to none is its own.
    drawn
        Clusters that are resampled together: those of the cell, also for a part of its items.
    replicates
        Bootstrap replicates, where they are not to be made from the items.
    columns
        Everything that is known of the items, by name; empty for a part.
    """

    score: float
    items: Floats | None
    clusters: NDArray[np.int64]
    drawn: int
    replicates: Floats | None
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def from_result(cls, result: Mapping[str, Any]) -> Measured:
        """The result of a file."""
        columns, scale = result["items"], result["settings"]["task"]["scale"]
        values, groups = columns["score"], columns.get("group", [None])
        clusters = np.arange(len(values)) if None in groups else np.unique(groups, return_inverse=True)[1]
        replicates = None if result["replicates"] is None else np.array(result["replicates"])
        mean = replicates is None and None not in values
        items = scale * np.array(values, dtype=np.float64) if mean else None
        if items is not None and not np.isclose(items.mean(), result["score"], rtol=1e-9, atol=1e-9):
            items = None
        return cls(result["score"], items, clusters, int(clusters.max()) + 1, replicates, columns)

    def parts(self, by: str) -> dict[str, Measured]:
        """The result by the values of a column, in the order in which they come."""
        if self.items is None:
            raise ValueError(f"by: {by} needs a score that is a mean over items; leave it out of the plan")
        names, labels = np.unique(self.columns[by], return_inverse=True)
        sums, sizes = np.zeros((2, self.drawn, len(names)))
        np.add.at(sums, (self.clusters, labels), self.items)
        np.add.at(sizes, (self.clusters, labels), 1)
        means = resampled_means(sums, sizes)
        found = {}
        for part in dict.fromkeys(labels.tolist()):
            own = labels == part
            mean = float(self.items[own].mean())
            found[str(names[part])] = Measured(
                mean, self.items[own], self.clusters[own], self.drawn, means[:, part], {}
            )
        return found

    @property
    def units(self) -> int:
        """Number of independent items, or clusters of items."""
        return len(np.unique(self.clusters))

    @cached_property
    def resampled(self) -> Floats | None:
        """Bootstrap replicates whose draws depend on the items alone, so that those of two methods are paired."""
        if self.replicates is not None or self.items is None:
            means = self.replicates
            return None if means is None or np.isnan(means).any() else means
        sums = np.bincount(self.clusters, weights=self.items, minlength=self.drawn)
        means = resampled_means(sums, np.bincount(self.clusters, minlength=self.drawn))
        return None if np.isnan(means).any() else means

    def interval(self) -> Interval | None:
        """The score with its 95 % interval; None where no interval is available."""
        return _interval(self.score, self.resampled, self.units)

    def mean(self, column: str) -> float | None:
        """Mean of a column; None where it is not known."""
        values = self.columns.get(column)
        return None if values is None or None in values else float(np.mean(values))


@dataclass(frozen=True, eq=False)
class Row:
    """One method at one budget on one model.

    Attributes
    ----------
    model
        The model, its position policy and condition where the plan has them, as tables name them.
    method, budget
        Names as in the plan; the budget is None for the unpruned model.
    cells
        Results by benchmark, and by column where a task is split by one; those not run are absent.
    average
        Relative retention in percent with its interval, or None while a benchmark is missing; without an interval
        (low = high = NaN) where some score has none, and for the unpruned model, to which it refers.
    """

    model: str
    method: str
    budget: Budget | None
    cells: dict[str, Measured]
    average: Interval | None


@dataclass(frozen=True, eq=False)
class Study:
    """A plan's rows, model by model, the unpruned one first.

    Attributes
    ----------
    plan
        The plan.
    names
        Benchmarks, in the order of the tables.
    rows
        What was measured.
    missing
        Number of cells that have not been run.
    """

    plan: Plan
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    missing: int

    @property
    def columns(self) -> tuple[str, ...]:
        """Benchmarks over which Avg. is taken."""
        return self.plan.averaged or self.names

    @property
    def models(self) -> list[str]:
        """Names of the models, with position policy and condition."""
        return list(dict.fromkeys(row.model for row in self.rows))

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
    full: dict[str, dict[str, Measured]] = {}
    below: dict[str, list[str]] = {}
    names: dict[str, None] = {}
    for result in results.read():
        settings, task = result["settings"], result["settings"]["task"]
        whole = Measured.from_result(result)
        parts = {} if task["by"] is None else whole.parts(task["by"])
        names |= dict.fromkeys(parts or [task["name"]])
        if settings["method"] is None:
            full.setdefault(settings["model"], {}).update({task["name"]: whole, **parts})
            below.setdefault(settings["model"], [])
            continue
        model = _label(settings)
        if model not in below.setdefault(settings["model"], []):
            below[settings["model"]].append(model)
        key = (model, settings["label"], settings["budget"])
        found.setdefault(key, {}).update({task["name"]: whole, **parts})
    columns = plan.averaged or tuple(names)
    rows = []
    for base, labels in below.items():
        whole_cells = full.get(base, {})
        for label in labels or [base]:
            if whole_cells:
                rows.append(Row(label, FULL, None, whole_cells, _average(whole_cells, whole_cells, columns)))
            rows += [
                Row(model, method, budget, cells, _average(cells, whole_cells, columns))
                for (model, method, budget), cells in found.items()
                if model == label
            ]
    return Study(plan, tuple(names), tuple(rows), len(results.missing()))


def _label(settings: Mapping[str, Any]) -> str:
    positions, condition = settings["positions"], settings["condition"]
    parts = [settings["model"], positions and f"{positions} positions", condition and condition["name"]]
    return ", ".join(part for part in parts if part)


def _average(cells: dict[str, Measured], full: dict[str, Measured], columns: Sequence[str]) -> Interval | None:
    if any(name not in cells or name not in full or full[name].score <= 0 for name in columns):
        return None
    scores = {name: cells[name].score for name in columns}
    whole = {name: full[name].score for name in columns}
    estimate = retention(scores, whole, columns)
    ratios = [_ratio(cells[name], full[name]) for name in columns]
    units = _fewest(cells, full, columns)
    return _interval(estimate, _mean(ratios), units) or Interval(estimate)


def _fewest(first: dict[str, Measured], second: dict[str, Measured], columns: Sequence[str]) -> int:
    """Units of the benchmark that has the fewest: the mean over benchmarks is no better known than that one."""
    return min(cells[name].units for cells in (first, second) for name in columns)


def _ratio(mine: Measured, full: Measured) -> Floats | None:
    """Bootstrap replicates of a score's retention in percent."""
    first, second = mine.resampled, full.resampled
    if first is None or second is None or (second <= 0).any():
        return None
    size = min(len(first), len(second))
    ratio: Floats = 100 * first[:size] / second[:size]
    return ratio


def _mean(ratios: Sequence[Floats | None]) -> Floats | None:
    """Replicates of a mean over benchmarks."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    size = min(len(ratio) for ratio in known)
    mean: Floats = np.mean([ratio[:size] for ratio in known], axis=0)
    return mean


def _interval(estimate: float, replicates: Floats | None, units: int) -> Interval | None:
    if replicates is None:
        return None
    interval = percentile_interval(estimate, replicates, units)
    return interval if interval.known else None


@dataclass(frozen=True, eq=False)
class Difference:
    """A method against a baseline at one model, budget and benchmark.

    Attributes
    ----------
    model, budget, method, benchmark
        What is compared; None for benchmark is the average.
    comparison
        The difference and its test.
    corrected
        P-value corrected by Holm's rule for the number of budgets.
    """

    model: str
    budget: Budget
    method: str
    benchmark: str | None
    comparison: Comparison
    corrected: float


def differences(study: Study, baseline: str) -> list[Difference]:
    """Every method against a baseline, benchmark by benchmark, over the items that both answered.

    Scores that are means over items get a sign-flip test, others the bootstrap's two-sided tail.
    """
    names = {row.method for row in study.rows}
    if baseline not in names:
        raise ValueError(f"baseline {baseline!r} is not among the results; there are {', '.join(sorted(names))}")
    found: dict[tuple[str, str, str | None], dict[Budget, Comparison]] = {}
    for row in study.rows:
        other = study.row(row.model, baseline, None if baseline == FULL else row.budget)
        if row.budget is None or row.method == baseline or other is None:
            continue
        compared: dict[str | None, Comparison | None] = {
            name: compare_scores(row.cells[name], other.cells[name])
            for name in study.names
            if name in row.cells and name in other.cells
        }
        compared[None] = compare_average(study, row, other)
        for name, comparison in compared.items():
            if comparison is not None:
                found.setdefault((row.model, row.method, name), {})[row.budget] = comparison
    listed = []
    for (model, method, benchmark), by_budget in found.items():
        corrected = holm([comparison.p_value for comparison in by_budget.values()])
        for (budget, comparison), p in zip(by_budget.items(), corrected, strict=True):
            listed.append(Difference(model, budget, method, benchmark, comparison, p))
    return listed


def compare_scores(mine: Measured, its: Measured) -> Comparison | None:
    """Difference of two results, paired item by item; None where they cannot be paired."""
    if mine.items is not None and its.items is not None and len(mine.items) == len(its.items):
        return paired_comparison(mine.items, its.items, groups=mine.clusters)
    return _tail(mine.score - its.score, mine.resampled, its.resampled, min(mine.units, its.units))


def compare_average(study: Study, row: Row, other: Row) -> Comparison | None:
    """Difference of two rows' relative retention, paired item by item; None where one has no average or no interval."""
    full = study.row(row.model, FULL, None)
    columns = study.columns
    if full is None or row.average is None or other.average is None:
        return None
    first = _mean([_ratio(row.cells[name], full.cells[name]) for name in columns])
    second = _mean([_ratio(other.cells[name], full.cells[name]) for name in columns])
    units = _fewest(row.cells, other.cells, columns)
    return _tail(row.average.estimate - other.average.estimate, first, second, units)


def _tail(difference: float, first: Floats | None, second: Floats | None, units: int) -> Comparison | None:
    """Two-sided tail of paired bootstrap replicates; without a p-value where there are too few units to resample."""
    if first is None or second is None:
        return None
    size = min(len(first), len(second))
    moved = first[:size] - second[:size]
    interval = percentile_interval(difference, moved, units)
    if units < SMALLEST_BOOTSTRAP:
        return Comparison(interval, math.nan, units, SMALLEST_BOOTSTRAP)
    # Counting the observed sample keeps the p-value above zero; without any movement both tails hold all replicates.
    tail = min((moved <= 0).sum(), (moved >= 0).sum())
    return Comparison(interval, min(1.0, 2 * (int(tail) + 1) / (size + 1)), units, SMALLEST_BOOTSTRAP)


def published(model: str, method: str, budget: Budget | None, *, fine_tuned: bool = False) -> dict[str | None, float]:
    """The paper's scores of a method by benchmark, and its average under None; empty where it has none.

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
