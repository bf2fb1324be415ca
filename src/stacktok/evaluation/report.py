"""The paper's tables from our results, with the paper's own numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stacktok.core.budget import Budget
from stacktok.evaluation.formats import Table
from stacktok.evaluation.plan import FULL
from stacktok.evaluation.scalarization import BEST, Best, best_scalarization
from stacktok.evaluation.statistics import SMALLEST_BOOTSTRAP, SMALLEST_TEST, Comparison, Interval
from stacktok.evaluation.tables import (
    Measured,
    Row,
    Study,
    compare_average,
    differences,
    published,
)

MISSING = "–"

TUNED = "VisionZip"
"""The method of which the paper also lists a fine-tuned variant, marked ‡ and left out of rankings."""


def build_report(
    studies: Sequence[Study], baseline: str | None = None, *, paper: bool = True, dev: Sequence[Study] = ()
) -> list[Table]:
    """All tables of some studies: scores per model, across models, tuned scalarization, and paired comparisons.

    Parameters
    ----------
    studies
        What was run.
    baseline
        Method against which the others are tested; None leaves the comparisons out.
    paper
        Put the paper's published numbers beside ours.
    dev
        Results on other items, on which the coefficient of fixed scalarization is chosen.
    """
    tables = [score_table(study, model, paper=paper) for study in studies for model in study.models]
    cross = cross_model_table(studies, paper=paper)
    if cross is not None:
        tables.append(cross)
    for study in studies:
        for model in study.models:
            tables += scalarization_tables(study, model, dev, paper=paper)
    if baseline is not None:
        tables += [comparison_table(study, baseline) for study in studies]
    return tables


def score_table(study: Study, model: str, *, paper: bool = True) -> Table:
    """Table 1 for one model: method rows by budget, benchmark columns, relative retention."""
    names = study.names
    dagger = "" if study.plan.averaged is None else "†"
    rows: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for budget in _budgets(study, model):
        group = [row for row in study.rows if row.model == model and row.budget == budget]
        rows.append(("all tokens" if budget is None else f"budget {budget}",))
        first = len(rows)
        for row in group:
            cells = [_score(row.cells.get(name)) for name in names]
            rows.append((row.method, *cells, _average(row.average)))
        if budget is not None:
            bold |= _best(group, names, first)
        if paper:
            for row in group:
                printed = published(model, row.method, budget)
                if printed:
                    shown = [_number(printed.get(name)) for name in [*names, None]]
                    rows.append((f"{row.method} (paper)", *shown))
            printed = published(model, TUNED, budget, fine_tuned=True) if budget is not None else {}
            if printed:
                rows.append((f"{TUNED}‡ (paper)", *(_number(printed.get(name)) for name in [*names, None])))
    notes = [
        "Scores with 95 % bootstrap intervals over items (clusters of items where the benchmark has them); "
        f"Avg.{dagger} is the mean over {', '.join(study.columns)} of the score over that of all tokens, in %."
    ]
    notes.append("Bold: the highest value of a column at that budget; a tie is not marked.")
    bare = [row for row in study.rows if row.model == model and _without_interval(row)]
    if bare:
        notes.append(
            f"No interval is given for fewer than {SMALLEST_BOOTSTRAP} independent items (clusters), for items that "
            "all score the same, for scores that cannot be resampled, or where the unpruned score is 0 in a resample."
        )
    if study.missing:
        notes.append(f"{study.missing} cells of the plan have not been run.")
    return Table(
        f"{model} ({study.plan.name})",
        ("Method", *names, f"Avg.{dagger} %"),
        tuple(rows),
        frozenset(bold),
        tuple(notes),
    )


def cross_model_table(studies: Sequence[Study], *, paper: bool = True) -> Table | None:
    """Table 3: retention of every method on every model, its budgets as a / b / c; None for fewer than two models."""
    columns = [(study, model) for study in studies for model in study.models]
    if len(columns) < 2:
        return None
    methods = list(dict.fromkeys(row.method for study in studies for row in study.rows if row.method != FULL))
    header = [
        f"{model} {' / '.join(str(budget) for budget in _budgets(study, model) if budget is not None)}"
        for study, model in columns
    ]
    rows: list[tuple[str, ...]] = []
    for method in methods:
        ours, printed = [], []
        for study, model in columns:
            budgets = [budget for budget in _budgets(study, model) if budget is not None]
            found = [study.row(model, method, budget) for budget in budgets]
            ours.append(" / ".join(_short(row.average if row is not None else None) for row in found))
            printed.append(" / ".join(_number(published(model, method, budget).get(None)) for budget in budgets))
        rows.append((method, *ours))
        if paper and any(character.isdigit() for text in printed for character in text):
            rows.append((f"{method} (paper)", *printed))
    if paper:
        tuned = [
            " / ".join(
                _number(published(model, TUNED, budget, fine_tuned=True).get(None))
                for budget in _budgets(study, model)
                if budget is not None
            )
            for study, model in columns
        ]
        if any(character.isdigit() for text in tuned for character in text):
            rows.append((f"{TUNED}‡ (paper)", *tuned))
    return Table("Average retention over models, %", ("Method", *header), tuple(rows))


def scalarization_tables(study: Study, model: str, dev: Sequence[Study] = (), *, paper: bool = True) -> list[Table]:
    """Table A2: fixed scalarization with the best coefficient of every budget, against the reference-gated policy."""
    gated = [part.name for part in study.plan.methods if part.method == "stacktok" and not part.settings]
    return [_scalarization(study, model, best, gated, paper=paper) for best in best_scalarization(study, model, dev)]


def _scalarization(study: Study, model: str, best: Best, gated: Sequence[str], *, paper: bool) -> Table:
    budgets = [budget for budget in _budgets(study, model) if budget is not None and budget in best.chosen]
    shown = [best.chosen[budget] for budget in budgets]
    rows = [(BEST, *(f"{_average(row.average)}, alpha {alpha:g}" for alpha, row in shown))]
    for name in gated:
        own = [study.row(model, name, budget) for budget in budgets]
        compared = [
            None if row is None else compare_average(study, row, other)
            for row, (_, other) in zip(own, shown, strict=True)
        ]
        rows.append((name, *(_average(row.average if row else None) for row in own)))
        rows.append((f"{name} minus best", *map(_difference, compared)))
    if paper and not best.settings:
        for name in [BEST, *gated]:
            printed = [published(model, name, budget).get(None) for budget in budgets]
            if any(value is not None for value in printed):
                rows.append((f"{name} (paper)", *map(_number, printed)))
    where = f"on the results of {best.chosen_on}"
    if best.chosen_on is None:
        where = "on the very results shown, which favours it: neither interval nor p-value accounts for that"
    listed = ", ".join(f"{alpha:g}" for alpha in best.alphas)
    notes = [f"Average retention in %. Alpha was chosen for every budget from {listed}, {where}."]
    if best.settings:
        notes.append(f"Parameters of fixed scalarization besides alpha: {best.settings}.")
    return Table(
        f"Fixed scalarization, {model} ({study.plan.name})",
        ("Variant", *(f"budget {budget}" for budget in budgets)),
        tuple(rows),
        notes=tuple(notes),
    )


def comparison_table(study: Study, baseline: str) -> Table:
    """Every method against a baseline: difference, interval, p-value, and whether it means anything."""
    found = differences(study, baseline)
    rows = tuple(
        (
            entry.model,
            str(entry.budget),
            entry.method,
            entry.benchmark or "Avg.",
            entry.comparison.difference.text("+"),
            _p_value(entry.corrected),
            _verdict(entry.comparison, entry.corrected),
        )
        for entry in found
    )
    return Table(
        f"Against {baseline} ({study.plan.name})",
        ("Model", "Budget", "Method", "Benchmark", "Difference [95 %]", "p (Holm)", "Reading"),
        rows,
        notes=(
            "Paired over the same items, or clusters of items where the benchmark has them. Scores that are means: "
            f"sign-flip permutation test, exact for few items, from {SMALLEST_TEST} items. Others and Avg.: bootstrap, "
            f"from {SMALLEST_BOOTSTRAP} items in every benchmark, as are intervals. P-values are corrected by "
            "Holm's rule for the number of budgets.",
        ),
    )


def _verdict(comparison: Comparison, p_value: float) -> str:
    if not comparison.decidable:
        return f"too few items ({comparison.units}; {comparison.smallest} needed)"
    if p_value >= 0.05:
        return "within noise"
    return "better" if comparison.difference.estimate > 0 else "worse"


def _p_value(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.4f}"


def _difference(comparison: Comparison | None) -> str:
    if comparison is None:
        return MISSING
    p_value = comparison.p_value
    return f"{comparison.difference.text('+')}, p {_p_value(p_value)}, {_verdict(comparison, p_value)}"


def _budgets(study: Study, model: str) -> list[Budget | None]:
    return list(dict.fromkeys(row.budget for row in study.rows if row.model == model))


def _best(group: Sequence[Row], names: Sequence[str], first: int) -> set[tuple[int, int]]:
    """Places of the highest value of every column as printed, where several methods have one and no two share it."""
    found = set()
    for column, name in enumerate([*names, None], start=1):
        values = {}
        for offset, row in enumerate(group):
            cell = row.cells.get(name) if name is not None else None
            value = (row.average.estimate if row.average else None) if name is None else cell.score if cell else None
            if value is not None:
                values[first + offset] = round(value, 2)
        highest = [row for row, value in values.items() if value == max(values.values())]
        if len(values) > 1 and len(highest) == 1:
            found.add((highest[0], column))
    return found


def _score(measured: Measured | None) -> str:
    if measured is None:
        return MISSING
    interval = measured.interval()
    return f"{measured.score:.2f}" if interval is None else str(interval)


def _average(interval: Interval | None) -> str:
    return MISSING if interval is None else str(interval)


def _without_interval(row: Row) -> bool:
    scores = any(cell.interval() is None for cell in row.cells.values())
    return scores or (row.method != FULL and row.average is not None and not row.average.known)


def _short(interval: Interval | None) -> str:
    return MISSING if interval is None else f"{interval.estimate:.2f}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"
