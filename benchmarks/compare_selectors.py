"""What selectors keep of the embedded model's accuracy: every variant, budget and position policy, item by item.

    python benchmarks/compare_selectors.py --model FOLDER --out DIR [--split test] [--scenes 280] [--variants NAME ...]

Scenes are taken in chunks; each chunk is one result file, written whole, with the outcome of every question under
every cell. A killed run loses at most one variant of a chunk, and a second start does what is missing: cells that a
file does not have yet are added to it. Several runs may share a folder if their scenes (`--first`, `--scenes`) differ.
Pictures are encoded once per chunk; prefixes of one selection serve all budgets. Methods that work inside the language
model are asked through the runtime, at the positions that they keep.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import stacktok
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.evaluation.answering import Answerer, question_prompt
from stacktok.evaluation.loop import Loop, Prompt
from stacktok.methods import FastV, SparseVLM
from stacktok.methods.base import Method
from stacktok.scenes import DETAIL, STANDARD, make_scene, questions, render, seed_for

BUDGETS = (192, 128, 64, 32, 16, 8)
CHUNK = 20


@dataclass(frozen=True, eq=False)
class Case:
    """A question with what its image's other questions share."""

    picture: Any
    prompt: Prompt
    prepared: stacktok.PreparedImage | stacktok.PreparedCrops


Reduce = Callable[[Case], dict[int, Reduction]]


def keep(image: EncodedImage, selection: Any) -> Reduction:
    """The reduction of a selection on one or several crops."""
    kept = list(selection.indices) if isinstance(selection, stacktok.CropSelection) else [selection.indices]
    return image.keep(kept, record=selection.detach())


def stacktok_variant(**settings: Any) -> Reduce:
    """StackTok under some settings; one walk serves every budget where prefixes are the runs of smaller budgets."""

    def reduce(case: Case) -> dict[int, Reduction]:
        image, query = case.prompt.image, case.prompt.query
        if _depends_on_budget(settings):
            return {k: keep(image, case.prepared.select(query, k, **settings)) for k in BUDGETS}
        whole = case.prepared.select(query, max(BUDGETS), **settings)
        return {k: keep(image, whole.prefix(k, refine=True)) for k in BUDGETS}

    return reduce


def _depends_on_budget(settings: dict[str, Any]) -> bool:
    return (
        settings.get("target") == "final"
        or settings.get("allocation", "shared") != "shared"
        or settings.get("relevance_depth") == "auto"
    )


def method_variant(name: str, **arguments: Any) -> Reduce:
    """A method of the house, by its class name."""

    def reduce(case: Case) -> dict[int, Reduction]:
        from stacktok import methods

        method = getattr(methods, name)
        return {k: method(budget=k, **arguments).reduce(case.prompt.image, case.prompt.query, k) for k in BUDGETS}

    return reduce


def base_view(case: Case) -> dict[int, Reduction]:
    """All of the first crop and nothing of the tiles, whatever the budget: what do the tiles add?"""
    image = case.prompt.image
    kept = [
        np.arange(len(crop.vision)) if c == 0 else np.empty(0, dtype=np.int64) for c, crop in enumerate(image.crops)
    ]
    return dict.fromkeys(BUDGETS, image.keep(kept))


ALPHAS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
MAIN: dict[str, Reduce] = {
    "random": method_variant("RandomTokens"),
    "uniform grid": method_variant("UniformGrid"),
    "average pooling": method_variant("AveragePool"),
    "VisionZip": method_variant("VisionZip"),
    "DivPrune": method_variant("DivPrune"),
    "CDPruner": method_variant("CDPruner"),
    "MMTok": method_variant("MMTok"),
    "StackTok": stacktok_variant(),
}
INSIDE: dict[str, Callable[[int], Method]] = {
    "FastV": lambda k: FastV(budget=k),
    "SparseVLM": lambda k: SparseVLM(budget=k),
}
DEPTHS: dict[str, Reduce] = {
    f"StackTok, depth {depth or 'unlimited'}": stacktok_variant(relevance_depth=depth) for depth in (2, 4, 8, 16, None)
}
ABLATIONS: dict[str, Reduce] = {
    "final-budget target": stacktok_variant(target="final"),
    "fixed strictness 0.5": stacktok_variant(strictness=0.5),
    "relevance only, filled by index": stacktok_variant(criterion="relevance", fill="index", swap_limit=0),
    "relevance only, filled by coverage": stacktok_variant(criterion="relevance", fill="coverage", swap_limit=0),
    "coverage only": stacktok_variant(criterion="coverage", swap_limit=0),
    "gate off": stacktok_variant(strictness=0.0),
    "without swaps": stacktok_variant(swap_limit=0),
    "strictness range [0.2, 0.8]": stacktok_variant(beta_min=0.2, beta_max=0.8),
    "strictness range [0.4, 1.0]": stacktok_variant(beta_min=0.4, beta_max=1.0),
    **{
        f"scalarization, alpha {alpha}": stacktok_variant(criterion="scalarized", alpha=alpha, swap_limit=0)
        for alpha in ALPHAS
    },
}
AUTO: dict[str, Reduce] = {"StackTok, depth auto": stacktok_variant(relevance_depth="auto")}
CROPS: dict[str, Reduce] = {
    "base view alone": base_view,
    "uniform quotas": stacktok_variant(allocation="uniform"),
    "initial-h-proportional quotas": stacktok_variant(allocation="proportional"),
}
VARIANTS = MAIN | DEPTHS | AUTO | ABLATIONS | CROPS
FULL = "all tokens"


def cell_name(variant: str, budget: int, positions: str) -> str:
    """Name of a cell in a result file."""
    return f"{variant} | {budget} | {positions}"


