"""How often `stacktok tune` breaks its promise: repetitions on recorded outcomes of the embedded models.

    OPENBLAS_NUM_THREADS=1 python benchmarks/tune_promise.py [--repetitions 200] [--samples 300] [--keep 0.95 0.98]

The record is the plan `embedded` (docs/results/embedded, test split): ten methods at six budgets on 280 scenes. Each
repetition draws a user's samples from its questions at random, with replacement: a draw is a picture of its own, as if
the record were the world, and so what a setting keeps in truth is known exactly, on all of its questions. The search
runs on these samples as the command does; the promise is broken where the recommended setting keeps less in truth than
was promised. Some repetitions are made once more with every setting measured on every sample; `measured` is the share
of these measurements that the race needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stacktok.evaluation import statistics
from stacktok.evaluation.cells import Results
from stacktok.tune.race import Floats, Measured, cheapest, race, split_pictures, verdicts

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "embedded"

COMPARED = 50
"""Repetitions that are made with every cell as well."""

METHODS = {
    "embedded LLaVA": [
        *("StackTok", "Spotlight", "MMTok", "DivPrune", "CDPruner", "VisionZip", "random", "uniform grid"),
        *("average pooling", "FastV"),
    ],
    "embedded LLaVA-NeXT": [
        *("StackTok", "Spotlight", "MMTok", "DivPrune", "CDPruner", "VisionZip", "random", "uniform grid"),
        "average pooling",
    ],
}
"""Labels of the plan's methods; with kept positions, and where these were not recorded with compacted ones."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """Outcomes of every setting of one model on every question.

    Attributes
    ----------
    quality, full
        Of every setting, and of the full model, (N,): right answers.
    cost
        Tokens per layer.
    """

    quality: dict[str, Floats]
    full: Floats
    cost: dict[str, float]

    @classmethod
    def read(cls, model: str, folder: Path = FOLDER) -> Recorded:
        """The cells of a model."""
        cells = [
            one
            for one in Results(folder).read()
            if one["settings"]["model"] == model and not one["settings"].get("condition")
        ]
        full = next(one for one in cells if one["settings"]["method"] is None)["items"]["score"]
        quality: dict[str, Floats] = {}
        cost: dict[str, float] = {}
        for label in METHODS[model]:
            own = [one for one in cells if one["settings"]["label"] == label]
            places = {one["settings"]["positions"] for one in own}
            for one in own:
                settings, items = one["settings"], one["items"]
                if settings["positions"] != ("kept" if "kept" in places else "compact"):
                    continue
                name = f"{label}, {settings['budget']}, {settings['positions']}"
                quality[name] = np.array(items["score"], dtype=np.float64)
                tokens = items.get("tokens_per_layer") or items.get("tokens") or [settings["budget"]]
                cost[name] = float(np.mean(tokens))
        return cls(quality, np.array(full, dtype=np.float64), cost)

    def kept(self, name: str) -> float:
        """What a setting keeps on all scenes."""
        return float(self.quality[name].sum() / self.full.sum())


def repetition(
    recorded: Recorded, samples: int, keep: float, seed: int, *, compare: bool
) -> tuple[str | None, str | None, float]:
    """The recommendation by racing and, to compare, from every cell; None where there is none. The share measured."""
    drawn = np.random.default_rng(seed).integers(len(recorded.full), size=samples)
    groups = [str(n) for n in range(samples)]
    search, held_out = split_pictures(groups, seed)
    full, measured = recorded.full[drawn], [0]

    def measure(settings: Sequence[str], numbers: Sequence[int]) -> dict[str, Measured]:
        part, nothing = drawn[list(numbers)], np.zeros(len(numbers))
        return {
            name: Measured(recorded.quality[name][part], nothing, np.full(len(part), recorded.cost[name]))
            for name in settings
        }

    def recommended(first: int) -> str | None:
        finalists = race(list(recorded.quality), measure, full, groups, search, keep, first=first, rung_done=count)
        rows = verdicts(finalists, measure(finalists, held_out), full[held_out], [groups[n] for n in held_out], keep)
        best = cheapest(rows)
        measured[0] += len(finalists) * len(held_out)
        return None if best is None else best.setting

    rung = [0, len(recorded.quality)]

    def count(size: int, left: Sequence[str]) -> None:
        measured[0] += (size - rung[0]) * rung[1]
        rung[:] = [size, len(left)]

    raced = recommended(32)
    share = measured[0] / (samples * len(recorded.quality))
    return raced, recommended(len(search)) if compare else None, share


def simulate(recorded: Recorded, samples: int, keep: float, repetitions: int) -> dict[str, object]:
    """Repetitions with other samples: how often there is a recommendation, and how often it breaks its promise."""
    found = [repetition(recorded, samples, keep, seed, compare=seed < COMPARED) for seed in range(repetitions)]
    made = [raced for raced, _, _ in found if raced is not None]
    kept = [recorded.kept(name) for name in made]
    return {
        "repetitions": repetitions,
        "recommendations": len(made),
        "broken": sum(one < keep for one in kept),
        "worst": round(min(kept), 4) if kept else None,
        "mean tokens": round(float(np.mean([recorded.cost[name] for name in made])), 1) if made else None,
        "compared": len(found[:COMPARED]),
        "same as every cell": sum(raced == every for raced, every, _ in found[:COMPARED]),
        "every cell recommends": sum(every is not None for _, every, _ in found[:COMPARED]),
        "measured": round(float(np.mean([share for _, _, share in found])), 3),
    }


def main() -> None:
    """Print a row per model, number of samples and promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(METHODS))
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--samples", type=int, nargs="*", default=[300])
    parser.add_argument("--keep", type=float, nargs="*", default=[0.95, 0.98])
    parser.add_argument("--resamples", type=int, default=statistics.RESAMPLES, help="Fewer are faster and less exact.")
    given = parser.parse_args()
    statistics.RESAMPLES = given.resamples
    for model in given.models:
        recorded = Recorded.read(model)
        for samples in given.samples:
            for keep in given.keep:
                able = sum(recorded.kept(name) >= keep for name in recorded.quality)
                row = simulate(recorded, samples, keep, given.repetitions)
                head = {"model": model, "settings": len(recorded.quality), "able": able}
                print(json.dumps(head | {"samples": samples, "keep": keep} | row), flush=True)


if __name__ == "__main__":
    main()
