"""Cells: one model, method, budget, position policy, condition and task each, with a result file of its own.

A result file is named after everything that decides its numbers, written beside its place and moved there whole. So a
second start does what is missing, and a changed setting finds no file. A method whose results change under the same
parameters says so by its `revision`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stacktok import embedded
from stacktok.core.budget import Budget
from stacktok.evaluation.plan import (
    FULL,
    ConditionPart,
    MethodPart,
    ModelPart,
    Plan,
    Positions,
    TaskPart,
    is_scenes,
    parse_plan,
)
from stacktok.methods.base import Method
from stacktok.methods.registry import method_class

FORMAT = 2
_EDGE = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


Outcome = tuple["Cell", "dict[str, Any] | None", "BaseException | None"]
"""A cell with its result, or with the error that it ended in."""


@dataclass(frozen=True)
class Cell:
    """One model, method, budget, position policy, condition and task.

    Attributes
    ----------
    model, method, budget, positions, condition, task
        Parts of the plan; method and budget are None for the unpruned model, positions for a method's own default,
        condition for the plain one.
    log
        What is stored per item.
    settings
        Everything that decides the numbers, as plain values.
    """

    model: ModelPart
    method: MethodPart | None
    budget: Budget | None
    positions: Positions | None
    condition: ConditionPart | None
    task: TaskPart
    log: str
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The method's name in tables."""
        return FULL if self.method is None else self.method.name

    @property
    def _names(self) -> list[str]:
        budget = "all tokens" if self.budget is None else f"budget {self.budget}"
        optional = (self.positions, self.condition and self.condition.name)
        return [self.model.name, self.label, budget, *(part for part in optional if part), self.task.name]

    @cached_property
    def key(self) -> str:
        """Digest of the settings."""
        return digest_of(self.settings)

    @property
    def file(self) -> str:
        """Name of the result file."""
        readable = ".".join(re.sub(r"[^a-z0-9]+", "-", p.lower().replace("%", "pct")).strip("-") for p in self._names)
        return f"{readable}.{self.key}.json"

    def __str__(self) -> str:
        return ", ".join(self._names)

    def build_method(self) -> Method | None:
        """The method with its parameters, or None for the unpruned model."""
        return None if self.method is None else build_method(self.method, self.budget, self.positions)


