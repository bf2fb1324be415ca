"""Budgets that adapt against fixed ones with as many tokens on average: the table of docs/results.md.

Reads the cells of the plan `adaptive` (docs/results/adaptive); no model runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stacktok.core.budget import Coverage
from stacktok.evaluation.cells import Results
from stacktok.evaluation.statistics import paired_comparison

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "adaptive"


def rows(folder: Path = FOLDER) -> list[str]:
    """Lines of the table: per model and adaptive budget its tokens, both accuracies and the paired difference."""
    lines = [
        "| model | budget | tokens: mean, least, most | accuracy | fixed budget | accuracy | difference, points | p |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    results: dict[str, dict[Any, dict[str, Any]]] = {}
    for one in Results(folder).read():
        results.setdefault(one["settings"]["model"], {})[one["settings"]["budget"]] = one
    for model, own in results.items():
        fixed = [budget for budget in own if isinstance(budget, int)]
        for budget in (budget for budget in own if Coverage.of(budget) is not None):
            tokens = np.array(own[budget]["items"]["tokens"])
            nearest = min(fixed, key=lambda size: abs(size - tokens.mean()))
            a, b = own[budget]["items"], own[nearest]["items"]
            found = paired_comparison(100 * np.array(a["score"]), 100 * np.array(b["score"]), groups=a["group"])
            lines.append(
                f"| {model} | {budget} | {tokens.mean():.1f}, {tokens.min()}, {tokens.max()} | "
                f"{own[budget]['score']:.1f} | {nearest} | {own[nearest]['score']:.1f} | "
                f"{found.difference.text('+')} | {found.p_value:.2f} |"
            )
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
