"""The paper's tables from our results, in Markdown, LaTeX and HTML, with the paper's own numbers beside ours."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from stacktok.core.budget import Budget
from stacktok.evaluation.plan import FULL
from stacktok.evaluation.scalarization import BEST, Best, best_scalarization
from stacktok.evaluation.statistics import Comparison, Interval
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


@dataclass(frozen=True)
class Table:
    """A table ready to be written.

    Attributes
    ----------
    title, header
        Above it.
    rows
        Texts, each row as long as the header; one text is a heading over the rows that follow.
    bold
        (row, column) of the best of a group.
    notes
        Below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: tuple[str, ...] = ()


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
    tables = [score_table(study, model.name, paper=paper) for study in studies for model in study.plan.models]
    cross = cross_model_table(studies, paper=paper)
    if cross is not None:
        tables.append(cross)
    for study in studies:
        for model in study.plan.models:
            tables += scalarization_tables(study, model.name, dev, paper=paper)
    if baseline is not None:
        tables += [comparison_table(study, baseline) for study in studies]
    return tables


def score_table(study: Study, model: str, *, paper: bool = True) -> Table:
    """Table 1 for one model: method rows by budget, benchmark columns, relative retention."""
    names = [task.name for task in study.plan.tasks]
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
        f"Avg.{dagger} is the mean over {', '.join(study.plan.columns)} of the score over that of all tokens, in %."
    ]
    if any(row.average is not None and math.isnan(row.average.low) for row in study.rows if row.model == model):
        notes.append(
            "An average without an interval contains a score that cannot be resampled, or one whose unpruned value "
            "is 0 in some resample (too few items)."
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
    columns = [(study, model.name) for study in studies for model in study.plan.models]
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
            _signed(entry.comparison.difference),
            f"{entry.comparison.p_value:.4f}",
            _verdict(entry.comparison),
        )
        for entry in found
    )
    return Table(
        f"Against {baseline} ({study.plan.name})",
        ("Model", "Budget", "Method", "Benchmark", "Difference [95 %]", "p", "Reading"),
        rows,
        notes=(
            "Paired over the same items. Scores that are means: sign-flip permutation test; others and Avg.: "
            "bootstrap. Not corrected for the number of comparisons.",
        ),
    )


def _verdict(comparison: Comparison) -> str:
    if comparison.p_value >= 0.05:
        return "within noise"
    return "better" if comparison.difference.estimate > 0 else "worse"


def _difference(comparison: Comparison | None) -> str:
    if comparison is None:
        return MISSING
    return f"{_signed(comparison.difference)}, p {comparison.p_value:.4f}, {_verdict(comparison)}"


def _budgets(study: Study, model: str) -> list[Budget | None]:
    return list(dict.fromkeys(row.budget for row in study.rows if row.model == model))


def _best(group: Sequence[Row], names: Sequence[str], first: int) -> set[tuple[int, int]]:
    """Places of the highest value of every column, where more than one method has one."""
    found = set()
    for column, name in enumerate([*names, None], start=1):
        values = {}
        for offset, row in enumerate(group):
            cell = row.cells.get(name) if name is not None else None
            value = (row.average.estimate if row.average else None) if name is None else cell.score if cell else None
            if value is not None:
                values[first + offset] = value
        if len(values) > 1:
            found |= {(row, column) for row, value in values.items() if value == max(values.values())}
    return found


def _score(measured: Measured | None) -> str:
    if measured is None:
        return MISSING
    interval = measured.interval()
    return f"{measured.score:.2f}" if interval is None else str(interval)


def _average(interval: Interval | None) -> str:
    if interval is None:
        return MISSING
    return f"{interval.estimate:.2f}" if math.isnan(interval.low) else str(interval)


def _short(interval: Interval | None) -> str:
    return MISSING if interval is None else f"{interval.estimate:.2f}"


def _signed(interval: Interval) -> str:
    return f"{interval.estimate:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def to_markdown(tables: Sequence[Table]) -> str:
    """The tables as GitHub-flavoured Markdown."""
    parts = []
    for table in tables:
        lines = [f"## {table.title}", "", _pipes(table.header), _pipes(["---"] * len(table.header))]
        for number, row in enumerate(table.rows):
            if len(row) == 1:
                lines.append(_pipes([f"*{row[0]}*", *[""] * (len(table.header) - 1)]))
                continue
            lines.append(_pipes([f"**{t}**" if (number, c) in table.bold else t for c, t in enumerate(row)]))
        parts.append("\n".join([*lines, *(f"\n{note}" for note in table.notes)]))
    return "\n\n".join(parts) + "\n"


def _pipes(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def to_latex(tables: Sequence[Table]) -> str:
    """The tables as LaTeX floats with booktabs rules."""
    parts = []
    for table in tables:
        width = len(table.header)
        lines = [
            "\\begin{table*}[t]",
            "\\centering\\footnotesize",
            f"\\begin{{tabular}}{{l{'c' * (width - 1)}}}",
            "\\toprule",
            " & ".join(f"\\textbf{{{_tex(text)}}}" for text in table.header) + " \\\\",
            "\\midrule",
        ]
        for number, row in enumerate(table.rows):
            if len(row) == 1:
                lines.append(f"\\multicolumn{{{width}}}{{c}}{{\\textit{{{_tex(row[0])}}}}} \\\\")
                continue
            cells = [f"\\textbf{{{_tex(t)}}}" if (number, c) in table.bold else _tex(t) for c, t in enumerate(row)]
            lines.append(" & ".join(cells) + " \\\\")
        caption = " ".join([f"{table.title}.", *table.notes])
        lines += ["\\bottomrule", "\\end{tabular}", f"\\caption{{{_tex(caption)}}}", "\\end{table*}"]
        parts.append("\n".join(lines))
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(parts) + "\n"


_TEX = {
    "\\": "\\textbackslash{}",
    "†": "$^\\dagger$",
    "‡": "$^\\ddagger$",
    "–": "--",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def to_html(tables: Sequence[Table]) -> str:
    """The tables as one page that needs nothing else."""
    style = (
        "body{font:15px/1.4 system-ui,sans-serif;margin:2rem;color:#1b1b1b}"
        "table{border-collapse:collapse;margin:.6rem 0}"
        "th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #dcdfe1;white-space:nowrap}"
        "th:first-child,td:first-child{text-align:left}thead th{background:#ebeef0}"
        "tr.group td{text-align:center;background:#e0e4e6;font-style:italic}tr.paper td{color:#5c5c5c}"
        "p{max-width:60rem;color:#5c5c5c}div{overflow-x:auto}"
    )
    parts = []
    for table in tables:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in table.header)
        body = []
        for number, row in enumerate(table.rows):
            if len(row) == 1:
                body.append(f'<tr class="group"><td colspan="{len(table.header)}">{html.escape(row[0])}</td></tr>')
                continue
            cells = [html.escape(text) for text in row]
            cells = [f"<b>{text}</b>" if (number, c) in table.bold else text for c, text in enumerate(cells)]
            kind = ' class="paper"' if row[0].endswith("(paper)") else ""
            body.append(f"<tr{kind}>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>")
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in table.notes)
        parts.append(
            f"<h2>{html.escape(table.title)}</h2><div><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>{notes}"
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>StackTok report</title>'
        f"<style>{style}</style><body>{''.join(parts)}</body></html>\n"
    )


WRITERS = {"markdown": ("md", to_markdown), "latex": ("tex", to_latex), "html": ("html", to_html)}
"""Formats: file ending and writer."""
