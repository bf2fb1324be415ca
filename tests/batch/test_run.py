"""A job answers every row exactly once, whatever ends it in between."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import TooManyErrorsError, estimate, pending, run_batch
from stacktok.batch.worker import Worker
from stacktok.models.pictures import read_picture
from tests.batch.limited import write_large
from tests.batch.stub import COLUMNS, JOB, Stub, expected, output, png, records, run, run_and_tell, write
from tests.tiny import picture

ROOT = Path(__file__).resolve().parents[2]


def wanted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "row": number,
            "id": row["name"],
            "answer": expected(read_picture(row["image"]), row["question"]),
            "error": None,
            "tokens_before": 100,
            "tokens_after": 10,
        }
        for number, row in enumerate(rows)
    ]


def test_rows_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = records(23)
    random.Random(0).shuffle(rows)
    summary = run(write(tmp_path / "in", "parquet", rows), tmp_path / "out")
    assert output(tmp_path / "out") == wanted(rows)
    assert summary == json.loads((tmp_path / "out" / "_job" / "summary.json").read_text())
    assert (summary["rows"], summary["errors"], summary["shards"], summary["tokens_saved"]) == (23, 0, 3, 0.9)


def test_questions_on_one_picture_come_together(tmp_path: Path) -> None:
    rows = records(40)
    random.Random(1).shuffle(rows)
    source = Input(write(tmp_path, "parquet", rows), COLUMNS)
    stub = Stub()
    totals = Worker(stub, batch_rows=8).answer(row for row, _ in source.read((0, 0), 0)).totals
    assert (totals.rows, totals.pictures, totals.encoded, stub.calls) == (40, 10, 10, [8] * 5)
    apart = Stub()
    Worker(apart, batch_rows=8, grouped=False).answer(row for row, _ in source.read((0, 0), 0))
    assert apart.encoded == 40


def test_a_broken_row_is_an_error_in_its_row(tmp_path: Path) -> None:
    rows = records(24)
    rows[5]["image"] = b"no picture"
    rows[9]["question"] = "fail here"
    rows[11]["question"] = ""
    rows[13]["image"] = rows[13]["image"][:60]
    rows[14]["image"] = None
    summary = run(write(tmp_path / "in", "parquet", rows), tmp_path / "out")
    found = output(tmp_path / "out")
    errors = {row["row"]: row["error"] for row in found if row["error"] is not None}
    assert sorted(errors) == [5, 9, 11, 13, 14]
    assert "not a picture" in errors[5]
    assert errors[9] == "RuntimeError: the question fails"
    assert "broken" in errors[13]
    good = [row for row in wanted(records(24)) if row["row"] not in errors]
    assert [row for row in found if row["error"] is None] == good
    assert summary["errors"] == 5


def test_pictures_are_read_by_the_one_way_in(tmp_path: Path) -> None:
    """Upright by EXIF, on white where transparent; thin, huge and animated ones as everywhere else."""
    from PIL import Image

    turned, clear, thin, large = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(24, 16, 0).save(turned, "JPEG", exif=exif)
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(clear, "PNG")
    Image.new("L", (6000, 1)).save(thin, "PNG")
    Image.new("1", (20_000, 20_000)).save(large, "PNG")
    rows = [{"name": str(n), "image": one.getvalue(), "question": "?"} for n, one in enumerate((turned, clear))]
    rows += [{"name": str(n), "image": one.getvalue(), "question": "?"} for n, one in enumerate((thin, large), 2)]
    shown: list[Any] = []

    class Seeing(Stub):
        def answer(self, pictures: Any, rows: Any) -> Any:
            shown.extend(pictures)
            return super().answer(pictures, rows)

    source = Input(write(tmp_path / "in", "parquet", rows), COLUMNS)
    run_batch(source, tmp_path / "out", Seeing, JOB)
    assert [(image.size, image.mode) for image in shown] == [((16, 24), "RGB"), ((8, 8), "RGB")]
    assert shown[1].getpixel((0, 0)) == (255, 255, 255)
    errors = [row["error"] for row in output(tmp_path / "out")]
    assert errors[:2] == [None, None]
    assert "6000 x 1 pixels, one side more than 50 times the other" in errors[2]
    assert "megapixels" in errors[3]


def test_too_many_errors_end_the_job_and_a_larger_number_goes_on(tmp_path: Path) -> None:
    rows = records(40)
    for row in rows[::5]:
        row["question"] = "fail"
    data = write(tmp_path / "in", "parquet", rows)
    with pytest.raises(TooManyErrorsError, match=r"more than max-errors=3; finished shards are intact"):
        run(data, tmp_path / "out", max_errors=3)
    before = output(tmp_path / "out")
    assert 0 < len(before) < 40
    summary = run(data, tmp_path / "out", max_errors=8)
    assert (summary["errors"], summary["resumed_rows"]) == (8, len(before))
    assert [row["row"] for row in output(tmp_path / "out")] == list(range(40))


def test_killed_twenty_times_at_random_moments(tmp_path: Path) -> None:
    rows = records(160)
    data, out = write(tmp_path / "in", "parquet", rows, files=3), tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.batch.stub"])
    chance, killed, ended = random.Random(2), 0, False
    while not ended:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_and_tell, args=(data, str(out), theirs))
        process.start()
        theirs.close()
        # The job goes on while this process decides, so that the kill comes anywhere between two changes.
        for _ in range(chance.randrange(1, 6) if killed < 20 else 10**6):
            if ours.recv() is None:
                ended = True
                break
        if not ended:
            process.kill()
            killed += 1
        process.join()
    assert killed == 20
    assert output(out) == wanted(rows)
    assert not list(out.glob("*.part"))
    lines = (out / "_job" / "manifest.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["shard"] for line in lines) == list(range(16))


@pytest.mark.parametrize("damage", ["line lost", "line torn", "manifest lost", "shard lost", "part left"])
def test_what_a_kill_can_leave_is_made_whole(damage: str, tmp_path: Path) -> None:
    rows, out = records(35), tmp_path / "out"
    data = write(tmp_path / "in", "jsonl-paths", rows)
    run(data, out)
    manifest = out / "_job" / "manifest.jsonl"
    text = manifest.read_text()
    if damage == "line lost":
        manifest.write_text("".join(text.splitlines(keepends=True)[:-1]))
    elif damage == "line torn":
        manifest.write_text(text[:-30])
    elif damage == "manifest lost":
        manifest.unlink()
    elif damage == "shard lost":
        (out / "part-000001.parquet").unlink()
    else:
        (out / "_part-000009.parquet.123.part").write_bytes(b"x")
    summary = run(data, out)
    assert output(out) == wanted(rows)
    assert summary["rows"] == 35
    assert summary["resumed_rows"] == (25 if damage == "shard lost" else 35)
    assert sorted(manifest.read_text().splitlines()) == sorted(text.splitlines()) or damage == "shard lost"
    assert not list(out.glob("*.part"))


def test_pending_shards_are_those_that_are_missing(tmp_path: Path) -> None:
    data, out = write(tmp_path / "in", "csv-base64", records(35), files=2), tmp_path / "out"
    source = Input(data, COLUMNS)
    tasks = list(pending(source, {}, 10))
    assert [(task.shard, task.first, task.rows) for task in tasks] == [(0, 0, 10), (1, 10, 10), (2, 20, 10), (3, 30, 5)]
    for task in tasks:
        row, _ = next(source.read(task.begin, task.first))
        assert row.id == f"n{task.first}"
    run(data, out)
    (out / "part-000002.parquet").unlink()
    from stacktok.batch.shards import Output

    done = Output(out, numbered=False)._recover()
    assert list(pending(source, done, 10)) == [tasks[2]]


def test_another_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "in", "parquet", records(12))
    run(data, tmp_path / "out")
    with pytest.raises(ValueError, match="another shard_rows; give another --out"):
        run(data, tmp_path / "out", shard_rows=5)
    with pytest.raises(ValueError, match="another model, columns"):
        run_batch(Input(data, Columns(question="question")), tmp_path / "out", Stub, {"model": "b"}, shard_rows=10)
    write(tmp_path / "in", "parquet", records(13))
    with pytest.raises(ValueError, match="another data"):
        run(data, tmp_path / "out")
    with pytest.raises(ValueError, match="parquet files of something else"):
        run(data, tmp_path / "in")
    with pytest.raises(ValueError, match=r"workers=3:2 is not a range"):
        run(data, tmp_path / "other", workers=(3, 2))


def test_memory_is_bounded_whatever_the_input(tmp_path: Path) -> None:
    """Pictures that take forty times the window pass through while a few windows are held."""
    window = 200_000
    noise = random.Random(3)

    def large(seed: int) -> bytes:
        return png(seed) + noise.randbytes(40_000)

    rows = [{"name": f"n{n}", "image": large(n), "question": "What?"} for n in range(200)]
    data = write(tmp_path / "in", "tar", rows)
    assert sum(len(row["image"]) for row in rows) > 40 * window
    wanted_ids = [row["name"] for row in rows]
    del rows
    run(write(tmp_path / "warm", "tar", records(4)), tmp_path / "warm-out")
    tracemalloc.start()
    run(data, tmp_path / "out", window_bytes=window, shard_rows=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * window
    assert [row["id"] for row in output(tmp_path / "out")] == wanted_ids


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_an_input_ten_times_the_memory_limit(kind: str, tmp_path: Path) -> None:
    """Under a limit of the operating system, which the same pictures held at once break."""
    limit, rows = 48 << 20, 600
    data = tmp_path / f"in.{kind}"
    write_large(data, rows, 11 * limit // rows)
    command = [sys.executable, "-m", "tests.batch.limited", str(limit), str(data), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["input"] > 10 * limit
    assert (found["rows"], found["errors"], found["held_at_once"]) == (rows, 0, "MemoryError")
    assert [row["row"] for row in output(tmp_path / "out")] == list(range(rows))


def test_estimate_extrapolates_the_measured_rate(tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl-paths"):
        source = Input(write(tmp_path / kind, kind, records(60)), COLUMNS)
        found = estimate(source, Stub, rows=20, price=2.0)
        assert found["measured_rows"] == 20
        assert found["rows"] == pytest.approx(60, rel=0.1)
        assert found["hours_per_million"] == pytest.approx(1e6 / found["rows_per_second"] / 3600, rel=0.01)
        assert found["cost_per_million"] == pytest.approx(2 * found["hours_per_million"], rel=0.01)


def test_progress_says_rate_savings_errors_and_time_left(tmp_path: Path) -> None:
    rows = records(40)
    rows[0]["question"] = "fail"
    lines: list[str] = []
    run(write(tmp_path / "in", "parquet", rows), tmp_path / "out", report=lambda progress: lines.append(str(progress)))
    assert lines[0].startswith("0 rows")
    assert "90.0% of tokens saved, 1 errors" in lines[-1]
    assert any("left" in line for line in lines)
    assert JOB.items() <= json.loads((tmp_path / "out" / "_job" / "manifest.json").read_text())["job"].items()
