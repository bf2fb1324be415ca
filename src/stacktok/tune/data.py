"""Samples in: a folder of pictures with a questions file, parquet, an lmms-eval task, or the package's scenes."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stacktok.models.pictures import PictureError, read_picture

IMAGE, QUESTION, ANSWER = ("image", "picture", "file", "path"), ("question", "prompt", "text"), ("answer", "answers")
"""Names of columns that are taken, the first that is there."""

FEWEST = 40
"""Fewest pictures of a search: half are held out, and below 20 of these there is no interval."""

TASK_LIMIT = 500
"""Documents of a task that are taken where no limit is given."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A question on a picture.

    Attributes
    ----------
    number
        Among all samples.
    group
        The picture's name: samples with the same one are not independent.
    question
        What is asked.
    answers
        Right answers; empty where they are not known.
    open
        Returns the picture in RGB.
    """

    number: int
    group: str
    question: str
    answers: tuple[str, ...]
    open: Callable[[], Any]


def read_samples(data: str, limit: int | None = None) -> list[Sample]:
    """Read the samples of a folder, a file or a task.

    Parameters
    ----------
    data
        A folder with pictures and one questions file (csv or jsonl); such a file, or a parquet file; ``scenes`` for
        scenes of the dev split; or an lmms-eval task, by name or by its YAML file.
    limit
        Take at most this many samples, from the start; of a task `TASK_LIMIT` where None.
    """
    path = Path(data)
    if path.is_dir():
        files = sorted(own for own in path.iterdir() if own.suffix.lower() in _READERS)
        if len(files) != 1:
            found = ", ".join(own.name for own in files) or "none"
            raise ValueError(
                f"data {data} has {len(files)} questions files ({found}); put one csv, jsonl or parquet there"
            )
        path = files[0]
    if path.suffix.lower() == ".yaml" and path.is_file():
        samples = _task(data, limit)
    elif path.is_file():
        if path.suffix.lower() not in _READERS:
            raise ValueError(f"data {data} is a {path.suffix or 'file'}; give a folder, csv, jsonl or parquet")
        rows = _READERS[path.suffix.lower()](path)
        samples = list(_samples(path, rows, limit))
        _check_pictures(samples)
    elif data == "scenes":
        samples = _scenes(limit or 300)
    elif "/" in data or "\\" in data or path.suffix:
        raise ValueError(f"data {data} does not exist; give a folder, a csv, jsonl or parquet file, or a task's name")
    else:
        samples = _task(data, limit)
    pictures = len({sample.group for sample in samples})
    if pictures < FEWEST:
        raise ValueError(f"data {data} has {pictures} pictures; give at least {FEWEST}, better 100 or more")
    answered = sum(bool(sample.answers) for sample in samples)
    if 0 < answered < len(samples):
        raise ValueError(
            f"data {data} has answers to {answered} of {len(samples)} questions; give one to all of them or to none"
        )
    return samples


def _samples(path: Path, rows: Iterator[Mapping[str, Any]], limit: int | None) -> Iterator[Sample]:
    for number, row in enumerate(rows):
        if limit is not None and number == limit:
            return
        where = f"{path}, sample {number + 1}"
        image, question = _column(row, IMAGE, path), _column(row, QUESTION, path)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where} has an empty question; give one, or leave the sample out")
        answer = next((row[name] for name in ANSWER if row.get(name) not in (None, "")), None)
        given = answer if isinstance(answer, (list, tuple)) else [] if answer is None else [answer]
        group, opener = _picture(image, path, where)
        yield Sample(number, group, question.strip(), tuple(str(one) for one in given), opener)


def _check_pictures(samples: Sequence[Sample]) -> None:
    """Open every picture once: one that cannot be read is told before anything is measured."""
    wrong = []
    for sample in {sample.group: sample for sample in reversed(samples)}.values():
        try:
            sample.open()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        more = f" ({len(wrong) - 1} more cannot be read)" if len(wrong) > 1 else ""
        raise ValueError(wrong[-1] + more)


def _column(row: Mapping[str, Any], names: Sequence[str], path: Path) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"{path} has the columns {', '.join(map(str, row))}; give one called {names[0]!r}")


def _picture(image: Any, path: Path, where: str) -> tuple[str, Callable[[], Any]]:
    """The name of a picture, and what opens it; a file is looked for now, and read when it is needed."""
    if isinstance(image, Mapping) and image.get("bytes"):
        data = bytes(image["bytes"])
        return hashlib.sha256(data).hexdigest()[:16], lambda: _opened(data, where)
    name = image.get("path") if isinstance(image, Mapping) else image
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{where} names no picture; give a file's name")
    file = path.parent / name.strip()
    if not file.is_file():
        raise ValueError(f"{where}: picture {file} does not exist; correct its name, relative to {path.parent}")
    return name.strip(), lambda: _opened(file, where)


def _opened(source: Any, where: str) -> Any:
    try:
        return read_picture(source)
    except (PictureError, OSError, ValueError) as error:
        raise ValueError(
            f"{where}: the picture cannot be read ({error}); replace it, or leave the sample out"
        ) from None


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield from csv.DictReader(stream)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a csv file in UTF-8: {error}") from None


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a jsonl file in UTF-8: {error}") from None
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number + 1} is not a JSON object; give one per line")
        yield row


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        yield from pq.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {next(iter(str(error).splitlines()), '')}") from None


_READERS: dict[str, Callable[[Path], Iterator[Mapping[str, Any]]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}


def _scenes(count: int) -> list[Sample]:
    """One question on each of some scenes of the dev split; the kinds of questions take turns."""
    from stacktok.scenes import make_scene, questions, render, seed_for

    samples = []
    for number in range(count):
        scene = make_scene(seed_for("dev", number))
        asked = questions(scene)
        chosen = asked[number % len(asked)]
        opener = lambda scene=scene: render(scene)  # noqa: E731
        samples.append(Sample(number, f"scene-{number}", chosen.text, (chosen.answer,), opener))
    return samples


def _task(data: str, limit: int | None) -> list[Sample]:
    """Documents of an lmms-eval task with one picture each, in order; a task by name or by its YAML file."""
    from stacktok.evaluation.lmms_plugin import require_lmms_eval
    from stacktok.models.pictures import rgb

    require_lmms_eval(f"data {data!r} is not a csv, jsonl or parquet file here; as a task it", "--data scenes")
    from lmms_eval.tasks import TaskManager, get_task_dict
    from loguru import logger

    logger.disable("lmms_eval")
    path = Path(data)
    if path.is_file():
        manager = TaskManager("ERROR", include_path=str(path.parent), include_defaults=False)
        lines = path.read_text(encoding="utf-8").splitlines()
        name = next((line[5:].strip() for line in lines if line.startswith("task:")), path.stem)
    else:
        manager, name = TaskManager("ERROR"), data
    if name not in manager.all_tasks:
        near = sorted(one for one in manager.all_tasks if one.startswith(name[:4]))[:8]
        also = f"; near it are {', '.join(near)}" if near else ""
        raise ValueError(f"data {data!r} is neither a file or folder here nor a task of lmms-eval{also}")
    try:
        task = get_task_dict([name], manager)[name]
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"data of the task {name!r} cannot be loaded: {reason}") from None
    documents = task.test_docs() if task.has_test_docs() else task.validation_docs()
    samples = []
    for number, document in enumerate(documents):
        if number == (limit or TASK_LIMIT):
            break
        pictures = [rgb(one) for one in task.doc_to_visual(document)]
        if len(pictures) != 1:
            raise ValueError(f"task {name!r}, document {number + 1} has {len(pictures)} pictures; give a task with one")
        target = task.doc_to_target(document)
        answers = target if isinstance(target, (list, tuple)) else [] if target is None else [target]
        opener = lambda document=document: rgb(task.doc_to_visual(document)[0])  # noqa: E731
        group = hashlib.sha256(repr(pictures[0].size).encode() + pictures[0].tobytes()).hexdigest()[:16]
        text = str(task.doc_to_text(document)).strip()
        samples.append(Sample(number, group, text, tuple(map(str, answers)), opener))
    return samples
