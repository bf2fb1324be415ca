"""A whole search on a tiny model: the two ways to measure agree, a killed one goes on, and its files are there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stacktok import StackTok, methods
from stacktok.tune.data import Sample
from stacktok.tune.engine import Engine, Setting
from stacktok.tune.quality import accuracy
from stacktok.tune.run import Search
from tests.cli.test_commands import shell
from tests.tiny import build, picture

QUESTIONS = ("Is there a dog?", "How many cats are there?")


def samples(count: int, answers: tuple[str, ...] = ()) -> list[Sample]:
    return [
        Sample(n, f"{n // 2}", QUESTIONS[n % 2], answers, lambda n=n: picture(60, 60, n // 2)) for n in range(count)
    ]


def engine(family: str = "llava", labelled: bool = False) -> Engine:
    tiny = build(family)
    return Engine(tiny.model, tiny.processor, accuracy if labelled else None, 3)


@pytest.mark.parametrize("positions", [None, "kept"])
def test_one_forward_pass_tells_what_generation_would(positions: Any) -> None:
    own, chunk = engine(labelled=True), samples(6, ("a",))
    full = own.full(chunk)
    settings = [Setting(StackTok(budget=budget, positions=positions)) for budget in (30, 4)]
    without_hooks = own.measure(settings, chunk, full)
    for setting in settings:
        with_hooks = own._with_hooks(setting, chunk, full)
        found = without_hooks[setting.key]
        assert found["log_prob"] == pytest.approx(with_hooks["log_prob"], abs=1e-3)
        assert {**found, "log_prob": 0} == {**with_hooks, "log_prob": 0}
        answers = [own.answer(setting, sample) for sample in chunk]
        assert found["answer"] == answers
        assert found["unchanged"] == [int(a == b) for a, b in zip(answers, full["answer"], strict=True)]


def test_families_without_the_loop_and_methods_inside_the_model_are_measured_too() -> None:
    for family, method in (("qwen2_5_vl", StackTok(budget=2)), ("llava", methods.FastV(budget=8, counting="kept"))):
        own, chunk = engine(family), samples(2)
        full = own.full(chunk)
        found = own.measure([Setting(method)], chunk, full)[Setting(method).key]
        changed = [
            own.answer(Setting(method), sample) != text for sample, text in zip(chunk, full["answer"], strict=True)
        ]
        assert [not same for same in found["unchanged"]] == changed
        assert all(score < 0 for score in found["log_prob"])


def search(folder: Path, own: Engine, count: int = 80, **options: Any) -> Search:
    settings = [Setting(StackTok(budget=budget)) for budget in (36, 20, 4)]
    return Search(own, samples(count), settings, folder, {"model": "tiny"}, keep=0.8, **options)


class KilledError(Exception):
    pass


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine()
    measured: list[int] = []
    measure = own.measure

    def counting(settings: Any, chunk: Any, full: Any) -> Any:
        if len(measured) == 3:
            raise KilledError
        measured.append(len(chunk))
        return measure(settings, chunk, full)

    monkeypatch.setattr(own, "measure", counting)
    with pytest.raises(KilledError):
        search(tmp_path, own).run()
    # The line that was being written when it was killed.
    with (tmp_path / "journal.jsonl").open("a") as stream:
        stream.write('\n{"cell": "x')
    monkeypatch.setattr(own, "measure", measure)
    encoded: list[str] = []
    full = own.full
    monkeypatch.setattr(own, "full", lambda chunk: encoded.append(chunk[0].group) or full(chunk))
    found = search(tmp_path, own).run()
    whole = search(tmp_path / "again", engine()).run()
    assert len(encoded) == 6 - 3
    assert [(str(row.setting), row.kept, row.passed) for row in found.rows] == [
        (str(row.setting), row.kept, row.passed) for row in whole.rows
    ]
    assert found.best is not None
    summary = json.loads((tmp_path / "tune.json").read_text())
    assert summary["recommended"] == str(found.best.setting)
    assert set(found.seconds) == {"full", *(row.setting.key for row in found.rows)}
    with pytest.raises(ValueError, match="other data or another model"):
        search(tmp_path, own, count=82).run()


def test_the_command_writes_settings_picture_and_page(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    tiny = build("llava")
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.processor.save_pretrained(tmp_path / "model")
    lines = []
    for number in range(44):
        picture(60, 60, number).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "question": "Is there a <b>dog</b>?"}))
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    common = ("tune", tmp_path / "model", "--data", tmp_path, "--out", tmp_path / "out", "--max-new-tokens", 2)
    more = ("--methods", "stacktok,pool", "--budgets", "30,10", "--keep", 0.05)
    code, out, err = shell(monkeypatch, capsys, *common, *more)
    assert code == 0, err
    assert "Recommended: " in out
    chosen = methods.load(tmp_path / "out" / "stacktok.yaml")
    assert f"Recommended: {Setting(chosen)}" in " ".join(out.split())
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 5000
    page = (tmp_path / "out" / "changes.html").read_text()
    assert "&lt;b&gt;dog" in page
    assert "<b>dog" not in page
    assert page.count("data:image/png;base64,") == page.count("<article>") > 0
    code, out, _ = shell(monkeypatch, capsys, *common, *more[:4], "--keep", 1.0, "--json")
    assert code == 0
    assert json.loads(out)["recommended"] is None
    assert not (tmp_path / "out" / "stacktok.yaml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", 1.5), "keep=1.5 is not a share"),
        (("--positions", "some"), "positions 'some' is not known"),
        (("--metric", "f1"), "metric 'f1' is not known"),
        (("--budgets", "x"), "budget='x' is not a percentage"),
    ],
)
def test_mistakes_are_one_line(options: Any, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ("tune", "--data", "scenes", "--limit", 40, "--out", tmp_path, "--json")
    code, out, err = shell(monkeypatch, capsys, *common, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A tiny model and a folder of pictures with questions."""
    tiny = build("llava")
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.processor.save_pretrained(tmp_path / "model")
    lines = []
    for number in range(80):
        picture(60, 60, number).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "question": "Is there a dog?"}))
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(data: Path, out: str = "out") -> tuple[Any, ...]:
    more = ("--methods", "stacktok,uniform", "--budgets", "30,10", "--keep", 0.05, "--max-new-tokens", 2, "--json")
    return ("tune", data / "model", "--data", data, "--out", data / out, *more)


