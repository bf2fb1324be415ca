"""Scenes survive the way through a parquet file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from stacktok.scenes import DETAIL, STANDARD, Style, make_scene, questions, render, seed_for, write_parquet

pq = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("style", [STANDARD, DETAIL], ids=["standard", "detail"])
def test_rows_hold_what_the_scene_gives(tmp_path: Path, style: Style) -> None:
    seeds = [seed_for("test", index) for index in range(6)]
    path = tmp_path / "scenes.parquet"
    count = write_parquet(path, seeds, style=style, per_family=2, rows_per_group=10)
    rows = pq.read_table(path).to_pylist()
    expected = [(seed, q) for seed in seeds for q in questions(make_scene(seed, style), 2)]
    assert count == len(rows) == len(expected)
    assert len({row["question_id"] for row in rows}) == count
    for row, (seed, question) in zip(rows, expected, strict=True):
        assert row["scene_seed"] == seed
        assert (row["question"], row["answer"]) == (question.text, question.answer)
        assert (row["family"], row["local"]) == (question.family, question.local)
    picture = Image.open(io.BytesIO(rows[0]["image"]["bytes"]))
    assert ImageChops.difference(picture, render(make_scene(seeds[0], style))).getbbox() is None
