"""Cells: one model, method, budget and task each, with a result file of its own.

A result file is named after everything that decides its numbers, written beside its place and moved there whole. So a
killed run loses at most the cell it was at, a second start does what is missing, and a changed setting finds no file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stacktok import embedded
from stacktok.core.budget import Budget
from stacktok.evaluation.plan import FULL, SCENES, MethodPart, ModelPart, Plan, TaskPart
from stacktok.methods.base import Method
from stacktok.methods.registry import method_class

FORMAT = 1
_EDGE = 1 << 20


@dataclass(frozen=True)
class Cell:
    """One model, method, budget and task.

    Attributes
    ----------
    model, method, budget, task
        Parts of the plan; method and budget are None for the unpruned model.
    settings
        Everything that decides the numbers, as plain values.
    """

    model: ModelPart
    method: MethodPart | None
    budget: Budget | None
    task: TaskPart
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The method's name in tables."""
        return FULL if self.method is None else self.method.name

    @cached_property
    def key(self) -> str:
        """Digest of the settings."""
        text = json.dumps(self.settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def file(self) -> str:
        """Name of the result file."""
        parts = [self.model.name, self.label, "all" if self.budget is None else str(self.budget), self.task.name]
        readable = ".".join(re.sub(r"[^a-z0-9]+", "-", part.lower().replace("%", "pct")).strip("-") for part in parts)
        return f"{readable}.{self.key}.json"

    def __str__(self) -> str:
        budget = "all tokens" if self.budget is None else f"budget {self.budget}"
        return f"{self.model.name}, {self.label}, {budget}, {self.task.name}"

    def build_method(self) -> Method | None:
        """The method with its parameters, or None for the unpruned model."""
        return None if self.method is None else build_method(self.method, self.budget)


def build_method(part: MethodPart, budget: Budget | None) -> Method:
    """A method of the plan as an object; settings that it does not know are an error."""
    kind = method_class(part.method)
    try:
        return kind(budget=budget, **part.settings)
    except TypeError as error:
        raise ValueError(f"method {part.name!r} cannot be built from its settings: {error}") from None


def cells_of(plan: Plan) -> list[Cell]:
    """Every cell of a plan, the unpruned model first; those of one model stand together.

    Settings that a method does not accept and local checkpoints that are not there are errors here, before anything
    runs.
    """
    cells = []
    common = _common_settings(plan)
    for model in plan.models:
        source = {"pretrained": model.pretrained, "checkpoint": fingerprint(model.pretrained)}
        runs: list[tuple[MethodPart | None, Budget | None]] = [(None, None)] if plan.full else []
        runs += [(method, budget) for method in plan.methods for budget in plan.budgets_of(model, method)]
        for method, budget in runs:
            chosen: dict[str, Any] = {"method": None, "budget": None}
            if method is not None:
                built = build_method(method, budget)
                parameters = {name: value for name, value in asdict(built).items() if name != "budget"}
                chosen = {"method": method.method, "parameters": parameters, "budget": budget}
            for task in plan.tasks:
                settings = {
                    **common,
                    **source,
                    **chosen,
                    "label": FULL if method is None else method.name,
                    "model": model.name,
                    "task": task.model_dump(mode="json"),
                    "scenes": plan.scenes if task.task.startswith(SCENES) else None,
                }
                cells.append(Cell(model, method, budget, task, json.loads(json.dumps(settings))))
    return cells


def _common_settings(plan: Plan) -> dict[str, Any]:
    engine: dict[str, Any] = {"name": plan.engine}
    if plan.engine == "lmms-eval":
        engine["version"] = installed_version("lmms-eval")
    return {
        "format": FORMAT,
        "engine": engine,
        "stacktok": installed_version("stacktok"),
        "batch_size": plan.batch_size,
        "dtype": plan.dtype,
        "limit": plan.limit,
    }


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint(pretrained: str) -> str | None:
    """Digest of a local checkpoint, so that new weights in an old folder are another setting; None for a hub name.

    Of a large file its size and its first and last megabyte count.
    """
    path = Path(embedded.resolve(pretrained))
    if not path.is_dir():
        if path.is_absolute() or pretrained.startswith((".", "~", embedded.PREFIX)) or pretrained.count("/") > 1:
            raise ValueError(f"pretrained {pretrained!r} is not a folder; give a checkpoint's folder or a hub name")
        return None
    if not (path / "config.json").is_file():
        raise ValueError(f"pretrained {pretrained!r} has no config.json; give a checkpoint's folder or a hub name")
    digest = hashlib.sha256()
    for file in sorted(entry for entry in path.iterdir() if entry.is_file()):
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
        Holds ``run.json``, the plan with the names of its cells, and ``cells``.
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
        """Put a cell's result in its place, whole or not at all."""
        write_whole(self.path(cell), {"format": FORMAT, "settings": dict(cell.settings), **result})

    def plan(self) -> Plan:
        """The plan of the last start."""
        return Plan.model_validate(self._run()["plan"])

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
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values


def find_results(folder: str | Path) -> list[Results]:
    """Every plan's results in a folder or one level below it."""
    top = Path(folder)
    found = [Results(path.parent) for path in [top / "run.json", *sorted(top.glob("*/run.json"))] if path.is_file()]
    if not found:
        raise ValueError(f"{folder} holds no results; give a folder that `stacktok eval` wrote")
    return found


def read_result(path: Path) -> dict[str, Any]:
    """A result file; one that is damaged or of another format is an error that says what to do."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is damaged; start the plan again, which does this cell anew") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of this version; start the plan again, which does this cell anew")
    return values


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
