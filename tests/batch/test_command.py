"""`stacktok batch` answers as `stacktok ask` does."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stacktok.cli.ask import answer
from stacktok.methods import StackTok
from stacktok.methods.settings import settings_text
from stacktok.models.loading import load_model
from stacktok.models.pictures import read_picture
from stacktok.models.prompt import prompt_inputs
from stacktok.scenes import make_scene, questions, render, seed_for
from tests.cli.test_commands import shell


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scenes with four questions each, by path, one of them broken."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for index in range(3):
        scene = make_scene(seed_for("test", index))
        render(scene).save(folder / f"{index}.png")
        lines += [{"id": f"{index}-{q.text}", "image": f"{index}.png", "q": q.text} for q in questions(scene)[:4]]
    lines.insert(5, {"id": "broken", "image": "nothing.png", "q": "What?"})
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def killed(command: list[str], out: Path) -> None:
    """Run a command and kill it once it has answered a shard."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    process = subprocess.Popen([sys.executable, "-m", "stacktok", *command], env={**os.environ, "PYTHONPATH": source})
    while process.poll() is None and not list(out.glob("part-*.parquet")):
        time.sleep(0.005)
    process.kill()
    process.wait()


def test_row_by_row_as_ask_also_after_a_kill(data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ["batch", "--data", str(data / "asked.jsonl"), "--question-column", "q", "--out", str(tmp_path / "out")]
    common += ["--budget", "32", "--shard-rows", "4", "--json"]
    killed(common, tmp_path / "out")
    code, out, err = shell(monkeypatch, capsys, *common)
    summary = json.loads(out)
    assert summary["resumed_rows"] >= 4
    assert not list((tmp_path / "out").glob("*.part"))
    assert code == 0
    # Without a terminal there are plain lines, none of them a bar of another library.
    assert "rows, 0.0 rows/s" in err
    assert not set(err) & {"\r", "\x1b", "━"}
    assert (summary["rows"], summary["errors"], summary["encoded"], summary["prepared"]) == (13, 1, 5, 5)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    from stacktok.embedded import resolve

    model, processor = load_model(resolve("embedded/llava"))
    for line, row in zip((data / "asked.jsonl").read_text().splitlines(), rows, strict=True):
        asked = json.loads(line)
        assert row["id"] == asked["id"]
        if asked["id"] == "broken":
            assert "nothing.png does not exist" in row["error"]
            assert row["answer"] is None
            continue
        inputs = prompt_inputs(processor, read_picture(data / asked["image"]), asked["q"], model)
        wanted = answer(model, processor, inputs, StackTok(budget=32), 64, question=asked["q"], compare=False)
        assert row["error"] is None
        assert [row[name] for name in ("answer", "tokens_before", "tokens_after")] == [
            wanted[name] for name in ("answer", "tokens_before", "tokens_after")
        ]


def test_the_three_lines_of_the_page(data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """From a folder of pictures to parquet, as docs/batch.md says it."""
    page = Path(__file__).resolve().parents[2] / "docs" / "batch.md"
    install, command, look = page.read_text(encoding="utf-8").split("```sh\n")[1].split("```")[0].splitlines()
    assert install == "pip install 'stacktok[batch]'"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures" / "below").mkdir(parents=True)
    for name in ("0.png", "below/1.png"):
        (tmp_path / "pictures" / name).write_bytes((data / Path(name).name).read_bytes())
    (tmp_path / "pictures" / "2.png").write_bytes(b"broken")
    code, out, _ = shell(monkeypatch, capsys, *shlex.split(command)[1:])
    assert code == 0
    assert "rows per second" in out
    exec(shlex.split(look)[2])
    found = ast.literal_eval(capsys.readouterr().out)
    assert [(row["id"], row["error"] is None) for row in found] == [
        ("0.png", True),
        ("2.png", False),
        ("below/1.png", True),
    ]


def test_a_folder_and_what_it_would_take(data: Path, monkeypatch: Any, capsys: Any) -> None:
    asked = ("batch", "--data", data / "*.png", "--question", "Is there a bear?", "--budget", "all", "--batch-rows", 2)
    code, out, _ = shell(monkeypatch, capsys, *asked, "--estimate", "--estimate-rows", 2, "--price", 3, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["measured_rows"], found["rows"], found["tokens_saved"]) == (2, 3, 0)
    assert found["cost_per_million"] > 0


def test_settings_of_a_file_and_an_early_end(data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "stacktok.yaml").write_text(settings_text(StackTok(budget=16)), encoding="utf-8")
    asked = ["batch", "--data", data / "asked.jsonl", "--question-column", "q", "--out", tmp_path / "out", "--json"]
    asked += ["--settings", tmp_path / "stacktok.yaml", "--batch-rows", 4]
    code, _, err = shell(monkeypatch, capsys, *asked, "--max-errors", 0)
    assert code == 2
    assert "more than max-errors=0" in err
    code, out, _ = shell(monkeypatch, capsys, *asked, "--max-errors", 1)
    assert code == 0
    assert json.loads(out)["tokens_after"] == 12 * 16


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--question", "?"), "out is missing"),
        (("--question", "?", "--out", "out", "--workers", "many"), "workers 'many'"),
        (("--question", "?", "--out", "out", "--engine", "onnx"), "engine 'onnx' is not known"),
        (("--out", "out"), "either question or question-column"),
        (("--question", "?", "--out", "out", "--budget", "many"), "budget"),
        (("--question", "?", "--out", "out", "--model", "embedded/none"), "embedded models are"),
    ],
)
def test_what_a_user_can_get_wrong(
    more: tuple[str, ...], words: str, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = shell(monkeypatch, capsys, "batch", "--data", data, *more)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
