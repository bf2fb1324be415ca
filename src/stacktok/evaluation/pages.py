"""Tables inside documents: a comment says which, and `stacktok report --into FILE` puts it there again.

    <!-- stacktok: retention study=embedded model="embedded LLaVA, kept positions" methods="main;MMTok" -->
    ...
    <!-- end -->

Studies go by the names of their plans, models by their names in reports, methods by name or by a tag of the plan.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stacktok.evaluation.depth_rules import depth_rule_table
from stacktok.evaluation.formats import Table, markdown_body
from stacktok.evaluation.plan import FULL
from stacktok.evaluation.report import MISSING, scalarization_tables
from stacktok.evaluation.statistics import Interval, holm
from stacktok.evaluation.tables import Measured, Row, Study, compare_average, compare_scores
from stacktok.scenes import FAMILIES

_BLOCK = re.compile(r"<!-- stacktok: (.*?) -->.*?<!-- end -->", re.DOTALL)


def fill(text: str, studies: Sequence[Study]) -> str:
    """A document with its tables made again.

    Parameters
    ----------
    text
        The document.
    studies
        Results, of which a block names one.
    """

    def replaced(match: re.Match[str]) -> str:
        try:
            kind, *words = shlex.split(match[1])
            options = dict(word.split("=", 1) for word in words)
            made = _make(kind, options, studies)
        except (ValueError, TypeError) as error:
            raise ValueError(f"block {match[1]!r} cannot be filled: {error}") from None
        inner = made if isinstance(made, str) else f"\n\n{markdown_body(made)}\n\n"
        return f"<!-- stacktok: {match[1]} -->{inner}<!-- end -->"

    return _BLOCK.sub(replaced, text)


def _make(kind: str, options: dict[str, str], studies: Sequence[Study]) -> Table | str:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of block; the kinds are {', '.join(KINDS)}")
    name, model = options.pop("study", ""), options.pop("model", None)
    study = next((study for study in studies if study.plan.name == name), None)
    if study is None:
        raise ValueError(
            f"no results of the plan {name!r} are given; there are {', '.join(s.plan.name for s in studies)}"
        )
    if model is None and kind in WIDE:
        model = ""
    elif model not in study.models:
        raise ValueError(f"model {model!r} is not in {name}; there are {'; '.join(study.models)}")
    chosen: dict[str, Any] = dict(options)
    if "methods" in options:
        chosen["methods"] = _methods(study, model, options["methods"].split(";"))
    return KINDS[kind](study, model, **chosen)


def _methods(study: Study, model: str, wanted: Sequence[str]) -> list[str]:
    """Methods by their names or tags, in the order of the plan's, those without results left out."""
    there = {row.method for row in study.rows if row.model == model or not model}
    found = []
    for word in wanted:
        own = [part.name for part in study.plan.methods if word == part.name or word in part.tags]
        if not own:
            raise ValueError(f"{word!r} is neither a method nor a tag of {study.plan.name}")
        found += [name for name in own if name in there and name not in found]
    return found


def accuracy_table(study: Study, model: str, methods: Sequence[str]) -> Table:
    """Score of the study's first task by budget."""
    return _by_budget(study, model, methods, "accuracy, %", lambda row: f"{_whole(study, row).score:.1f}")


def retention_table(study: Study, model: str, methods: Sequence[str]) -> Table:
    """Relative retention by budget, with intervals."""
    return _by_budget(
        study, model, methods, "retention, %", lambda row: MISSING if row.average is None else _short(row.average)
    )


def layer_table(study: Study, model: str, methods: Sequence[str]) -> Table:
    """Visual tokens per layer by budget."""

    def shown(row: Row) -> str:
        mean = _whole(study, row).mean("tokens_per_layer")
        return MISSING if mean is None else f"{mean:.0f}"

    return _by_budget(study, model, methods, "tokens per layer", shown)


def difference_table(study: Study, model: str, methods: Sequence[str], baseline: str) -> Table:
    """Relative retention minus that of a baseline; a star for p < 0.05, Holm-corrected over the budgets."""
    rows = []
    budgets = _budgets(study, model)
    for method in methods:
        if method == baseline:
            continue
        found = []
        for budget in budgets:
            mine, its = study.row(model, method, budget), study.row(model, baseline, budget)
            found.append(compare_average(study, mine, its) if mine and its else None)
        corrected = holm([float("nan") if one is None else one.p_value for one in found])
        rows.append(
            (
                method,
                *(
                    MISSING if one is None else _short(one.difference, "+") + (" *" if p < 0.05 else "")
                    for one, p in zip(found, corrected, strict=True)
                ),
            )
        )
    return Table("", (f"minus {baseline}, points", *map(str, budgets)), tuple(rows))


