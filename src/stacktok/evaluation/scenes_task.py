"""The embedded model's own tasks: scenes of the test split as files that lmms-eval and the own loop both read."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stacktok.evaluation.plan import SCENES

MAX_NEW_TOKENS = 8
_UTILS = '''"""What lmms-eval calls for a task on scenes."""

from stacktok.evaluation.scenes_task import open_picture, right


def doc_to_visual(doc):
    return [open_picture(doc["image"]["bytes"])]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def process_results(doc, results):
    return {"exact_match": right(results[0], doc["answer"])}
'''


@dataclass(frozen=True)
class Item:
    """One question on one scene; items of a scene share a group."""

    id: str
    image: Any
    question: str
    answer: str
    group: int


def right(given: str, answer: str) -> float:
    """1 for the exact answer, else 0."""
    return float(given.strip() == answer)


def open_picture(data: bytes) -> Any:
    """The picture in a parquet cell."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def task_name(task: str) -> str:
    """Name of a ``scenes/FAMILY`` task in lmms-eval."""
    return "stacktok_scenes_" + task.removeprefix(SCENES).replace("-", "_")


def write_task(folder: Path, task: str, scenes: int) -> Path:
    """Write a task's parquet file and its description for lmms-eval; a file that is there is taken as it is.

    Parameters
    ----------
    folder
        Where to write.
    task
        ``scenes/FAMILY``.
    scenes
        Scenes from the start of the test split.

    Returns
    -------
    Path
        The parquet file.
    """
    family, name = task.removeprefix(SCENES), task_name(task)
    folder.mkdir(parents=True, exist_ok=True)
    everything = folder / f"scenes-{scenes}.parquet"
    own = folder / f"{name}-{scenes}.parquet"
    if not everything.is_file():
        from stacktok.scenes import seed_for, write_parquet

        part = folder / f"scenes.{os.getpid()}.part"
        write_parquet(part, (seed_for("test", index) for index in range(scenes)))
        part.replace(everything)
    if not own.is_file():
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        table = pq.read_table(everything)
        part = folder / f"{name}.{os.getpid()}.part"
        pq.write_table(table.filter(pc.equal(table["family"], family)), part)
        part.replace(own)
    lines = [
        f"task: {name}",
        "dataset_path: parquet",
        "dataset_kwargs:",
        "  data_files:",
        f"    test: {own.resolve()}",
        "test_split: test",
        "output_type: generate_until",
        "doc_to_visual: !function scenes_utils.doc_to_visual",
        "doc_to_text: !function scenes_utils.doc_to_text",
        "doc_to_target: answer",
        "process_results: !function scenes_utils.process_results",
        "generation_kwargs:",
        f"  max_new_tokens: {MAX_NEW_TOKENS}",
        "  temperature: 0",
        "  do_sample: false",
        "metric_list:",
        "  - metric: exact_match",
        "    aggregation: mean",
        "    higher_is_better: true",
        "metadata:",
        "  - version: 1.0",
    ]
    for file, text in ((f"{name}.yaml", "\n".join(lines) + "\n"), ("scenes_utils.py", _UTILS)):
        part = folder / f"{file}.{os.getpid()}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / file)
    return own


def read_items(parquet: Path, limit: int | None = None) -> Iterator[Item]:
    """The questions of a task, in order."""
    import pyarrow.parquet as pq

    for row in pq.read_table(parquet).slice(0, limit).to_pylist():
        yield Item(
            row["question_id"], open_picture(row["image"]["bytes"]), row["question"], row["answer"], row["scene_seed"]
        )
