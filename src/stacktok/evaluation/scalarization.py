"""Fixed scalarization with the best coefficient of every budget (Table A2), from the runs of its coefficients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stacktok.core.budget import Budget
from stacktok.evaluation.cells import build_method
from stacktok.evaluation.plan import Plan
from stacktok.evaluation.tables import Row, Study
from stacktok.methods.stacktok import StackTok

BEST = "best fixed scalarization"
"""Name of the row, under which the paper's numbers are found too."""


@dataclass(frozen=True, eq=False)
class Best:
    """Fixed scalarization on one model, tuned.

    Attributes
    ----------
    settings
        Parameters besides alpha, as text; empty for the defaults.
    alphas
        Coefficients among which was chosen, ascending.
    chosen
        Per budget the coefficient and the row of its run; budgets at which some coefficient has no average yet are
        absent.
    chosen_on
        Name of the results on which the coefficients were chosen; None for the very results of the rows.
    """

    settings: str
    alphas: tuple[float, ...]
    chosen: Mapping[Budget, tuple[float, Row]]
    chosen_on: str | None


def scalarized(plan: Plan) -> dict[str, dict[float, str]]:
    """The plan's runs of fixed scalarization: parameters besides alpha as text, to alpha, to the method's name."""
    found: dict[str, dict[float, str]] = {}
    for part in plan.methods:
        method = build_method(part, None)
        if isinstance(method, StackTok) and method.criterion == "scalarized":
            rest = {key: value for key, value in part.settings.items() if key not in ("alpha", "criterion")}
            text = ", ".join(f"{key} {value}" for key, value in sorted(rest.items()))
            found.setdefault(text, {})[float(method.alpha)] = part.name
    return {text: dict(sorted(names.items())) for text, names in found.items() if len(names) > 1}


def best_scalarization(study: Study, model: str, dev: Sequence[Study] = ()) -> list[Best]:
    """The best coefficient of every budget, for each set of parameters that was run with several coefficients.

    Parameters
    ----------
    study
        Results that are shown.
    model
        A model of theirs.
    dev
        Results on other items, on which the coefficients are chosen; those shown if none are given. Equal averages go
        to the smallest coefficient.
    """
    found = []
    for settings, names in scalarized(study.plan).items():
        rows = [row for row in study.rows if row.model == model and row.method in names.values()]
        if not rows:
            continue
        judge, labels = _judge(dev, model, settings, names) if dev else (study, names)
        chosen: dict[Budget, tuple[float, Row]] = {}
        for budget in dict.fromkeys(row.budget for row in rows):
            judged = {alpha: judge.row(model, labels[alpha], budget) for alpha in names}
            averages = {alpha: row.average.estimate for alpha, row in judged.items() if row and row.average}
            if budget is None or len(averages) < len(names):
                continue
            alpha = max(averages, key=lambda alpha: averages[alpha])
            own = study.row(model, names[alpha], budget)
            if own is not None:
                chosen[budget] = alpha, own
        found.append(Best(settings, tuple(names), chosen, judge.plan.name if dev else None))
    return found


def _judge(
    dev: Sequence[Study], model: str, settings: str, names: Mapping[float, str]
) -> tuple[Study, Mapping[float, str]]:
    for study in dev:
        labels = scalarized(study.plan).get(settings, {})
        if set(names) <= set(labels) and any(row.model == model for row in study.rows):
            return study, labels
    listed = ", ".join(f"{alpha:g}" for alpha in names)
    raise ValueError(
        f"dev holds no runs of fixed scalarization on {model!r} with alpha {listed}; give results that hold them"
    )
