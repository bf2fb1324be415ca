"""How often `stacktok tune` breaks its promise: repetitions on recorded outcomes of the embedded models.

Every repetition draws scenes as a user's data, searches and recommends on them, and looks at what the recommended
setting keeps of the full model on all other scenes. No model runs: outcomes are the committed cells of the plan
`embedded` (docs/results/embedded).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stacktok.evaluation.cells import Results
from stacktok.tune.race import Floats, Measured, cheapest, race, split_pictures, verdicts

METHODS = (
    *("StackTok", "MMTok", "DivPrune", "CDPruner", "VisionZip", "random", "uniform grid", "average pooling"),
    *("FastV", "SparseVLM"),
)
"""Labels of the settings that take part, at all budgets and positions of the plan."""

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "embedded"


@dataclass(frozen=True, eq=False)
class Recorded:
    """Outcomes of every setting of one model on every question.

    Attributes
    ----------
    quality, full
        Of every setting, and of the full model, (N,): right answers, or for faithfulness unchanged ones.
    cost
        Tokens per layer.
    groups
        Scene of every question.
    """

    quality: dict[str, Floats]
    full: Floats
    cost: dict[str, Floats]
    groups: list[str]

    @classmethod
    def read(cls, model: str, *, labels: bool, folder: Path = FOLDER) -> Recorded:
        """The cells of a model.

        Without labels, only questions that the full model answers rightly are taken: what it answers to these is
        known from scores alone, and so is whether a pruned model changes it.
        """
        results = [one for one in Results(folder).read() if one["settings"]["model"] == model]
        full = next(one for one in results if one["settings"]["method"] is None)["items"]
        right = np.array(full["score"], dtype=np.float64)
        taken = np.arange(len(right)) if labels else np.flatnonzero(right)
        quality, cost = {}, {}
        for one in results:
            settings, items = one["settings"], one["items"]
            if settings["label"] not in METHODS or settings.get("condition"):
                continue
            name = f"{settings['label']}, {settings['budget']}, {settings['positions']}"
            quality[name] = np.array(items["score"], dtype=np.float64)[taken]
            tokens = items.get("tokens_per_layer") or items.get("tokens") or [settings["budget"]] * len(right)
            cost[name] = np.array(tokens, dtype=np.float64)[taken]
        return cls(quality, right[taken], cost, [str(full["group"][n]) for n in taken])

    def measure(self, settings: Sequence[str], samples: Sequence[int]) -> dict[str, Measured]:
        """Outcomes of settings on samples; log-probabilities were not recorded."""
        part = list(samples)
        nothing = np.zeros(len(part))
        return {name: Measured(self.quality[name][part], nothing, self.cost[name][part]) for name in settings}


def repetition(recorded: Recorded, scenes: int, keep: float, seed: int) -> tuple[str | None, float]:
    """The recommendation on some scenes, and what it keeps on all others; (None, NaN) where there is none."""
    draw = np.random.default_rng(seed)
    names = sorted(set(recorded.groups))
    own = set(draw.choice(names, size=scenes, replace=False).tolist())
    inside = [n for n, group in enumerate(recorded.groups) if group in own]
    outside = [n for n, group in enumerate(recorded.groups) if group not in own]
    groups = [recorded.groups[n] for n in inside]
    search, held_out = split_pictures(groups, seed)

    def measure(settings: Sequence[str], samples: Sequence[int]) -> dict[str, Measured]:
        return recorded.measure(settings, [inside[n] for n in samples])

    full = recorded.full[inside]
    finalists = race(list(recorded.quality), measure, full, groups, search, keep)
    rows = verdicts(finalists, measure(finalists, held_out), full[held_out], [groups[n] for n in held_out], keep)
    best = cheapest(rows)
    if best is None:
        return None, float("nan")
    return best.setting, float(recorded.quality[best.setting][outside].sum() / recorded.full[outside].sum())


def simulate(recorded: Recorded, scenes: int, keep: float, repetitions: int) -> dict[str, object]:
    """Repetitions with different scenes: how often there is a recommendation, and how often it breaks its promise."""
    found = [repetition(recorded, scenes, keep, seed) for seed in range(repetitions)]
    made = [(name, kept) for name, kept in found if name is not None]
    broken = [kept for _, kept in made if kept < keep]
    names = [name for name, _ in made]
    common = max(set(names), key=names.count) if names else None
    return {
        "repetitions": repetitions,
        "recommendations": len(made),
        "broken": len(broken),
        "worst": round(min((kept for _, kept in made), default=float("nan")), 4),
        "most frequent": common,
    }


def main() -> None:
    """Print a row per model, kind of quality and promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--scenes", type=int, default=140)
    parser.add_argument("--keep", type=float, nargs="*", default=[0.95, 0.98, 0.9])
    given = parser.parse_args()
    for keep in given.keep:
        for labels in (True, False):
            for model in ("embedded LLaVA", "embedded LLaVA-NeXT"):
                recorded = Recorded.read(model, labels=labels)
                row = simulate(recorded, given.scenes, keep, given.repetitions)
                kind = "labels" if labels else "faithfulness"
                print(json.dumps({"model": model, "quality": kind, "keep": keep, **row}), flush=True)


if __name__ == "__main__":
    main()
