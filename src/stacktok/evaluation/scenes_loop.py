"""The package's own loop over scenes: pictures are encoded once, and one selection serves all budgets it can.

Scenes are taken in chunks, and every method and condition on a chunk is one step. Steps go to a journal as they end,
so that a killed run loses at most one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.budget import Budget, Coverage, resolve_budget
from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import Reduction
from stacktok.evaluation.answering import Answerer, PruningLog, question_prompt
from stacktok.evaluation.cells import Cell, Outcome
from stacktok.evaluation.conditions import asked_instead, disturb_image, disturb_query
from stacktok.evaluation.loop import Loop, Prompt, obstacle
from stacktok.evaluation.plan import SCENES, ConditionPart
from stacktok.evaluation.scenes_task import MAX_NEW_TOKENS, right
from stacktok.evaluation.small_picture import SmallPicture
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.scenes import DETAIL, STANDARD, Question, Scene, make_scene, questions, render, seed_for

CHUNK = 20
"""Scenes per chunk."""

Columns = dict[str, list[Any]]


class Keyed(Protocol):
    """Something that is measured chunk by chunk."""

    @property
    def key(self) -> str:
        """Digest of everything that decides its numbers."""


class Journal:
    """Results of cells that are not finished, a line per cell and chunk.

    Parameters
    ----------
    path
        The file; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[tuple[str, int], Columns] = {}
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["cell"], entry["chunk"]] = entry["items"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    # The line that a killed run was writing.
                    continue

    def get(self, cell: Keyed, chunk: int) -> Columns | None:
        """The items of a chunk, or None."""
        return self._known.get((cell.key, chunk))

    def add(self, chunk: int, found: Mapping[str, Columns]) -> None:
        """Note the items of some cells, by their keys."""
        self._known |= {(key, chunk): items for key, items in found.items()}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as stream:
                for key, items in found.items():
                    # A torn line of an earlier run ends here.
                    stream.write("\n" + json.dumps({"cell": key, "chunk": chunk, "items": items}))
                stream.flush()
                os.fsync(stream.fileno())


@dataclass(frozen=True)
class Item:
    """A question about a scene, and its number among all."""

    number: int
    scene: Scene
    question: Question


class Bench:
    """The scenes of some cells with a loaded model.

    Parameters
    ----------
    answerer
        The model.
    settings
        Of a cell; all cells of the bench have its scenes, split and style.
    """

    def __init__(self, answerer: Answerer, settings: Mapping[str, Any]) -> None:
        self.answerer, self.batch = answerer, settings["batch_size"]
        style = {"standard": STANDARD, "detail": DETAIL}[settings["style"]]
        scenes = [make_scene(seed_for(settings["split"], index), style) for index in range(settings["scenes"])]
        self.items: list[Item] = []
        for scene in scenes:
            self.items += [Item(len(self.items) + i, scene, asked) for i, asked in enumerate(questions(scene))]
        self.chunks = [
            {scene.seed for scene in scenes[first : first + CHUNK]} for first in range(0, len(scenes), CHUNK)
        ]
        self._seeds = [item.scene.seed for item in self.items]
        self._encoded: dict[int, tuple[Any, Any]] = {}
        self._prompts: dict[int, Prompt] = {}

    @cached_property
    def loop(self) -> Loop | None:
        """The way without hooks; None where the model is not on a CPU or cannot be asked that way."""
        model, processor = self.answerer.model, self.answerer.processor
        if model.device.type != "cpu" or obstacle(model, processor) is not None:
            return None
        return Loop(model, processor, MAX_NEW_TOKENS)

    def asked(self, cell: Cell) -> list[Item]:
        """The questions of a cell."""
        family = cell.task.task.removeprefix(SCENES).removeprefix("/")
        found = [item for item in self.items if family in ("", item.question.family)]
        return found[: cell.settings["limit"]]

    def step(self, cells: Sequence[Cell], chunk: int) -> dict[str, Columns]:
        """Items of cells that differ in budget and positions alone, on one chunk; by their keys."""
        items = [item for item in self.asked(cells[0]) if item.scene.seed in self.chunks[chunk]]
        for seed in [seed for seed in self._encoded if seed not in self.chunks[chunk]]:
            del self._encoded[seed]
            self._prompts.clear()
        method, condition = cells[0].build_method(), cells[0].condition
        begin = time.perf_counter()
        if self.loop is not None and (method is None or isinstance(method, FeatureMethod)):
            found = self._without_hooks(self.loop, cells, items)
        elif condition is not None:
            raise ValueError(
                f"condition {condition.name!r} needs a model on a CPU with plain positions; leave conditions out"
            )
        else:
            found = {cell.key: self._through_runtime(cell, items) for cell in cells}
        for columns in found.values():
            columns["seconds"] = [time.perf_counter() - begin]
        return found

    def _without_hooks(self, loop: Loop, cells: Sequence[Cell], items: Sequence[Item]) -> dict[str, Columns]:
        prompts = [self._prompt(loop, item) for item in items]
        kept: list[dict[Budget | None, Reduction | None]] = [{None: None} for _ in items]
        condition, method = cells[0].condition, cells[0].build_method()
        if isinstance(method, FeatureMethod):
            budgets = [cell.budget for cell in cells if cell.budget is not None]
            prepared: dict[int, Prepared] = {}
            for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
                seed, query = item.scene.seed, prompt.query
                if seed not in prepared:
                    seen = prompt.image
                    if method.reads_tower and method.tower_signal != TowerSignal():
                        seen, _ = loop.encode(self._encoded[seed][0], method.tower_signal)
                    if condition is not None:
                        seen = disturb_image(condition, seen, seed)
                    if isinstance(method, SmallPicture):
                        picture = self._encoded[seed][0]
                        prepared[seed] = method.prepare_picture(picture, seen, loop.model, loop.processor)
                    else:
                        prepared[seed] = method.prepare(seen)
                if condition is not None:
                    query = self._disturbed(loop, condition, item)
                kept[number] = reductions(method, prepared[seed], query, budgets)
        return {
            cell.key: self._answers(loop, items, prompts, [one[cell.budget] for one in kept], cell) for cell in cells
        }

    def _answers(
        self,
        loop: Loop,
        items: Sequence[Item],
        prompts: Sequence[Prompt],
        kept: Sequence[Reduction | None],
        cell: Cell,
    ) -> Columns:
        columns: Columns = {}
        for first in range(0, len(items), self.batch):
            part = slice(first, first + self.batch)
            texts = loop.answers(prompts[part], kept[part], cell.positions or "compact")
            for item, text, prompt, left in zip(items[part], texts, prompts[part], kept[part], strict=True):
                full = prompt.image.length
                log = PruningLog(full, full, full) if left is None else PruningLog.of(full, [left], float(len(left)))
                _append(columns, item, text, log)
        return columns

    def _through_runtime(self, cell: Cell, items: Sequence[Item]) -> Columns:
        columns: Columns = {}
        pictures = {item.scene.seed: render(item.scene) for item in items}
        with self.answerer.pruned(cell.build_method()):
            for first in range(0, len(items), self.batch):
                part = items[first : first + self.batch]
                asked = [question_prompt(pictures[item.scene.seed], item.question.text) for item in part]
                given = self.answerer.answer(asked, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
                for item, answer in zip(part, given, strict=True):
                    _append(columns, item, answer.text, answer.log)
        return columns

    def _prompt(self, loop: Loop, item: Item) -> Prompt:
        if item.number not in self._prompts:
            seed = item.scene.seed
            if seed not in self._encoded:
                picture = render(item.scene)
                self._encoded[seed] = picture, loop.encode(picture)
            self._prompts[item.number] = loop.prompt(*self._encoded[seed], item.question.text)
        return self._prompts[item.number]

    def _disturbed(self, loop: Loop, condition: ConditionPart, item: Item) -> Any:
        other = self.items[asked_instead(condition, item.number, self._seeds)]
        return disturb_query(condition, loop.query(other.question.text), self._words, item.number)

    @cached_property
    def _words(self) -> Any:
        return None if self.loop is None else self.loop.vocabulary()


def run_cells(
    cells: Sequence[Cell], answerer: Answerer, journal: Journal, tick: Callable[[float, str], None]
) -> Iterator[Outcome]:
    """Measure cells of one model on the same scenes; see `stacktok.evaluation.run.LocalRunner`.

    Parameters
    ----------
    cells
        The cells; those of one method stand together.
    answerer
        Their model.
    journal
        Where steps are noted, and found again.
    tick
        Callback, called after every step with the number of cells that it amounts to, and a text.
    """
    bench = Bench(answerer, cells[0].settings)
    steps = [list(alike) for _, alike in groupby(cells, key=lambda c: (c.label, c.condition, c.task))]
    for chunk, scenes in enumerate(bench.chunks):
        for alike in list(steps):
            todo = [cell for cell in alike if journal.get(cell, chunk) is None]
            try:
                if todo:
                    journal.add(chunk, bench.step(todo, chunk))
            except Exception as error:  # a failure is that of the method at hand
                steps.remove(alike)
                for cell in alike:
                    yield cell, None, error
                continue
            done = min((chunk + 1) * CHUNK, cells[0].settings["scenes"])
            where = f"{alike[0].model.name}, {alike[0].label}: scenes {done - len(scenes) + 1} to {done}"
            tick(len(alike) / len(bench.chunks), where if todo else "")
    for cell in (cell for alike in steps for cell in alike):
        parts = [journal.get(cell, chunk) or {} for chunk in range(len(bench.chunks))]
        columns: Columns = {}
        for name in parts[0]:
            columns[name] = [value for part in parts for value in part.get(name, ())]
        seconds = sum(columns.pop("seconds"))
        mean = sum(columns["score"]) / len(columns["score"])
        items = bench.asked(cell)
        shared = {
            "group": [item.scene.seed for item in items],
            "family": [item.question.family for item in items],
            "question": [item.question.text for item in items],
            "expected": [item.question.answer for item in items],
        }
        result = {"metrics": {"exact_match": mean}, "score": cell.task.scale * mean, "replicates": None}
        yield cell, {**result, "items": columns, "questions": shared, "seconds": round(seconds, 3)}, None


def reductions(
    method: FeatureMethod, prepared: Prepared, query: torch.Tensor, budgets: Sequence[Budget]
) -> dict[Budget | None, Reduction | None]:
    """An image reduced to several budgets; a prefix of the largest selection where that is the same.

    Parameters
    ----------
    method
        The method; its own budget is not looked at.
    prepared
        The image.
    query
        Input embeddings of the query, (m, d).
    budgets
        Tokens to keep.
    """
    image = prepared.image
    found: dict[Budget | None, Reduction | None] = {}
    for budget in (own for own in budgets if Coverage.of(own) is not None):
        (kept,) = method.reduce_prompt([prepared], query, budget)
        found[budget] = replace(kept.read(), record=_detached(kept.record))
    sizes = {budget: resolve_budget(budget, image.n, image.capacity) for budget in budgets if budget not in found}
    largest: Reduction | None = None
    for budget, k in sorted(sizes.items(), key=lambda pair: -pair[1]):
        shorter = None if largest is None else _prefix(largest.record, k)
        if largest is not None and shorter is not None:
            indices = shorter.indices if isinstance(shorter, CropSelection) else [shorter.indices]
            kept = image.keep(indices, record=shorter, keep_newlines=method.keep_newlines).timed(largest.seconds)
        else:
            (kept,) = method.reduce_prompt([prepared], query, budget)
            largest = largest or kept
        found[budget] = replace(kept.read(), record=_detached(kept.record))
    return found


def _prefix(record: Any, k: int) -> Selection | CropSelection | None:
    """The selection of a smaller budget; None where it is not a prefix."""
    if not isinstance(record, (Selection, CropSelection)):
        return None
    try:
        return record.prefix(k, refine=True)
    except ValueError:
        return None


def _detached(record: Any) -> Any:
    """A record without affinities, of which a chunk would hold gigabytes."""
    return record.detach() if isinstance(record, (Selection, CropSelection)) else record


def _append(columns: Columns, item: Item, text: str, log: PruningLog) -> None:
    row = {"score": right(text, item.question.answer), "answer": text.strip(), **log.to_dict()}
    for name, value in row.items():
        columns.setdefault(name, []).append(value)
