"""Compare rules for the relevance depth on the dev split, from result files of `compare_selectors.py`.

    python benchmarks/depth_rule.py --results DIR [--positions compact]

A rule may use what is known before a run: the budget k, the query's rows m and its entropy. Its depth is rounded down
to the next one that the files have, so that every rule is judged on the same runs. Prints retention per budget.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from compare_selectors import BUDGETS, cell_name
from results_page import Results, table

MEASURED = (1, 2, 4, 8, 16)
Rule = Callable[[int, int, float], float]


def rules() -> dict[str, Rule]:
    """Depth from budget, rows and normalised entropy."""
    found: dict[str, Rule] = {f"{r}": lambda k, m, h, r=r: r for r in MEASURED}
    found["unlimited"] = lambda k, m, h: math.inf
    for share in (1, 2, 3, 4):
        found[f"ceil(k / {share} m)"] = lambda k, m, h, c=share: math.ceil(k / (c * max(m, 1)))
    for top in (4, 8):
        found[f"ceil(k / 2 m), at most {top}"] = lambda k, m, h, t=top: min(t, math.ceil(k / (2 * max(m, 1))))
    for half in (8, 16, 32, 64):
        found[f"8 up to {half} tokens, else 1"] = lambda k, m, h, b=half: 8 if k <= b else 1
        found[f"4 up to {half} tokens, else 1"] = lambda k, m, h, b=half: 4 if k <= b else 1
    found["ceil(entropy k / m)"] = lambda k, m, h: math.ceil(h * k / max(m, 1))
    found["ceil((1 - entropy) k / m)"] = lambda k, m, h: math.ceil((1 - h) * k / max(m, 1))
    return found


def depth_name(depth: float) -> str:
    """The measured variant at or below a depth."""
    if math.isinf(depth):
        return "StackTok, depth unlimited"
    below = max(r for r in MEASURED if r <= max(1, depth))
    return "StackTok" if below == 1 else f"StackTok, depth {below}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--positions", choices=("compact", "kept"), default="compact")
    arguments = parser.parse_args()
    results = Results.load(arguments.results)
    rows = []
    for name, rule in rules().items():
        row = [name]
        for k in BUDGETS:
            facts = results.gate[str(k)]
            chosen = [depth_name(rule(k, fact["rows"], fact["strictness"])) for fact in facts]
            cells = {one: results.cells[cell_name(one, k, arguments.positions)] for one in set(chosen)}
            mixed = np.array([cells[one][item] for item, one in enumerate(chosen)])
            results.cells["mixed"] = mixed
            row.append(f"{results.retention('mixed')[0]:.1f}")
        rows.append([*row, f"{np.mean([float(value) for value in row[1:]]):.2f}"])
    rows.sort(key=lambda row: -float(row[-1]))
    print(f"{len(results.items)} questions, {arguments.positions} positions\n")
    print(table(["rule", *map(str, BUDGETS), "mean"], rows))


if __name__ == "__main__":
    main()
