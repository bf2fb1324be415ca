"""Scenes and questions as a parquet file, one row per question."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from stacktok.scenes.questions import questions
from stacktok.scenes.render import render
from stacktok.scenes.scene import STANDARD, Style, make_scene


def write_parquet(
    path: str | Path, seeds: Iterable[int], *, style: Style = STANDARD, per_family: int = 1, rows_per_group: int = 512
) -> int:
    """Write the questions of some scenes.

    Columns: `image` (a struct of PNG bytes and a path, as the `datasets` library stores images), `question`, `answer`,
    `family`, `local`, `scene_seed`, `question_id`.

    Parameters
    ----------
    path : str or Path
        File to write.
    seeds : iterable of int
        Seeds of the scenes (`seed_for`).
    style : Style
        What the scenes may hold.
    per_family : int
        Up to how many questions per family and scene.
    rows_per_group : int
        Rows that are held in memory at a time.

    Returns
    -------
    int
        Number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("question_id", pa.string()),
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("question", pa.string()),
            ("answer", pa.string()),
            ("family", pa.string()),
            ("local", pa.bool_()),
            ("scene_seed", pa.int64()),
        ]
    )
    written = 0
    rows: list[dict[str, object]] = []
    with pq.ParquetWriter(path, schema) as writer:
        for seed in seeds:
            scene = make_scene(seed, style)
            stream = io.BytesIO()
            render(scene).save(stream, format="PNG")
            image = {"bytes": stream.getvalue(), "path": f"{seed}.png"}
            for number, question in enumerate(questions(scene, per_family)):
                rows.append(
                    {
                        "question_id": f"{seed}-{number}",
                        "image": image,
                        "question": question.text,
                        "answer": question.answer,
                        "family": question.family,
                        "local": question.local,
                        "scene_seed": seed,
                    }
                )
            if len(rows) >= rows_per_group:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                written += len(rows)
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            written += len(rows)
    return written