def leader_table(study: Study, model: str, methods: Sequence[str]) -> Table:
    """Budgets at which each method has the highest score, and those at which it is level with the highest.

    Level is a paired difference whose test has p >= 0.05, not corrected: so a method that is not named is behind.

    Parameters
    ----------
    study
        The results; the score is that of its first task.
    model
        A model; empty for all, each in a column.
    methods
        Among which the leader is looked for.
    """
    models = [model] if model else study.models
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {
        (method, name): ([], []) for method in methods for name in models
    }
    for name in models:
        for budget in _budgets(study, name):
            rows = [row for method in methods if (row := study.row(name, method, budget)) is not None]
            best = max(rows, key=lambda row: _whole(study, row).score, default=None)
            for row in rows:
                leads, level = found[row.method, name]
                compared = None if best is None else compare_scores(_whole(study, row), _whole(study, best))
                if row is best:
                    leads.append(str(budget))
                elif compared is None or not compared.p_value < 0.05:
                    level.append(str(budget))
    shown = []
    for method in methods:
        cells = []
        for name in models:
            leads, level = found[method, name]
            texts = ([f"**{', '.join(leads)}**"] if leads else []) + ([", ".join(level)] if level else [])
            cells.append("; ".join(texts) or MISSING)
        shown.append((method, *cells))
    return Table("", ("method", *models), tuple(shown))


def family_table(study: Study, model: str, methods: Sequence[str], budget: str) -> Table:
    """Score of every column at one budget, the unpruned model first."""
    rows = []
    for method in (FULL, *methods):
        row = study.row(model, method, None if method == FULL else int(budget))
        if row is not None:
            label = "all tokens" if method == FULL else method
            rows.append((label, *(f"{row.cells[name].score:.1f}" for name in study.names)))
    return Table("", (f"accuracy at {budget}, %", *study.names), tuple(rows))


def gate_table(study: Study, model: str, method: str, budget: str) -> Table:
    """How the gate behaved, by question family."""
    row = study.row(model, method, int(budget))
    if row is None or "strictness" not in (columns := _whole(study, row).columns):
        raise ValueError(f"{method} at {budget} has no record of the gate; give the method log: items in the plan")
    family = np.array(columns["family"])
    local = np.array([FAMILIES[name] for name in family])
    groups = [(name, family == name) for name in study.names]
    rows = []
    for name, own in [*groups, ("all local", local), ("all holistic", ~local)]:
        rows_, strictness, bound, picks = (
            np.array(columns[column], dtype=float)[own]
            for column in ("query_rows", "strictness", "bound", "relevance_picks")
        )
        spread = " / ".join(f"{value:.2f}" for value in np.quantile(strictness, [0.1, 0.5, 0.9]))
        rows.append((name, f"{rows_.mean():.1f}", spread, f"{100 * bound.mean():.1f} %", f"{picks.mean():.1f}"))
    header = (f"at {budget}", "query rows", "strictness 10/50/90 %", "steps with a deficit", "relevance picks")
    return Table("", header, tuple(rows))


def scalarization_table(study: Study, model: str) -> Table:
    """Fixed scalarization with the best coefficient of every budget."""
    (table,) = scalarization_tables(study, model, paper=False)
    return table


def number(study: Study, model: str, what: str) -> str:
    """A number inside a sentence: questions, scenes, or the unpruned accuracy."""
    row = study.row(model, FULL, None)
    if row is None:
        raise ValueError(f"the unpruned {model} has not been run")
    whole = _whole(study, row)
    found = {"questions": f"{len(whole.clusters):,}", "scenes": f"{whole.drawn:,}", "accuracy": f"{whole.score:.1f} %"}
    if what not in found:
        raise ValueError(f"what={what!r} is not a number; give {', '.join(found)}")
    return found[what]


KINDS: Mapping[str, Callable[..., Table | str]] = {
    "accuracy": accuracy_table,
    "retention": retention_table,
    "difference": difference_table,
    "families": family_table,
    "leaders": leader_table,
    "layers": layer_table,
    "gate": gate_table,
    "scalarization": scalarization_table,
    "depth-rules": depth_rule_table,
    "number": number,
}
"""Kinds of blocks."""

WIDE = ("leaders",)
"""Kinds that show all models where none is named."""


def _by_budget(study: Study, model: str, methods: Sequence[str], title: str, show: Callable[[Row], str]) -> Table:
    budgets = _budgets(study, model)
    rows = []
    for method in methods:
        found = [study.row(model, method, budget) for budget in budgets]
        rows.append((method, *(MISSING if row is None else show(row) for row in found)))
    return Table("", (title, *map(str, budgets)), tuple(rows))


def _budgets(study: Study, model: str) -> list[Any]:
    return list(dict.fromkeys(row.budget for row in study.rows if row.model == model and row.budget is not None))


def _whole(study: Study, row: Row) -> Measured:
    return row.cells[study.plan.tasks[0].name]


def _short(interval: Interval, sign: str = "") -> str:
    estimate, low, high = (f"{value:{sign}.1f}" for value in (interval.estimate, interval.low, interval.high))
    return f"{estimate} [{low}, {high}]" if interval.known else estimate