def digest_of(values: Any) -> str:
    """Digest of plain values."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_method(part: MethodPart, budget: Budget | None, positions: Positions | None = None) -> Method:
    """A method of the plan as an object; settings that it does not know are an error."""
    from stacktok.evaluation.base_view import BaseView
    from stacktok.evaluation.evidence_dpp import EvidenceDPP
    from stacktok.evaluation.small_picture import SmallPicture

    known = (BaseView, EvidenceDPP, SmallPicture)
    controls: dict[str, type[Method]] = {control.plan_name: control for control in known}
    kind = controls.get(part.method) or method_class(part.method)
    given = part.settings if positions is None else {**part.settings, "positions": positions}
    try:
        return kind(budget=budget, **given)
    except TypeError as error:
        raise ValueError(f"method {part.name!r} cannot be built from its settings: {error}") from None


def cells_of(plan: Plan) -> list[Cell]:
    """Every cell of a plan, the unpruned model first; those of one model stand together.

    Settings that a method does not accept and local checkpoints that are not there are errors here, before anything
    runs. Conditions disturb what selectors before the language model see, so that others have no cells under them.
    """
    cells = []
    engine: dict[str, Any] = {"name": plan.engine}
    if plan.engine == "lmms-eval":
        engine["version"] = installed_version("lmms-eval")
    common = {"engine": engine, "batch_size": plan.batch_size, "dtype": plan.dtype, "limit": plan.limit}
    for model in plan.models:
        source = {"model": model.name, "pretrained": model.pretrained, "checkpoint": fingerprint(model.pretrained)}
        runs: list[tuple[MethodPart | None, ConditionPart | None, Budget | None, Positions | None]] = []
        if plan.full:
            runs.append((None, None, None, None))
        for method in plan.methods:
            pairs = list(plan.runs_of(model, method))
            objects = [build_method(method, *pair) for pair in pairs]
            if plan.engine == "loop" and any(one.before is not None or one.stage == "picture" for one in objects):
                raise ValueError(
                    f"method {method.name!r} works before the vision tower, and the engine 'loop' encodes every "
                    "picture once and whole, for all methods; use the engine lmms-eval, or leave it out"
                )
            before = [one.stage == "before" for one in objects]
            for condition in (None, *plan.conditions):
                runs += [
                    (method, condition, *pair)
                    for pair, alone in zip(pairs, before, strict=True)
                    if alone or condition is None
                ]
        for part, condition, budget, positions in runs:
            chosen: dict[str, Any] = {"label": FULL, "method": None, "budget": budget}
            if part is not None:
                built = build_method(part, budget)
                chosen = {**chosen, "label": part.name, "method": part.method, "parameters": part.settings}
                chosen |= {"revision": built.revision, "positions": positions}
                chosen["condition"] = condition and condition.model_dump(mode="json")
            for task in plan.tasks:
                scenes = {"scenes": plan.scenes, "split": plan.split, "style": model.style}
                own = scenes if is_scenes(task.task) else {}
                settings = {**common, **source, **chosen, **own, "task": task.model_dump(mode="json")}
                log = (part and part.log) or plan.log
                cells.append(
                    Cell(model, part, budget, positions, condition, task, log, json.loads(json.dumps(settings)))
                )
    return cells


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint(pretrained: str) -> str | None:
    """Digest of a local checkpoint, so that new weights in an old folder are another setting; None for a hub name.

    Weights and config.json count; of a large file its size and its first and last megabyte.
    """
    path = Path(embedded.resolve(pretrained))
    if not path.is_dir():
        if path.is_absolute() or pretrained.startswith((".", "~", embedded.PREFIX)) or pretrained.count("/") > 1:
            raise ValueError(f"pretrained {pretrained!r} is not a folder; give a checkpoint's folder or a hub name")
        return None
    if not (path / "config.json").is_file():
        raise ValueError(f"pretrained {pretrained!r} has no config.json; give a checkpoint's folder or a hub name")
    digest = hashlib.sha256()
    counted = (entry for entry in path.iterdir() if entry.name == "config.json" or entry.name.endswith(_WEIGHTS))
    for file in sorted(counted):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            if size > _EDGE:
                stream.seek(max(_EDGE, size - _EDGE))
                digest.update(stream.read())
    return digest.hexdigest()[:16]


class Results:
    """The folder of a plan's results.

    Parameters
    ----------
    folder
        Holds ``run.json``, the plan with the names of its cells, ``cells``, and ``questions`` that cells share.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.cells = self.folder / "cells"

    def start(self, plan: Plan, cells: Sequence[Cell]) -> None:
        """Note which cells belong to the plan as it is now."""
        self.cells.mkdir(parents=True, exist_ok=True)
        for leftover in self.cells.glob("*.part"):
            leftover.unlink(missing_ok=True)
        values = {"plan": plan.model_dump(mode="json"), "cells": [cell.file for cell in cells]}
        write_whole(self.folder / "run.json", values)

    def path(self, cell: Cell) -> Path:
        """Where a cell's result stands."""
        return self.cells / cell.file

    def finished(self, cell: Cell) -> bool:
        """Whether a cell's result is there, whole, and of these settings."""
        path = self.path(cell)
        try:
            return bool(read_result(path)["settings"] == dict(cell.settings))
        except (FileNotFoundError, ValueError):
            return False

    def write(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Put a cell's result in its place, whole or not at all.

        Parameters
        ----------
        cell
            The cell.
        result
            Its ``items`` are columns by name; ``questions`` are columns that other cells have as well, ``group``
            among them, and are stored once.
        """
        items, questions = dict(result["items"]), result.get("questions")
        if cell.log == "scores":
            items = {name: items[name] for name in ("score", "answer", "tokens", "tokens_per_layer") if name in items}
        packed: dict[str, Any] = {"count": len(items["score"])}
        if items.get("id") == list(range(packed["count"])):
            del items["id"]
        if questions is not None:
            packed["questions"] = digest_of(questions)
            path = _questions_path(self.folder, packed["questions"])
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file():
                write_whole(path, questions)
            pairs = zip(items.pop("answer"), items["score"], strict=True) if "answer" in items else ()
            packed["wrong"] = [answer for answer, score in pairs if not score]
        packed |= {name: _pack(values) for name, values in items.items()}
        method = cell.build_method()
        full = {"full_parameters": None if method is None else asdict(method)}
        rest = {name: value for name, value in result.items() if name not in ("items", "questions")}
        settings = dict(cell.settings)
        write_whole(self.path(cell), {"format": FORMAT, "settings": settings, **full, **rest, "items": packed})

    def plan(self) -> Plan:
        """The plan of the last start."""
        return parse_plan(self._run()["plan"], source=str(self.folder / "run.json"))

    def read(self) -> Iterator[dict[str, Any]]:
        """Results of the plan's cells that are there."""
        for name in self._run()["cells"]:
            path = self.cells / name
            if path.is_file():
                yield read_result(path)

    def missing(self) -> list[str]:
        """File names of the plan's cells that are not there."""
        return [name for name in self._run()["cells"] if not (self.cells / name).is_file()]

    def _run(self) -> dict[str, Any]:
        path = self.folder / "run.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} holds no run.json; give a folder that `stacktok eval` wrote")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("cells"), list) or "plan" not in values:
            raise ValueError(f"{path} is damaged; start the plan again, which writes it again and keeps finished cells")
        return values