def test_a_process_that_is_killed_goes_on_where_it_was(data: Path, monkeypatch: Any, capsys: Any) -> None:
    journal = data / "out" / "journal.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "stacktok", *map(str, command(data))], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (journal.is_file() and journal.read_text().count("\n") > 6):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = journal.read_text()
    code, out, err = shell(monkeypatch, capsys, *command(data))
    assert code == 0, err
    assert "going on where the journal ends" in err
    assert journal.read_text().startswith(before)
    entries = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}}")]
    measured = [(entry["cell"], entry["chunk"]) for entry in entries]
    assert len(measured) == len(set(measured))
    whole = shell(monkeypatch, capsys, *command(data, "whole"))
    assert "4 settings, 80 samples: at most about" in whole[2]
    # Times differ, and what is measured does not.
    found, expected = (
        [row | {"seconds": 0, "speed_up": 0} for row in json.loads(text)["finalists"]] for text in (out, whole[1])
    )
    assert found == expected


def test_a_full_disk_is_one_clear_line_and_loses_nothing(data: Path, monkeypatch: Any, capsys: Any) -> None:
    out = data / "out"
    out.mkdir()
    # The kernel's own full device.
    (out / "journal.jsonl").symlink_to("/dev/full")
    code, printed, err = shell(monkeypatch, capsys, *command(data))
    assert (code, printed) == (2, "")
    line = err.strip().splitlines()[-1]
    assert line.startswith("stacktok: ")
    assert "cannot be written any more (No space left on device); what was measured is kept there" in line
    (out / "journal.jsonl").unlink()
    code, printed, err = shell(monkeypatch, capsys, *command(data))
    assert code == 0, err
    measured = (out / "journal.jsonl").read_text()
    # Full again while the result is written: nothing is measured twice afterwards.
    summary = (out / "tune.json").read_text()
    (out / "changes.html").unlink()
    (out / "changes.html").symlink_to("/dev/full")
    code, _, err = shell(monkeypatch, capsys, *command(data))
    assert (code, "start the same command again" in err) == (2, True)
    assert (out / "journal.jsonl").read_text() == measured
    assert json.loads((out / "tune.json").read_text())["recommended"] == json.loads(summary)["recommended"]


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    data: Path, monkeypatch: Any, capsys: Any
) -> None:
    (data / "file").write_text("")
    for out in (data / "file" / "out", Path("/proc/stacktok")):
        arguments = [out if one == data / "out" else one for one in command(data)]
        code, printed, err = shell(monkeypatch, capsys, *arguments)
        assert (code, printed, err.count("\n")) == (2, "", 1)
        assert f"folder {out} cannot be written" in err
        assert "give another --out" in err