def load_cases(loop: Loop, scenes: list[Any]) -> tuple[list[Case], list[dict[str, Any]]]:
    """Encoded questions of some scenes, and what the result file says about each."""
    cases, items = [], []
    for scene in scenes:
        picture = render(scene)
        encoded = loop.encode(picture)
        image = encoded[0]
        crops = [stacktok.Crop(crop.vision, crop.projected, crop.eligible) for crop in image.crops]
        prepared: stacktok.PreparedImage | stacktok.PreparedCrops
        if len(crops) == 1:
            prepared = stacktok.prepare(crops[0].vision, crops[0].projected, crops[0].eligible)
        else:
            prepared = stacktok.prepare_crops(crops)
        for question in questions(scene):
            cases.append(Case(picture, loop.prompt(picture, encoded, question.text), prepared))
            items.append(
                {
                    "scene": scene.seed,
                    "question": question.text,
                    "answer": question.answer,
                    "family": question.family,
                    "local": question.local,
                }
            )
    return cases, items


def outcome(
    loop: Loop, cases: list[Case], items: list[dict[str, Any]], kept: list[Reduction | None], positions: Any, batch: int
) -> str:
    """A digit per question: 1 where the answer is right, 0 where it is not."""
    right: list[int] = []
    for first in range(0, len(cases), batch):
        part = slice(first, first + batch)
        given = loop.answers([case.prompt for case in cases[part]], kept[part], positions)
        right += [int(text == item["answer"]) for text, item in zip(given, items[part], strict=True)]
    return "".join(map(str, right))


def outcome_inside(
    answerer: Answerer, cases: list[Case], items: list[dict[str, Any]], method: Method, batch: int
) -> str:
    """As `outcome`, for a method that works inside the language model."""
    right: list[int] = []
    with answerer.pruned(method):
        for first in range(0, len(cases), batch):
            part = slice(first, first + batch)
            prompts = [
                question_prompt(case.picture, item["question"])
                for case, item in zip(cases[part], items[part], strict=True)
            ]
            given = answerer.answer(prompts, max_new_tokens=5, do_sample=False)
            right += [int(a.text.strip() == item["answer"]) for a, item in zip(given, items[part], strict=True)]
    return "".join(map(str, right))


def gate_facts(selection: Any) -> dict[str, Any]:
    """How the gate behaved on one question."""
    parts = selection.crops if isinstance(selection, stacktok.CropSelection) else (selection,)
    steps = max(1, sum(part.k for part in parts))
    return {
        "rows": parts[0].m,
        "strictness": round(float(np.mean([part.strictness for part in parts])), 4),
        "bound": round(sum(int(part.bound.sum()) for part in parts) / steps, 4),
        "relevance_picks": sum(part.criterion.count("relevance") for part in parts),
    }


def run_chunk(
    path: Path, answerer: Answerer, scenes: list[Any], names: list[str], policies: list[str], batch: int
) -> None:
    """Bring one result file up to date."""
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}, "gate": {}, "seconds": {}}

    def missing(name: str) -> list[tuple[int, str]]:
        wanted = ["kept"] if name in INSIDE else policies
        return [(k, p) for k in BUDGETS for p in wanted if cell_name(name, k, p) not in done["cells"]]

    if FULL in done["cells"] and not any(missing(name) for name in names):
        return
    loop = Loop(answerer.model, answerer.processor)
    cases, items = load_cases(loop, scenes)
    done.setdefault("items", items)
    if done["items"] != items:
        raise ValueError(f"{path} holds other questions than these scenes give; use another --out")
    if FULL not in done["cells"]:
        done["cells"][FULL] = outcome(loop, cases, items, [None] * len(cases), "compact", batch)
    for name in names:
        cells = missing(name)
        if not cells:
            continue
        if name in INSIDE:
            for k, positions in cells:
                right = outcome_inside(answerer, cases, items, INSIDE[name](k), batch)
                done["cells"][cell_name(name, k, positions)] = right
        else:
            start = time.perf_counter()
            reduced = [VARIANTS[name](case) for case in cases]
            done["seconds"][name] = round((time.perf_counter() - start) / len(cases), 6)
            if name == "StackTok":
                done["gate"] = {str(k): [gate_facts(one[k].record) for one in reduced] for k in BUDGETS}
            for k, positions in cells:
                right = outcome(loop, cases, items, [one[k] for one in reduced], positions, batch)
                done["cells"][cell_name(name, k, positions)] = right
        part = path.with_suffix(".part")
        part.write_text(json.dumps(done))
        os.replace(part, path)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--style", choices=("standard", "detail"), default="standard")
    parser.add_argument("--first", type=int, default=0, help="number of the first scene")
    parser.add_argument("--scenes", type=int, default=280)
    names = [*VARIANTS, *INSIDE]
    default = [*MAIN, *INSIDE, *DEPTHS, *AUTO, *ABLATIONS]
    parser.add_argument("--variants", nargs="*", default=default, choices=names, metavar="NAME")
    parser.add_argument("--positions", nargs="*", default=["compact", "kept"], choices=["compact", "kept"])
    parser.add_argument("--batch", type=int, default=40)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    answerer = Answerer(str(arguments.model), dtype="float32", device="cpu")
    style = {"standard": STANDARD, "detail": DETAIL}[arguments.style]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = arguments.first + arguments.scenes
    with Progress(*columns) as progress:
        for first in progress.track(range(arguments.first, last, CHUNK), description="chunks of scenes"):
            count = min(CHUNK, last - first)
            scenes = [make_scene(seed_for(arguments.split, first + index), style) for index in range(count)]
            path = arguments.out / f"{arguments.split}-{first:05d}-{count}.json"
            run_chunk(path, answerer, scenes, arguments.variants, arguments.positions, arguments.batch)


if __name__ == "__main__":
    main()
