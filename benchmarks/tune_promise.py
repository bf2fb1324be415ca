"""How often `stacktok tune` breaks its promise: repetitions on recorded outcomes of the embedded models.

    python benchmarks/tune_promise.py [--repetitions 200] [--samples 300 500] [--keep 0.95 0.98]

The record (docs/results/tune, written by `benchmarks/tune_race.py save`) holds every setting on scenes of which nothing
was known when the bound was chosen. Each repetition draws a user's samples from it at random, with replacement: a draw
is a picture of its own, as if the record were the world, and so what a setting keeps in truth is known exactly, on all
of its scenes. The search runs on these samples as the command does; the promise is broken where the recommended setting
keeps less in truth than was promised.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stacktok.tune.race import Floats, Measured, cheapest, race, split_pictures, verdicts

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "tune"


@dataclass(frozen=True, eq=False)
class Recorded:
    """Outcomes of every setting of one model on every scene.

    Attributes
    ----------
    quality, full
        Of every setting, and of the full model, (N,): right answers, or for faithfulness unchanged ones.
    cost
        Tokens per layer.
    """

    quality: dict[str, Floats]
    full: Floats
    cost: dict[str, float]

    @classmethod
    def read(cls, model: str, *, labels: bool, folder: Path = FOLDER) -> Recorded:
        """The record of a model: right answers, or without labels unchanged ones."""
        values = json.loads((folder / f"{model}.json").read_text(encoding="utf-8"))
        column = "score" if labels else "unchanged"
        quality = {name: _digits(own[column]) for name, own in values["settings"].items()}
        full = _digits(values["full"])
        return cls(
            quality,
            full if labels else np.ones_like(full),
            {name: own["tokens"] for name, own in values["settings"].items()},
        )

    def kept(self, name: str) -> float:
        """What a setting keeps on all scenes."""
        return float(self.quality[name].sum() / self.full.sum())


def _digits(text: str) -> Floats:
    return np.array([int(one) for one in text], dtype=np.float64)


def repetition(recorded: Recorded, samples: int, keep: float, seed: int) -> str | None:
    """The recommendation on a user's samples; None where there is none."""
    drawn = np.random.default_rng(seed).integers(len(recorded.full), size=samples)
    groups = [str(n) for n in range(samples)]
    search, held_out = split_pictures(groups, seed)

    def measure(settings: Sequence[str], numbers: Sequence[int]) -> dict[str, Measured]:
        part, nothing = drawn[list(numbers)], np.zeros(len(numbers))
        return {
            name: Measured(recorded.quality[name][part], nothing, np.full(len(part), recorded.cost[name]))
            for name in settings
        }

    full = recorded.full[drawn]
    finalists = race(list(recorded.quality), measure, full, groups, search, keep)
    rows = verdicts(finalists, measure(finalists, held_out), full[held_out], [groups[n] for n in held_out], keep)
    best = cheapest(rows)
    return None if best is None else best.setting


def simulate(recorded: Recorded, samples: int, keep: float, repetitions: int) -> dict[str, object]:
    """Repetitions with other samples: how often there is a recommendation, and how often it breaks its promise."""
    found = [repetition(recorded, samples, keep, seed) for seed in range(repetitions)]
    made = [name for name in found if name is not None]
    kept = [recorded.kept(name) for name in made]
    return {
        "repetitions": repetitions,
        "recommendations": len(made),
        "broken": sum(one < keep for one in kept),
        "worst": round(min(kept), 4) if kept else None,
        "mean tokens": round(float(np.mean([recorded.cost[name] for name in made])), 1) if made else None,
        "most frequent": Counter(made).most_common(1)[0] if made else None,
    }


def main() -> None:
    """Print a row per model, kind of quality, number of samples and promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llava", "llava_next"])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--samples", type=int, nargs="*", default=[300, 500])
    parser.add_argument("--keep", type=float, nargs="*", default=[0.95, 0.98])
    given = parser.parse_args()
    for model in given.models:
        for labels in (True, False):
            recorded = Recorded.read(model, labels=labels)
            for samples in given.samples:
                for keep in given.keep:
                    able = sum(recorded.kept(name) >= keep for name in recorded.quality)
                    row = simulate(recorded, samples, keep, given.repetitions)
                    kind = "accuracy" if labels else "unchanged answers"
                    head = {"model": model, "quality": kind, "samples": samples, "keep": keep, "settings able": able}
                    print(json.dumps(head | row), flush=True)


if __name__ == "__main__":
    main()