def find_results(folder: str | Path) -> list[Results]:
    """Every plan's results in a folder or one level below it."""
    top = Path(folder)
    found = [Results(path.parent) for path in [top / "run.json", *sorted(top.glob("*/run.json"))] if path.is_file()]
    if not found:
        raise ValueError(f"{folder} holds no results; give a folder that `stacktok eval` wrote")
    return found


def read_result(path: Path) -> dict[str, Any]:
    """A result file, its items as columns; one that is damaged is an error that says what to do."""
    again = "start the plan again, which re-runs this cell"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is damaged; {again}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of this version; {again}")
    packed = values["items"]
    count, shared, wrong = packed.pop("count"), packed.pop("questions", None), packed.pop("wrong", None)
    items = {"id": list(range(count))}
    if shared is not None:
        items |= _read_questions(_questions_path(path.parent.parent, shared))
    items |= {name: _unpack(column, count) for name, column in packed.items()}
    if wrong:
        left = iter(wrong)
        pairs = zip(items["score"], items["expected"], strict=True)
        items["answer"] = [expected if score else next(left) for score, expected in pairs]
    return {**values, "items": items}


def _questions_path(folder: Path, digest: str) -> Path:
    return folder / "questions" / f"{digest}.json"


@cache
def _read_questions(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing, which cells beside it refer to; restore it, or delete the cells")
    columns: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return columns


def _pack(values: Sequence[Any]) -> Any:
    """A column as JSON, short: a constant once, zeros and ones as one string."""
    if len(set(values)) == 1:
        return {"all": values[0]}
    if set(values) <= {0, 1}:
        return {"bits": "".join("1" if value else "0" for value in values)}
    return list(values)


def _unpack(column: Any, count: int) -> list[Any]:
    if isinstance(column, list):
        return column
    return [column["all"]] * count if "all" in column else list(map(float, column["bits"]))


def write_whole(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON beside its place and move it there; after an error the old file, or none, is what is there."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            json.dump(values, stream, allow_nan=False)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"no space left to write {path.name}; finished cells are intact: free some and start the plan again",
            ) from None
        raise
