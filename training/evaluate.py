"""Measure an exported model: ``python -m training.evaluate --model FOLDER --out evaluation.json``.

Exact match of greedy answers. With ``--packed`` all questions of a scene go through the model in one pass, in which
they do not see each other: an answer counts if every token of it and its end are the most likely ones, which is when
greedy generation gives it. Without, every question is asked alone, as a user would: chat template, processor, generate.
Two controls ask the same questions about a blank picture and about another scene's picture.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from stacktok.evaluation.statistics import mean_interval
from stacktok.scenes import DETAIL, FAMILIES, STANDARD, Question, Scene, Split, make_scene, questions, render, seed_for
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY, COLOURS
from training.data import TextPacker, View, make_batch
from training.losses import Heads, Objective

STYLES = {"standard": STANDARD, "detail": DETAIL}
CONTROLS = ("picture", "blank", "shuffled")
SUBSET_SCENES = 24
"""Scenes at the start of the split whose accuracy is given apart, for a quick check of shipped weights."""


@dataclass(frozen=True)
class Asked:
    """One question, the scene it is about, and whether it was answered right."""

    scene: int
    question: Question
    right: bool


class Answerer:
    """An exported model that answers questions about pictures."""

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answers(self, pictures: Sequence[Image.Image], texts: Sequence[str]) -> list[str]:
        """Answer each text about the picture at the same place."""
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
                add_generation_prompt=True,
            )
            for text in texts
        ]
        inputs = self.processor(text=prompts, images=list(pictures), padding=True, return_tensors="pt")
        output = self.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        decoded: list[str] = self.processor.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return [text.strip() for text in decoded]


def ask(
    answerer: Answerer,
    scenes: Sequence[Scene],
    control: str = "picture",
    batch: int = 16,
    say: Callable[[str], None] = lambda line: None,
) -> list[Asked]:
    """Ask the benchmark's questions about scenes.

    Parameters
    ----------
    answerer
        The model.
    scenes
        What is asked about.
    control
        Which picture is shown: the scene's own ("picture"), a grey one ("blank") or the next scene's ("shuffled").
    batch
        Questions per forward pass.
    say
        Where progress goes.
    """
    if control not in CONTROLS:
        raise ValueError(f"control is {control!r}; it must be one of {', '.join(CONTROLS)}")
    todo = [(index, question) for index, scene in enumerate(scenes) for question in questions(scene)]
    pictures: dict[int, Image.Image] = {}
    result: list[Asked] = []
    start = time.monotonic()
    for first in range(0, len(todo), batch):
        part = todo[first : first + batch]
        shown = [(index + (control == "shuffled")) % len(scenes) for index, _ in part]
        for index in set(shown):
            if index not in pictures:
                own = render(scenes[index])
                pictures[index] = Image.new("RGB", own.size, (128, 128, 128)) if control == "blank" else own
        given = answerer.answers([pictures[index] for index in shown], [question.text for _, question in part])
        result += [
            Asked(index, question, answer == question.answer)
            for (index, question), answer in zip(part, given, strict=True)
        ]
        if (first // batch) % 20 == 19:
            right = sum(asked.right for asked in result) / len(result)
            left = (time.monotonic() - start) * (len(todo) / len(result) - 1) / 60
            say(f"{control} {len(result)}/{len(todo)}  {100 * right:.1f} %  about {left:.1f} min left")
    return result


@torch.inference_mode()
def ask_packed(
    answerer: Answerer,
    scenes: Sequence[Scene],
    control: str = "picture",
    batch: int = 8,
    say: Callable[[str], None] = lambda line: None,
) -> list[Asked]:
    """Ask the same as `ask`, all questions of a scene in one pass; `batch` counts scenes."""
    if control not in CONTROLS:
        raise ValueError(f"control is {control!r}; it must be one of {', '.join(CONTROLS)}")
    vision, text = answerer.model.config.vision_config, answerer.model.config.text_config
    tile = vision.image_size if answerer.model.config.model_type == "llava_next" else None
    view = View(scenes[0].size, vision.patch_size, tile)
    objective = Objective(answerer.model, Heads(vision.hidden_size, text.hidden_size))
    packer = TextPacker()
    result: list[Asked] = []
    for first in range(0, len(scenes), batch):
        numbers = range(first, min(first + batch, len(scenes)))
        packed = make_batch([scenes[k] for k in numbers], view, questions, 1, packer)
        pixels = packed.pixels
        if control == "blank":
            pixels = torch.full_like(pixels, 128)
        elif control == "shuffled":
            others = [scenes[(k + 1) % len(scenes)] for k in numbers]
            pixels = make_batch(others, view, questions, 1, packer).pixels
        tokens, _ = objective.encode(pixels, packed.corner)
        _, right = objective.language(packed, objective.prompt(packed, tokens))
        for row, index in enumerate(numbers):
            for number, question in enumerate(questions(scenes[index])):
                result.append(Asked(index, question, bool(right[row][packed.block[row] == number].all())))
        say(f"{control} {len(result)} questions  {100 * sum(a.right for a in result) / len(result):.1f} %")
    return result


def summary(asked: Sequence[Asked]) -> dict[str, Any]:
    """Accuracy overall and per family, with 95 % bootstrap intervals over scenes."""
    groups = {"all": list(asked)}
    for family in FAMILIES:
        groups[family] = [one for one in asked if one.question.family == family]
    groups["local"] = [one for one in asked if one.question.local]
    groups["holistic"] = [one for one in asked if not one.question.local]
    return {name: _accuracy(group) for name, group in groups.items() if group}


def _accuracy(asked: Sequence[Asked]) -> dict[str, Any]:
    found = mean_interval([one.right for one in asked], groups=[one.scene for one in asked])
    ends = (found.low, found.high) if found.known else (found.estimate, found.estimate)
    return {
        "questions": len(asked),
        "accuracy": round(found.estimate, 4),
        "interval": [round(end, 4) for end in ends],
    }


def chance(asked: Sequence[Asked]) -> dict[str, float]:
    """Share that the best constant answer to each wording gets: what is known without looking."""
    wordings: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in asked:
        wordings[one.question.family, _wording(one.question.text)][_relative(one.question)] += 1
    result = {}
    for family in ("all", *FAMILIES):
        chosen = [counter for (name, _), counter in wordings.items() if family in ("all", name)]
        if chosen:
            top = sum(counter.most_common(1)[0][1] for counter in chosen)
            result[family] = round(top / sum(counter.total() for counter in chosen), 4)
    return result


def _wording(text: str) -> str:
    names = sorted((*CATEGORY, *COLOURS, *BACKGROUNDS), key=len, reverse=True)
    return re.sub(rf"\b(an? )?({'|'.join(names)})(s?)\b", "#", text)


def _relative(question: Question) -> str:
    """The answer; where the question itself offers it beside another kind, which of the two it is."""
    words = re.findall(r"\w+", question.text)
    return f"word {words.index(question.answer)}" if question.answer in words else question.answer


def evaluate(
    folder: Path, split: Split, style: str, count: int, packed: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything that the model card reports about accuracy."""
    scenes = [make_scene(seed_for(split, index), STYLES[style]) for index in range(count)]
    answerer = Answerer(folder)
    result: dict[str, Any] = {"split": split, "style": style, "scenes": count, "first_seed": scenes[0].seed}
    result["packed"] = packed
    for control in CONTROLS:
        start = time.monotonic()
        asked = (ask_packed if packed else ask)(answerer, scenes, control, say=say)
        result[control] = summary(asked)
        result[f"{control}_minutes"] = round((time.monotonic() - start) / 60, 2)
        early = [one for one in asked if one.scene < SUBSET_SCENES]
        result.setdefault("subset", {"scenes": SUBSET_SCENES})[control] = summary(early)["all"]
        if control == "picture":
            result["chance"] = chance(asked)
    return result


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--style", choices=tuple(STYLES), default="standard")
    parser.add_argument("--scenes", type=int, default=320)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = evaluate(
        arguments.model,
        arguments.split,
        arguments.style,
        arguments.scenes,
        arguments.packed,
        lambda line: print(line, flush=True),
    )
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result["picture"].items():
        low, high = value["interval"]
        print(
            f"{name:14} {100 * value['accuracy']:5.1f} %  ({100 * low:.1f} to {100 * high:.1f}), {value['questions']}"
        )


if __name__ == "__main__":
    main()
