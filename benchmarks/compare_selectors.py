"""What selectors keep of the embedded model's accuracy: every variant, budget and position policy, item by item.

    python benchmarks/compare_selectors.py --model FOLDER --out DIR [--split test] [--scenes 280] [--variants NAME ...]

Scenes are taken in chunks; each chunk is one result file, written whole, with the outcome of every question under
every cell. A killed run loses at most one variant of a chunk, and a second start does what is missing: cells that a
file does not have yet are added to it. Several runs may share a folder if their scenes (`--first`, `--scenes`) differ.
Pictures are encoded once per chunk; prefixes of one selection serve all budgets. Methods that work inside the language
model are asked through the runtime, at their own position policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling

import stacktok
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.evaluation.loop import Loop, Prompt
from stacktok.methods import FastV, SparseVLM
from stacktok.methods.base import Method
from stacktok.scenes import DETAIL, STANDARD, make_scene, questions, render, seed_for

BUDGETS = (192, 128, 64, 32, 16, 8)
CHUNK = 20


@dataclass(frozen=True, eq=False)
class Case:
    """A question with what its image's other questions share."""

    inputs: dict[str, Any]
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
# Methods inside the language model, each at its own position policy. Two of four layers on all tokens leave FastV no
# average to meet, so its budget is what stays after the cut.
INSIDE: dict[str, tuple[Callable[[int], Method], str]] = {
    "FastV": (lambda k: FastV(budget=k, counting="kept"), "kept"),
    "SparseVLM": (lambda k: SparseVLM(budget=k), "compact"),
    "SparseVLM +": (lambda k: SparseVLM(budget=k, variant="+"), "kept"),
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
            cases.append(Case(encoded[2], loop.prompt(picture, encoded, question.text), prepared))
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


@torch.inference_mode()
def outcome_inside(
    loop: Loop, cases: list[Case], items: list[dict[str, Any]], method: Method, batch: int
) -> tuple[str, float]:
    """As `outcome`, for a method inside the language model; and its visual tokens per layer, averaged."""
    right: list[int] = []
    tokens: list[float] = []
    with method(loop.model, loop.processor) as run:
        for first in range(0, len(cases), batch):
            part = cases[first : first + batch]
            texts = loop.processor.tokenizer.pad(
                {"input_ids": [case.prompt.ids.tolist() for case in part]}, padding_side="left", return_tensors="pt"
            )
            images = {name: torch.cat([case.inputs[name] for case in part]) for name in part[0].inputs}
            output = loop.model.generate(**texts, **images, max_new_tokens=loop.max_new_tokens, do_sample=False)
            given = loop.processor.batch_decode(output[:, texts["input_ids"].shape[1] :], skip_special_tokens=True)
            wanted = [item["answer"] for item in items[first : first + batch]]
            right += [int(text.strip() == answer) for text, answer in zip(given, wanted, strict=True)]
            tokens += [result.average for result in run.last]
    return "".join(map(str, right)), round(float(np.mean(tokens)), 2)


@contextmanager
def remembered_tower(model: Any) -> Iterator[None]:
    """Let the vision tower encode a picture once, however often it is shown while the block lasts."""
    tower = model.model.vision_tower
    stock, known = tower.forward, {}

    def forward(pixel_values: torch.Tensor, **options: Any) -> Any:
        keys = [hash(picture.numpy().tobytes()) for picture in pixel_values]
        for index, key in enumerate(keys):
            if key not in known:
                known[key] = stock(pixel_values[index : index + 1], **options).hidden_states
        states = tuple(torch.cat(layer) for layer in zip(*(known[key] for key in keys), strict=True))
        return BaseModelOutputWithPooling(last_hidden_state=states[-1], hidden_states=states)

    tower.forward = forward
    try:
        yield
    finally:
        tower.forward = stock


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
    path: Path,
    model: str,
    loop: Loop,
    scenes: list[Any],
    names: list[str],
    budgets: list[int],
    policies: list[str],
    batch: int,
) -> None:
    """Bring one result file up to date; ``model`` is the digest of the weights that it holds for."""
    done: dict[str, Any] = {"cells": {}, "gate": {}, "seconds": {}, "tokens per layer": {}}
    if path.exists():
        done = json.loads(path.read_text())
    if done.setdefault("model", model) != model:
        raise ValueError(f"{path} holds results of other weights; use another --out")

    def missing(name: str) -> list[tuple[int, str]]:
        wanted = [INSIDE[name][1]] if name in INSIDE else policies
        return [(k, p) for k in budgets for p in wanted if cell_name(name, k, p) not in done["cells"]]

    if FULL in done["cells"] and not any(missing(name) for name in names):
        return
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
            with remembered_tower(loop.model):
                for k, positions in cells:
                    right, tokens = outcome_inside(loop, cases, items, INSIDE[name][0](k), batch)
                    done["cells"][cell_name(name, k, positions)] = right
                    done["tokens per layer"][cell_name(name, k, positions)] = tokens
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
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS), choices=BUDGETS)
    parser.add_argument("--positions", nargs="*", default=["compact", "kept"], choices=["compact", "kept"])
    parser.add_argument("--batch", type=int, default=40)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest()
    processor = AutoProcessor.from_pretrained(arguments.model)
    loop = Loop(AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32).eval(), processor)
    style = {"standard": STANDARD, "detail": DETAIL}[arguments.style]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = arguments.first + arguments.scenes
    with Progress(*columns) as progress:
        for first in progress.track(range(arguments.first, last, CHUNK), description="chunks of scenes"):
            count = min(CHUNK, last - first)
            scenes = [make_scene(seed_for(arguments.split, first + index), style) for index in range(count)]
            path = arguments.out / f"{arguments.split}-{first:05d}-{count}.json"
            run_chunk(
                path, model, loop, scenes, arguments.variants, arguments.budgets, arguments.positions, arguments.batch
            )


if __name__ == "__main__":
    main()
