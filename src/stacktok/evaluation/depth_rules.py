"""Rules for the relevance depth from the budget and the query, tried on runs of fixed depths."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from stacktok.evaluation.formats import Table
from stacktok.evaluation.plan import FULL
from stacktok.evaluation.retention import retention
from stacktok.evaluation.tables import Study

Rule = Callable[[int, int, float], float]
"""Budget, rows of the query and strictness, to a depth."""

MEASURED = (1, 2, 4, 8, 16)


def rules() -> dict[str, Rule]:
    """The rules that were tried, by name."""
    found = {str(r): _constant(r) for r in MEASURED} | {"unlimited": _constant(math.inf)}
    for share in (1, 2, 3, 4):
        found[f"ceil(k / {share} m)"] = _share(share)
    for top in (4, 8):
        found[f"ceil(k / 2 m), at most {top}"] = _share(2, top)
    for last in (8, 16, 32, 64):
        for depth in (8, 4):
            found[f"{depth} up to {last} tokens, else 1"] = _small(last, depth)
    found["ceil(entropy k / m)"] = lambda k, m, h: math.ceil(h * k / max(m, 1))
    found["ceil((1 - entropy) k / m)"] = lambda k, m, h: math.ceil((1 - h) * k / max(m, 1))
    return found


def _constant(depth: float) -> Rule:
    return lambda k, m, h: depth


def _share(rows: int, top: float = math.inf) -> Rule:
    return lambda k, m, h: min(top, math.ceil(k / (rows * max(m, 1))))


def _small(last: int, depth: int) -> Rule:
    return lambda k, m, h: depth if k <= last else 1


def depth_rule_table(study: Study, model: str) -> Table:
    """Retention under every rule, best mean first; a depth that was not run counts as the next smaller that was."""
    task = study.plan.tasks[0].name
    names = {1: "StackTok", math.inf: "StackTok, depth unlimited"} | {r: f"StackTok, depth {r}" for r in MEASURED[1:]}
    budgets = [row.budget for row in study.rows if (row.model, row.method) == (model, "StackTok")]
    cells = {(row.method, row.budget): row.cells[task] for row in study.rows if row.model == model}
    family = np.array(cells[FULL, None].columns["family"])

    def scores(items: np.ndarray) -> dict[str, float]:
        return {name: float(items[family == name].mean()) for name in study.names}

    full = scores(np.array(cells[FULL, None].items))
    rows = []
    for name, rule in rules().items():
        found = []
        for k in budgets:
            columns = cells["StackTok", k].columns
            items = []
            for item, (m, h) in enumerate(zip(columns["query_rows"], columns["strictness"], strict=True)):
                depth = rule(int(str(k)), m, h)
                below = max(r for r in (*MEASURED, math.inf) if r <= max(1, depth))
                items.append(cells[names[below], k].columns["score"][item])
            found.append(round(retention(scores(100 * np.array(items)), full, study.names), 1))
        rows.append((name, *(f"{value:.1f}" for value in found), f"{np.mean(found):.2f}"))
    rows.sort(key=lambda row: -float(row[-1]))
    return Table("", ("rule for r, retention on dev, %", *map(str, budgets), "mean"), tuple(rows))
