"""Data of `stacktok tune`: every way in, and a clear line for everything that can be wrong with it."""

from __future__ import annotations

import csv
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stacktok.tune.data import read_samples
from stacktok.tune.quality import accuracy, anls, metric_of, relaxed_accuracy
from tests.tiny import picture

COUNT = 42


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(COUNT):
        picture(30, 30, number).save(tmp_path / f"{number}.png")
    write(tmp_path / "questions.csv", [row(n) for n in range(COUNT)])
    return tmp_path


def row(n: int, **changes: Any) -> dict[str, Any]:
    return {"image": f"{n}.png", "question": f"What is in picture {n}?", "answer": "a cat", **changes}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(one) for one in rows))
        return
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_folder_with_a_csv_is_read(folder: Path) -> None:
    samples = read_samples(str(folder))
    assert len(samples) == COUNT
    assert (samples[3].question, samples[3].answers, samples[3].group) == ("What is in picture 3?", ("a cat",), "3.png")
    assert samples[3].open().size == (30, 30)
    with pytest.raises(ValueError, match="has 5 pictures; give at least 40"):
        read_samples(str(folder), limit=5)


def test_jsonl_and_parquet_give_the_same(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "questions.csv").unlink()
    write(folder / "q.jsonl", [row(n, answer=["cat", "a cat"]) for n in range(COUNT)])
    first = read_samples(str(folder))
    assert first[0].answers == ("cat", "a cat")
    rows = [{**row(n), "image": {"bytes": (folder / f"{n}.png").read_bytes()}} for n in range(COUNT)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "all.parquet")
    second = read_samples(str(folder / "all.parquet"))
    assert [one.question for one in second] == [one.question for one in first]
    assert second[7].open().tobytes() == first[7].open().tobytes()


def test_scenes_need_no_file() -> None:
    samples = read_samples("scenes", limit=60)
    assert len({sample.group for sample in samples}) == 60
    assert all(sample.answers for sample in samples)


def test_a_task_of_lmms_eval_is_read(tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval", reason="needs lmms-eval: make test-eval")
    from stacktok.evaluation.scenes_task import write_task
    from stacktok.scenes import make_scene, questions, render, seed_for

    write_task(tmp_path, "scenes/counting", COUNT)
    samples = read_samples(str(tmp_path / "stacktok_scenes_counting.yaml"))
    assert len({sample.group for sample in samples}) == COUNT <= len(samples)
    scene = make_scene(seed_for("test", 0))
    asked = next(one for one in questions(scene) if one.family == "counting")
    assert (samples[0].question, samples[0].answers) == (asked.text, (asked.answer,))
    assert samples[0].open().tobytes() == render(scene).tobytes()
    with pytest.raises(ValueError, match="nor a task of lmms-eval; near it are gqa"):
        read_samples("gqa_of_tomorrow")


@pytest.mark.skipif(find_spec("lmms_eval") is not None, reason="lmms-eval is installed here")
def test_without_lmms_eval_a_task_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match=r"'docvqa' is not a csv, .* it needs the package lmms-eval: run `make setup-"):
        read_samples("docvqa")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "none.png"}, "sample 3: picture .*none.png does not exist"),
        ({"image": ""}, "sample 3 names no picture"),
        ({"question": "  "}, "sample 3 has an empty question"),
        ({"answer": ""}, "has answers to 41 of 42 questions"),
    ],
)
def test_a_wrong_row_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    write(folder / "questions.csv", [row(n, **(changes if n == 2 else {})) for n in range(COUNT)])
    with pytest.raises(ValueError, match=message):
        read_samples(str(folder))


def test_unreadable_pictures_are_named_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # lmms-eval, once imported in this process, has Pillow read what is left of a cut picture.
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", False)
    (folder / "5.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"sample 6: the picture cannot be read \(.*leave the sample out$"):
        read_samples(str(folder))
    whole = (folder / "9.png").read_bytes()
    (folder / "9.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"sample 6: .* \(1 more cannot be read\)$"):
        read_samples(str(folder))


def test_other_mistakes_are_one_line(folder: Path) -> None:
    write(folder / "more.jsonl", [row(0)])
    with pytest.raises(ValueError, match=r"2 questions files \(more.jsonl, questions.csv\)"):
        read_samples(str(folder))
    (folder / "more.jsonl").write_text('{"image": 1}\n[1]')
    with pytest.raises(ValueError, match="columns image; give one called 'question'"):
        read_samples(str(folder / "more.jsonl"))
    (folder / "more.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        read_samples(str(folder / "more.jsonl"))
    (folder / "more.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a jsonl file in UTF-8"):
        read_samples(str(folder / "more.jsonl"))
    write(folder / "few.csv", [{"picture": "0.png", "caption": "a cat"}])
    with pytest.raises(ValueError, match="has the columns picture, caption; give one called 'question'"):
        read_samples(str(folder / "few.csv"))
    (folder / "bad.parquet").write_bytes(io.BytesIO(b"no").getvalue())
    with pytest.raises(ValueError, match="not a parquet file"):
        read_samples(str(folder / "bad.parquet"))
    with pytest.raises(ValueError, match="does not exist"):
        read_samples(str(folder / "nowhere"))
    (folder / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"is a \.txt"):
        read_samples(str(folder / "x.txt"))


def test_metrics_follow_their_definitions(tmp_path: Path) -> None:
    assert accuracy("The Cat.", ["cat"]) == 1
    assert accuracy("dog", ["cat", "cow"]) == 0
    # One edit in five characters; beyond half of them it counts for nothing.
    assert anls("hella", ["hello"]) == pytest.approx(0.8)
    assert anls("abcde", ["hello"]) == 0
    assert relaxed_accuracy("104", ["100"]) == 1
    assert relaxed_accuracy("106", ["100"]) == 0
    assert relaxed_accuracy("12%", ["0.12"]) == 1
    assert relaxed_accuracy("Yes", ["yes"]) == 1
    own = tmp_path / "mine.py"
    own.write_text("def half(answer, right):\n    return 0.5 if answer in right else 2\n")
    assert metric_of(f"{own}:half")("a", ("a",)) == 0.5
    with pytest.raises(ValueError, match="return a number from 0 to 1"):
        metric_of(f"{own}:half")("b", ("a",))
    for name, message in ((f"{own}:none", "has no function"), ("f1", "is not known"), ("x.py:f", "does not exist")):
        with pytest.raises(ValueError, match=message):
            metric_of(name)
