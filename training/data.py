"""Batches of scenes, each a function of the run's seed range, stage and step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stacktok.scenes.draw import Draw
from stacktok.scenes.questions import FAMILIES, Question, questions
from stacktok.scenes.render import render_with_owners
from stacktok.scenes.scene import Box, Scene, Style, make_scene
from stacktok.scenes.splits import require_split, seed_for
from stacktok.scenes.vocabulary import CATEGORY, COUNTS
from training.labels import PatchLabels, patch_labels
from training.text import build_tokenizer


@dataclass
class Batch:
    """Scenes of one step; n patches, t text tokens (several questions in a row, padded).

    Parameters
    ----------
    pixels
        (b, 3, size, size) bytes.
    corner
        (b, 2) row and column, in patches, of the window that the pixels are cut from.
    words, box, centre, present
        Patch labels (`PatchLabels`), stacked.
    ids
        (b, t) tokens of all questions of a scene, each with prompt end and answer.
    block
        (b, t) number of the question a token belongs to, -1 on padding.
    offset
        (b, t) position of a token inside its question.
    target
        (b, t) token to predict at this place, -100 outside answers.
    family
        (b, t) number of the question's family.
    """

    pixels: Tensor
    corner: Tensor
    words: Tensor
    box: Tensor
    centre: Tensor
    present: Tensor
    ids: Tensor
    block: Tensor
    offset: Tensor
    target: Tensor
    family: Tensor


class TextPacker:
    """Turns the questions of a scene into one row of tokens."""

    def __init__(self) -> None:
        tokenizer = build_tokenizer()
        self._encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
        self._cache: dict[str, list[int]] = {}
        self.end = tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, without the start token."""
        if text not in self._cache:
            self._cache[text] = self._encode(text)
        return self._cache[text]

    def pack(self, asked: list[list[Question]]) -> dict[str, Tensor]:
        """Lay the questions of each scene out in a row."""
        families = list(FAMILIES)
        rows = []
        for scene_questions in asked:
            row: list[tuple[int, int, int, int, int]] = []
            for number, question in enumerate(scene_questions):
                prompt = self.tokens(f"{question.text} ASSISTANT:")
                answer = [*self.tokens(question.answer), self.end]
                ids = prompt + answer[:-1]
                targets = [-100] * (len(prompt) - 1) + answer
                family = families.index(question.family)
                row += [(ids[k], number, k, targets[k], family) for k in range(len(ids))]
            rows.append(row)
        width = max(1, max(map(len, rows)))
        filler = (self.pad, -1, 0, -100, 0)
        table = torch.tensor([row + [filler] * (width - len(row)) for row in rows])
        return dict(zip(("ids", "block", "offset", "target", "family"), table.unbind(-1), strict=True))


def training_questions(scene: Scene, per_family: int) -> list[Question]:
    """Questions for learning: the benchmark's, and a count of every kind that occurs more than once."""
    asked = questions(scene, per_family)
    texts = {question.text for question in asked}
    for kind in CATEGORY:
        count = scene.count(kind)
        text = f"How many {kind}s are there?"
        if count > 1 and text not in texts:
            asked.append(Question(text, COUNTS[count], "counting"))
    return asked


class Scenes(Dataset[Batch]):
    """Batch number i holds the scenes i * batch ... (i + 1) * batch - 1 after an offset."""

    def __init__(
        self, styles: tuple[Style, ...], batch: int, first: int, steps: int, canvas: int, patch: int, per_family: int
    ) -> None:
        self.styles, self.batch, self.first, self.steps = styles, batch, first, steps
        self.canvas, self.patch, self.per_family = canvas, patch, per_family
        self.packer = TextPacker()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        # One style per batch, since all pictures of a batch share a size.
        style = self.styles[step % len(self.styles)]
        numbers = (self.first + step * self.batch + k for k in range(self.batch))
        seeds = [require_split(seed_for("train", number), "train") for number in numbers]
        placed = [in_window(make_scene(seed, style), self.canvas, self.patch) for seed in seeds]
        return make_batch(placed, style.size, self.patch, training_questions, self.per_family, self.packer)


def in_window(scene: Scene, canvas: int, patch: int) -> tuple[Scene, tuple[int, int]]:
    """Move a small scene to a random window of a larger canvas; returns it with the window's row and column."""
    if scene.size == canvas:
        return scene, (0, 0)
    draw = Draw(scene.seed + 1)
    row, column = (draw.integer(0, (canvas - scene.size) // patch) for _ in range(2))

    def moved(box: Box) -> Box:
        x, y = column * patch, row * patch
        return box[0] + x, box[1] + y, box[2] + x, box[3] + y

    things = tuple(replace(thing, box=moved(thing.box)) for thing in scene.things)
    signs = tuple(replace(sign, box=moved(sign.box)) for sign in scene.signs)
    return replace(scene, size=canvas, things=things, signs=signs), (row, column)


def make_batch(
    placed: list[tuple[Scene, tuple[int, int]]],
    size: int,
    patch: int,
    ask: Callable[[Scene, int], list[Question]],
    per_family: int,
    packer: TextPacker,
) -> Batch:
    """Render, cut, label and pack scenes."""
    pixels, labels = [], []
    for scene, (row, column) in placed:
        image, owners = render_with_owners(scene)
        area = slice(row * patch, row * patch + size), slice(column * patch, column * patch + size)
        pixels.append(torch.from_numpy(np.asarray(image)[area].transpose(2, 0, 1).copy()))
        labels.append(patch_labels(scene, owners[area], patch, (column * patch, row * patch)))
    text = packer.pack([ask(scene, per_family) for scene, _ in placed])
    corner = torch.tensor([window for _, window in placed])
    return Batch(pixels=torch.stack(pixels), corner=corner, **_stack(labels), **text)


def _stack(labels: list[PatchLabels]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.stack([getattr(label, name) for label in labels]))
        for name in ("words", "box", "centre", "present")
    }


def batches(data: Scenes, start: int, workers: int) -> Iterator[Batch]:
    """Batches from a step on, made by worker processes ahead of time."""
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=range(start, len(data)),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    yield from loader
