"""The embedded model's own tasks: scenes of the test split as files that lmms-eval reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stacktok.evaluation.plan import SCENES

MAX_NEW_TOKENS = 8
_UTILS = '''"""Functions that lmms-eval calls for a task on scenes."""

from stacktok.evaluation.scenes_task import open_picture, right


def doc_to_visual(doc):
    return [open_picture(doc["image"]["bytes"])]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def process_results(doc, results):
    return {"exact_match": right(results[0], doc["answer"])}
'''


def right(given: str, answer: str) -> float:
    """1 for the exact answer, else 0."""
    return float(given.strip() == answer)


def open_picture(data: bytes) -> Any:
    """The picture in a parquet cell."""
    from stacktok.models.pictures import read_picture

    return read_picture(data)


def task_name(task: str) -> str:
    """Name of a task on scenes in lmms-eval."""
    return "stacktok_" + task.replace("/", "_").replace("-", "_")


def write_task(folder: Path, task: str, scenes: int, style: str = "standard") -> Path:
    """Write a task's parquet file and its description for lmms-eval; a file that is there is taken as it is.

    Parameters
    ----------
    folder
        Where to write.
    task
        ``scenes`` or ``scenes/FAMILY``.
    scenes, style
        How many scenes from the start of the test split, and of which style.

    Returns
    -------
    Path
        The parquet file.
    """
    family, name = task.removeprefix(SCENES).removeprefix("/"), task_name(task)
    folder.mkdir(parents=True, exist_ok=True)
    everything = folder / f"{task_name(SCENES)}-{style}-{scenes}.parquet"
    own = folder / f"{name}-{style}-{scenes}.parquet"
    if not everything.is_file():
        from stacktok.scenes import DETAIL, STANDARD, seed_for, write_parquet

        part = folder / f"scenes.{os.getpid()}.part"
        chosen = {"standard": STANDARD, "detail": DETAIL}[style]
        write_parquet(part, (seed_for("test", index) for index in range(scenes)), style=chosen)
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
