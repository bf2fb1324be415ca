"""Write docs/results.md from the result files of `compare_selectors.py`.

    python benchmarks/results_page.py --results DIR [--dev DIR] [--next DIR] --words FILE --out docs/results.md

Retention is the paper's: per family, accuracy with pruned tokens over accuracy with all, averaged over families.
Intervals resample scenes, since questions on one scene are not independent. The words between the tables come from a
file of their own; every number in the tables comes from the result files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from compare_selectors import ABLATIONS, ALPHAS, AUTO, BUDGETS, CROPS, DEPTHS, FULL, INSIDE, MAIN, cell_name
from depth_rule import rule_table
from result_files import Results, table
from stacktok.evaluation.statistics import paired_comparison

NOT_RUN = "not run"


def retentions(results: Results, names: list[str], positions: str) -> str:
    """Retention of every variant at every budget."""
    rows = []
    for name in names:
        cells = [cell_name(name, k, positions) for k in BUDGETS]
        if any(cell in results.cells for cell in cells):
            rows.append(
                [
                    name,
                    *(
                        "{:.1f} [{:.1f}, {:.1f}]".format(*results.retention(cell)) if cell in results.cells else NOT_RUN
                        for cell in cells
                    ),
                ]
            )
    return table(["retention, %", *map(str, BUDGETS)], rows)


def differences(results: Results, names: list[str], baseline: str, positions: str) -> str:
    """Paired differences of retention, with the paired test on items."""
    rows = []
    for name in names:
        if name == baseline or not any(cell_name(name, k, positions) in results.cells for k in BUDGETS):
            continue
        row = [name]
        for k in BUDGETS:
            cell, other = cell_name(name, k, positions), cell_name(baseline, k, positions)
            if cell not in results.cells:
                row.append(NOT_RUN)
                continue
            mid, low, high = results.retention_difference(cell, other)
            p = paired_comparison(results.cells[cell], results.cells[other], groups=results.scene).p_value
            mark = " *" if p < 0.05 else ""
            row.append(f"{mid:+.1f} [{low:+.1f}, {high:+.1f}]{mark}")
        rows.append(row)
    return table([f"minus {baseline}, points", *map(str, BUDGETS)], rows)


def accuracies(results: Results, names: list[str], budget: int, positions: str) -> str:
    """Accuracy per family at one budget."""
    rows = [[FULL, *(f"{100 * value:.1f}" for value in results.by_family(FULL).values())]]
    for name in names:
        cell = cell_name(name, budget, positions)
        if cell in results.cells:
            rows.append([name, *(f"{100 * value:.1f}" for value in results.by_family(cell).values())])
    return table([f"accuracy at {budget}, %", *results.families], rows)


def gate(results: Results, budget: int) -> str:
    """How the gate behaved, per family."""
    facts = results.gate[str(budget)]
    if len(facts) != len(results.items):
        return ""
    rows = []
    groups = [(name, results.family == f) for f, name in enumerate(results.families)]
    local = np.array([item["local"] for item in results.items])
    for name, chosen in [*groups, ("all local", local), ("all holistic", ~local)]:
        part = [fact for fact, use in zip(facts, chosen, strict=True) if use]
        strictness = np.array([fact["strictness"] for fact in part])
        rows.append(
            [
                name,
                f"{np.mean([fact['rows'] for fact in part]):.1f}",
                " / ".join(f"{value:.2f}" for value in np.quantile(strictness, [0.1, 0.5, 0.9])),
                f"{100 * np.mean([fact['bound'] for fact in part]):.1f} %",
                f"{np.mean([fact['relevance_picks'] for fact in part]):.1f}",
            ]
        )
    header = [f"at {budget}", "query rows", "strictness 10/50/90 %", "steps with a deficit", "relevance picks"]
    return table(header, rows)


def layer_averages(results: Results) -> str:
    """Tokens per layer of the methods inside the language model; for all others it is the budget."""
    rows = []
    for name, (_, positions) in INSIDE.items():
        cells = [cell_name(name, k, positions) for k in BUDGETS]
        if cells[0] in results.tokens:
            rows.append([name, *(f"{results.tokens[cell]:.0f}" for cell in cells)])
    return table(["tokens per layer", *map(str, BUDGETS)], rows)


def best_scalarization(results: Results, positions: str) -> str:
    """The best fixed alpha of every budget, chosen on these very questions, beside the gated policy."""
    row = ["best fixed scalarization"]
    for k in BUDGETS:
        if cell_name(f"scalarization, alpha {ALPHAS[0]}", k, positions) not in results.cells:
            row.append(NOT_RUN)
            continue
        found = {a: results.retention(cell_name(f"scalarization, alpha {a}", k, positions))[0] for a in ALPHAS}
        alpha = max(found, key=lambda a: found[a])
        row.append(f"{found[alpha]:.1f} (alpha {alpha})")
    return table(["retention, %", *map(str, BUDGETS)], [row])


def main() -> None:
    """Fill the words' placeholders with tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dev", type=Path, help="results of the dev split, on which the depth's rule was chosen")
    parser.add_argument("--next", type=Path, help="results of the multi-crop model")
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = Results.load(arguments.results)
    full = results.cells[FULL]
    main_names, generalised = [*MAIN, *INSIDE], [*DEPTHS, *AUTO]
    filled = {
        "questions": str(len(results.items)),
        "scenes": str(int(results.scene.max()) + 1),
        "layer averages": layer_averages(results),
        "full accuracy": f"{100 * full.mean():.1f} %",
        "accuracy 64": accuracies(results, [*main_names, *generalised], 64, "compact"),
        "accuracy 16": accuracies(results, [*main_names, *generalised], 16, "compact"),
        "depth accuracy 8": accuracies(results, ["MMTok", "StackTok", *generalised], 8, "compact"),
    }
    for positions in ("compact", "kept"):
        filled[f"main {positions}"] = retentions(results, main_names, positions)
        filled[f"depth {positions}"] = retentions(results, ["StackTok", *generalised], positions)
        filled[f"depth minus stacktok {positions}"] = differences(results, generalised, "StackTok", positions)
        filled[f"ablations {positions}"] = retentions(results, ["StackTok", *ABLATIONS], positions)
        filled[f"ablations minus stacktok {positions}"] = differences(results, list(ABLATIONS), "StackTok", positions)
        if cell_name("MMTok", 64, positions) in results.cells:
            filled[f"minus mmtok {positions}"] = differences(results, [*main_names, *AUTO], "MMTok", positions)
        if cell_name(f"scalarization, alpha {ALPHAS[0]}", 64, positions) in results.cells:
            filled[f"scalarization {positions}"] = best_scalarization(results, positions)
    if arguments.dev:
        filled["dev rules"] = rule_table(Results.load(arguments.dev), "compact")
    for k in BUDGETS:
        filled[f"gate {k}"] = gate(results, k)
    if arguments.next:
        crops = Results.load(arguments.next)
        names = [*MAIN, *CROPS, *generalised]
        filled["next questions"] = str(len(crops.items))
        filled["next full accuracy"] = f"{100 * crops.cells[FULL].mean():.1f} %"
        filled["next main"] = retentions(crops, names, "compact")
        for baseline in ("MMTok", "StackTok"):
            filled[f"next minus {baseline.lower()}"] = differences(crops, names, baseline, "compact")
        for k in (64, 16):
            filled[f"next accuracy {k}"] = accuracies(crops, names, k, "compact")
            filled[f"next gate {k}"] = gate(crops, k)
    text = arguments.words.read_text()
    for name, value in filled.items():
        text = text.replace("{{" + name + "}}", value)
    if "{{" in text:
        missing = text.split("{{")[1].split("}}")[0]
        raise ValueError(f"{arguments.words} asks for {missing!r}, which these results do not have")
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
