"""The search of `stacktok tune` against running every cell: processor time and recommendation.

    python benchmarks/tune_race.py race  llava --out FOLDER     # as the command does
    python benchmarks/tune_race.py every llava --out FOLDER     # every setting on every sample
    python benchmarks/tune_race.py compare llava --out FOLDER   # both times, both recommendations
    python benchmarks/tune_race.py save llava --out FOLDER... --into FILE   # outcomes, for tune_promise.py

Ten methods at six budgets with kept positions, one question on each scene; scenes of the test split from number 1000
on, which no other result of this package uses. Both runs go on where they were when they are started again. Times are
those of measuring alone (loading and timing of finalists left out), of one thread; processor time is believable on a
busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stacktok.cli.common import load, model_path
from stacktok.core.budget import parse_budget
from stacktok.evaluation.scenes_loop import Columns, Journal
from stacktok.methods.settings import build_methods
from stacktok.scenes import DETAIL, STANDARD, make_scene, questions, render, seed_for
from stacktok.tune.data import Sample
from stacktok.tune.engine import Engine, Setting, settings_of
from stacktok.tune.quality import accuracy
from stacktok.tune.race import cheapest, race, verdicts
from stacktok.tune.run import Search

METHODS = "stacktok,spotlight,mmtok,divprune,cdpruner,visionzip,vispruner,uniform,random,pool"
BUDGETS = "192,128,64,32,16,8"
STYLES = {"llava": STANDARD, "llava_next": DETAIL}
FIRST_SCENE = 1000


def scene_samples(model: str, count: int, first: int = FIRST_SCENE) -> list[Sample]:
    """One question on each of some scenes; the kinds of questions take turns."""
    samples = []
    for number in range(count):
        scene = make_scene(seed_for("test", first + number), STYLES[model])
        asked = questions(scene)
        question = asked[(first + number) % len(asked)]
        opener = lambda scene=scene: render(scene)  # noqa: E731
        samples.append(Sample(number, f"scene-{first + number}", question.text, (question.answer,), opener))
    return samples


def all_settings(methods: str = METHODS, budgets: str = BUDGETS) -> list[Setting]:
    """Every method at every budget, positions kept."""
    chosen = build_methods(methods.split(","), {})
    return settings_of(list(chosen.values()), [parse_budget(text) for text in budgets.split(",")], ["kept"])


class TimedEngine(Engine):
    """Notes the time of every step in a file, a line each."""

    def __init__(self, model: Any, processor: Any, path: Path) -> None:
        super().__init__(model, processor, accuracy, 16)
        self._path = path

    def full(self, chunk: Sequence[Sample]) -> Columns:
        """As in `Engine`, timed."""
        return self._timed(lambda: super(TimedEngine, self).full(chunk), 1, len(chunk))

    def measure(self, settings: Sequence[Setting], chunk: Sequence[Sample], full: Columns) -> dict[str, Columns]:
        """As in `Engine`, timed."""
        return self._timed(lambda: super(TimedEngine, self).measure(settings, chunk, full), len(settings), len(chunk))

    def _timed(self, step: Callable[[], Any], settings: int, samples: int) -> Any:
        begin, wall = time.process_time(), time.monotonic()
        found = step()
        row = {"settings": settings, "samples": samples}
        row |= {"processor": time.process_time() - begin, "wall": time.monotonic() - wall}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        return found


def spent(folder: Path) -> dict[str, float]:
    """Sums of the times of a run, and the number of measurements."""
    rows = [json.loads(line) for line in (folder / "times.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "processor": sum(row["processor"] for row in rows),
        "wall": sum(row["wall"] for row in rows),
        "measured": sum(row["settings"] * row["samples"] for row in rows),
    }


def search_in(folder: Path, engine: Any, args: argparse.Namespace) -> Search:
    """The search whose files are in a folder; without an engine, to read them alone."""
    samples = scene_samples(args.model, args.samples, args.first)
    search = Search(
        engine,
        samples,
        all_settings(args.methods, args.budgets),
        folder,
        {"model": args.model},
        keep=args.keep,
        quality="accuracy",
        report=lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True),
    )
    folder.mkdir(parents=True, exist_ok=True)
    search.journal = Journal(folder / "journal.jsonl")
    return search


def recommended(search: Search, keep: float, *, racing: bool) -> tuple[str | None, list[str]]:
    """The recommendation and the finalists from a journal, by racing or with every cell in one rung."""
    first = 32 if racing else len(search.search)
    full = _Full(search)
    finalists = race(search.settings, search._measure, full, search.groups, search.search, keep, first=first)  # type: ignore[arg-type]
    groups = [search.groups[n] for n in search.held_out]
    rows = verdicts(finalists, search._measure(finalists, search.held_out), full[search.held_out], groups, keep)
    best = cheapest(rows)
    return None if best is None else str(best.setting), [f"{row.setting}: {row.at_least:.4f}" for row in rows]


class _Full:
    """Quality of the full model by sample."""

    def __init__(self, search: Search) -> None:
        self._search = search

    def __getitem__(self, numbers: Sequence[int]) -> Any:
        return self._search._quality_of_full(list(numbers))


class Unmeasured:
    """In the place of an engine where everything should be in the journal."""

    metric = staticmethod(accuracy)

    def full(self, chunk: Sequence[Sample]) -> Columns:
        """Refuse."""
        raise ValueError("the run is not finished; start it again")

    def measure(self, settings: Sequence[Setting], chunk: Sequence[Sample], full: Columns) -> dict[str, Columns]:
        """Refuse."""
        raise ValueError("the run is not finished; start it again")


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["race", "every", "compare", "save"])
    parser.add_argument("model", choices=list(STYLES))
    parser.add_argument("--out", type=Path, required=True, nargs="+")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--first", type=int, default=FIRST_SCENE)
    parser.add_argument("--keep", type=float, default=0.95)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--budgets", default=BUDGETS)
    args = parser.parse_args()
    folder = args.out[0]
    if args.part in ("race", "every"):
        torch.set_num_threads(1)
        own = folder / args.part
        own.mkdir(parents=True, exist_ok=True)
        (own / "range.json").write_text(json.dumps({"samples": args.samples, "first": args.first}), encoding="utf-8")
        model, processor = load(model_path(f"embedded/{args.model}"), "float32", "cpu", quiet=True)
        search = search_in(own, TimedEngine(model, processor, own / "times.jsonl"), args)
        if args.part == "every":
            search._planned = len(search.settings) * len(search.samples)
            search._measure(search.settings, [*search.search, *search.held_out])
        else:
            search._planned = search._most(len(search.settings))
        print(recommended(search, args.keep, racing=args.part == "race"))
    elif args.part == "compare":
        times = {part: spent(folder / part) for part in ("race", "every")}
        for part in times:
            found = recommended(search_in(folder / part, Unmeasured(), args), args.keep, racing=part == "race")
            print(json.dumps({"part": part, **times[part], "recommended": found[0], "finalists": found[1]}))
        for kind in ("processor", "wall", "measured"):
            print(f"{kind}: {times['race'][kind] / times['every'][kind]:.3f}")
    else:
        save(args)


def save(args: argparse.Namespace) -> None:
    """Write the outcomes of every cell of some folders into one file: scores and unchanged answers as digits."""
    columns: dict[str, dict[str, Any]] = {}
    full, groups = "", []
    for folder in args.out:
        known = json.loads((folder / "every" / "range.json").read_text(encoding="utf-8"))
        own = argparse.Namespace(**{**vars(args), **known})
        search = search_in(folder / "every", Unmeasured(), own)
        numbers = list(range(len(search.samples)))
        full += "".join(str(int(one)) for one in search._quality_of_full(numbers))
        groups += search.groups
        for setting in search.settings:
            found = search._gather(setting, numbers)
            row = columns.setdefault(str(setting), {"score": "", "unchanged": "", "tokens": []})
            for name in ("score", "unchanged"):
                row[name] += "".join(str(int(one)) for one in found[name])
            row["tokens"] += found["tokens"]
    for row in columns.values():
        row["tokens"] = round(float(np.mean(row["tokens"])), 2)
    text = json.dumps({"model": args.model, "groups": groups, "full": full, "settings": columns}, indent=1)
    args.into.parent.mkdir(parents=True, exist_ok=True)
    args.into.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
