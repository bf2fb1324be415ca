"""Batches of scenes, each a function of the run's seed range, stage and step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
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
    """Scenes of one step; c crops (one view, or base and tiles), n patches per crop, t text tokens.

    Parameters
    ----------
    pixels
        (b * c, 3, size, size) bytes.
    corner
        (b * c, 2) row and column, in patches, of the window that the pixels are cut from.
    words, box, centre, owner, present
        Patch labels (`PatchLabels`) of each crop, stacked (b * c, ...).
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
    owner: Tensor
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


@dataclass(frozen=True)
class View:
    """How a model sees a picture.

    Parameters
    ----------
    canvas
        Edge of the pictures.
    patch
        Edge of a patch.
    tile
        Edge of a tile where the model takes a base view and tiles; None where it takes the picture as it is.
    """

    canvas: int
    patch: int
    tile: int | None = None


class Scenes(Dataset[Batch]):
    """Batch number i holds the scenes i * batch ... (i + 1) * batch - 1 after an offset."""

    def __init__(
        self, styles: tuple[Style, ...], batch: int, first: int, steps: int, view: View, per_family: int
    ) -> None:
        self.styles, self.batch, self.first, self.steps = styles, batch, first, steps
        self.view, self.per_family = view, per_family
        self.packer = TextPacker()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        # One style per batch, since all pictures of a batch share a size.
        style = self.styles[step % len(self.styles)]
        numbers = (self.first + step * self.batch + k for k in range(self.batch))
        scenes = [make_scene(require_split(seed_for("train", number), "train"), style) for number in numbers]
        return make_batch(scenes, self.view, training_questions, self.per_family, self.packer)


def make_batch(
    scenes: list[Scene],
    view: View,
    ask: Callable[[Scene, int], list[Question]],
    per_family: int,
    packer: TextPacker,
) -> Batch:
    """Render, cut, label and pack scenes."""
    crops: list[tuple[npt.NDArray[np.uint8], tuple[int, int], PatchLabels]] = []
    asked = []
    for small in scenes:
        scene, corner = in_window(small, view)
        asked.append(ask(scene, per_family))
        crops += _window(scene, small.size, corner, view) if view.tile is None else _tiles(scene, view)
    return Batch(
        pixels=torch.from_numpy(np.stack([pixels for pixels, _, _ in crops])).permute(0, 3, 1, 2).contiguous(),
        corner=torch.tensor([corner for _, corner, _ in crops]),
        **_stack([labels for _, _, labels in crops]),
        **packer.pack(asked),
    )


def in_window(scene: Scene, view: View) -> tuple[Scene, tuple[int, int]]:
    """Move a small scene to a random window of a larger canvas; returns it with the window's row and column."""
    if scene.size == view.canvas:
        return scene, (0, 0)
    draw = Draw(scene.seed + 1)
    row, column = (draw.integer(0, (view.canvas - scene.size) // view.patch) for _ in range(2))

    def moved(box: Box) -> Box:
        x, y = column * view.patch, row * view.patch
        return box[0] + x, box[1] + y, box[2] + x, box[3] + y

    things = tuple(replace(thing, box=moved(thing.box)) for thing in scene.things)
    signs = tuple(replace(sign, box=moved(sign.box)) for sign in scene.signs)
    return replace(scene, size=view.canvas, things=things, signs=signs), (row, column)


Crop = tuple[npt.NDArray[np.uint8], tuple[int, int], PatchLabels]


def _window(scene: Scene, size: int, corner: tuple[int, int], view: View) -> list[Crop]:
    """The part of a picture that holds everything."""
    image, owners = render_with_owners(scene)
    top, left = corner[0] * view.patch, corner[1] * view.patch
    area = slice(top, top + size), slice(left, left + size)
    return [(np.asarray(image)[area], corner, patch_labels(scene, owners[area], view.patch, (left, top)))]


def _tiles(scene: Scene, view: View) -> list[Crop]:
    """The whole picture at a tile's size, then its tiles, row by row."""
    if view.tile is None:
        raise ValueError("view.tile is None; tiles need an edge in pixels")
    image, owners = render_with_owners(scene)
    factor = view.canvas // view.tile
    base = np.asarray(image.resize((view.tile, view.tile), Image.Resampling.BICUBIC))
    # A base patch shows `factor` times the patch edge of the canvas, so the canvas is labelled in larger cells.
    crops: list[Crop] = [(base, (0, 0), patch_labels(scene, owners, view.patch * factor))]
    for top in range(0, view.canvas, view.tile):
        for left in range(0, view.canvas, view.tile):
            area = slice(top, top + view.tile), slice(left, left + view.tile)
            labels = patch_labels(scene, owners[area], view.patch, (left, top)).without_place()
            crops.append((np.asarray(image)[area], (0, 0), labels))
    return crops


def _stack(labels: list[PatchLabels]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.stack([getattr(label, name) for label in labels]))
        for name in ("words", "box", "centre", "owner", "present")
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
