"""Cells: a killed run loses at most a chunk, a second start does what is missing, a changed setting reuses nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stacktok.evaluation import cells, run
from stacktok.evaluation.cells import Results, cells_of, read_result
from stacktok.evaluation.run import CellError, LocalRunner, one_run, run_plan
from tests.evaluation import studies

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return studies.save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """A finished study that tests read and never write."""
    return run_plan(studies.plan(checkpoint), tmp_path_factory.mktemp("out"))


def fake(cell):
    """A result that needs no model, for tests of the bookkeeping."""
    items = {"group": [1], "score": [1.0], "tokens": [3]}
    return {"score": 100.0, "metrics": {"exact_match": 1.0}, "items": items, "replicates": None}


@pytest.fixture
def bookkeeping(monkeypatch):
    """Replace the model's part of the runner; returns the cells that were run."""
    done = []

    def call(self, cells, tick):
        for cell in cells:
            done.append(cell.file)
            yield cell, fake(cell), None

    monkeypatch.setattr(LocalRunner, "__call__", call)
    return done


def test_every_cell_has_a_file_with_its_settings_and_a_log_of_every_item(finished):
    results = list(finished.read())
    assert len(results) == 2 * (1 + 2 * 2)
    assert finished.missing() == []
    for result in results:
        settings, items = result["settings"], result["items"]
        assert set(items["tokens_full"]) == {36}
        assert set(items["tokens"]) == {{None: 36, 12: 12, "20%": 7}[settings["budget"]]}
        if settings["method"] == "stacktok":
            assert all(0 <= value <= 1 for name in ("strictness", "bound") for value in items[name])
            assert min(items["selection_seconds"]) > 0
        else:
            assert set(items["strictness"]) == set(items["bound"]) == {None}


@pytest.mark.parametrize("method", ["fastv", "sparsevlm", "visionzip", "mmtok"])
def test_every_kind_of_method_is_counted_alike(checkpoint, method, tmp_path):
    # Two of the tiny model's three layers see all tokens before FastV prunes.
    budget = 12 if method in ("visionzip", "mmtok") else 30
    plan = studies.plan(checkpoint, methods=[{"name": "M", "method": method}], budgets=[budget], full=False, limit=2)
    for items in (result["items"] for result in run_plan(plan, tmp_path).read()):
        assert items["tokens_full"] == [36, 36]
        if method in ("visionzip", "mmtok"):
            assert items["tokens"] == items["tokens_per_layer"] == [12, 12]
        assert max(items["tokens_per_layer"]) < 36


def test_a_second_start_runs_nothing(checkpoint, finished, bookkeeping):
    before = {path: path.stat().st_mtime_ns for path in finished.cells.iterdir()}
    run_plan(studies.plan(checkpoint), finished.folder.parent)
    assert bookkeeping == []
    assert {path: path.stat().st_mtime_ns for path in finished.cells.iterdir()} == before


def test_only_what_is_missing_or_damaged_is_done_again(checkpoint, bookkeeping, tmp_path):
    plan = studies.plan(checkpoint)
    results = run_plan(plan, tmp_path)
    everything = list(bookkeeping)
    bookkeeping.clear()
    (results.cells / everything[2]).unlink()
    (results.cells / everything[5]).write_text('{"format": 1, "sett')
    run_plan(plan, tmp_path)
    assert bookkeeping == [everything[2], everything[5]]


@pytest.mark.parametrize(
    "changes",
    [
        {"scenes": 5},
        {"limit": 2},
        {"batch_size": 1},
        {"dtype": "bfloat16"},
        {"methods": [{"name": "StackTok", "method": "stacktok", "settings": {"relevance_depth": 2}}], "full": False},
        {"methods": [{"name": "StackTok", "method": "mmtok"}], "full": False},
        {"budgets": [13], "full": False},
        {"split": "dev"},
        {"positions": ["kept"], "full": False},
    ],
)
def test_a_changed_setting_never_reuses_a_cell(checkpoint, changes):
    old = {cell.key for cell in cells_of(studies.plan(checkpoint))}
    new = {cell.key for cell in cells_of(studies.plan(checkpoint, **changes))}
    assert not old & new


def test_new_weights_in_an_old_folder_are_another_setting(tmp_path):
    folder = Path(studies.save_tiny(tmp_path / "m"))
    old = {cell.key for cell in cells_of(studies.plan(str(folder)))}
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(bytes(data))
    assert not old & {cell.key for cell in cells_of(studies.plan(str(folder)))}


def test_results_of_other_settings_stay_out_of_a_report(checkpoint, bookkeeping, tmp_path):
    run_plan(studies.plan(checkpoint), tmp_path)
    results = run_plan(studies.plan(checkpoint, budgets=[5], full=False), tmp_path)
    assert {result["settings"]["budget"] for result in results.read()} == {5}


def test_a_killed_run_loses_at_most_one_chunk(checkpoint, tmp_path):
    """Killed at the fourth of six steps (three methods on two chunks), a second start does the three that are left."""
    program = (
        "import os, signal, sys\n"
        "from stacktok.evaluation import run, scenes_loop\n"
        "from tests.evaluation import studies\n"
        "step, last, count = scenes_loop.Bench.step, int(sys.argv[1]), 0\n"
        "def counted(self, cells, chunk):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count == last:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, cells, chunk)\n"
        "scenes_loop.Bench.step, scenes_loop.CHUNK = counted, 2\n"
        f"plan = studies.plan({checkpoint!r}, tasks=studies.SCENES)\n"
        f"run.run_plan(plan, {str(tmp_path)!r})\n"
        "print(count)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}

    def start(last):
        command = [sys.executable, "-c", program, str(last)]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)

    assert start(4).returncode == -signal.SIGKILL
    results, journal = Results(tmp_path / "small"), tmp_path / "small" / "journal.jsonl"
    assert list(results.read()) == []
    # A line that was torn is not counted as done.
    journal.write_text(journal.read_text() + '\n{"cell": "x", "chu')
    assert start(99).stdout == "3\n"
    assert results.missing() == []
    assert not journal.exists()
    whole = run_plan(studies.plan(checkpoint, tasks=studies.SCENES), tmp_path / "whole")
    for cut, one in zip(results.read(), whole.read(), strict=True):
        assert (cut["settings"], cut["items"]["answer"]) == (one["settings"], one["items"]["answer"])


def test_a_full_disk_stops_the_run_and_leaves_finished_cells_whole(checkpoint, bookkeeping, monkeypatch, tmp_path):
    plan = studies.plan(checkpoint)
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(cells.os, "fsync", fsync)
    with pytest.raises(OSError, match=r"no space left to write .*; finished cells are intact: free some and start"):
        run_plan(plan, tmp_path)
    results = Results(tmp_path / "small")
    # The first write is run.json.
    assert len(list(results.read())) == 3
    assert not list(results.cells.glob("*.part"))
    monkeypatch.undo()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "cell.json"
    cells.write_whole(path, {"format": 2, "items": {"count": 1}})

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(cells.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cells.write_whole(path, {"format": 2, "items": {"count": 2}})
    assert read_result(path)["items"] == {"id": [0]}
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_write_are_swept_and_never_read(checkpoint, bookkeeping, tmp_path):
    results = run_plan(studies.plan(checkpoint), tmp_path)
    left = results.cells / "x.json.123.part"
    left.write_text('{"format": 1')
    assert len(list(results.read())) == 10
    run_plan(studies.plan(checkpoint), tmp_path)
    assert not left.exists()


def test_a_failing_cell_stops_the_run_or_is_listed_at_its_end(checkpoint, monkeypatch, tmp_path):
    from stacktok.methods import DivPrune

    def broken(self, images, query, budget):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DivPrune, "reduce_prompt", broken)
    with pytest.raises(CellError, match="tiny, DivPrune, budget 12, existence: out of memory"):
        run_plan(studies.plan(checkpoint), tmp_path)
    with pytest.raises(CellError, match="4 of 10 cells failed; the first: tiny, DivPrune"):
        run_plan(studies.plan(checkpoint), tmp_path, keep_going=True)
    assert len(list(Results(tmp_path / "small").read())) == 6


def test_an_error_while_answering_fails_the_cell(checkpoint, monkeypatch, tmp_path):
    from stacktok.evaluation.loop import Loop

    def broken(self, prompts, reductions, positions):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Loop, "answers", broken)
    with pytest.raises(CellError, match="CUDA error"):
        run_plan(studies.plan(checkpoint), tmp_path)
    assert list(Results(tmp_path / "small").read()) == []


def test_a_checkpoint_that_is_not_available_leaves_the_cells_of_others(checkpoint, monkeypatch, tmp_path):
    import transformers

    read = transformers.AutoConfig.from_pretrained

    def absent(name, *args, **kwargs):
        if name == "no/such-model":
            raise OSError("We couldn't connect to the hub\nand there is no such file in the cache.")
        return read(name, *args, **kwargs)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    models = [{"name": "tiny", "pretrained": checkpoint}, {"name": "gone", "pretrained": "no/such-model"}]
    plan = studies.plan(checkpoint, models=models, methods=[], limit=1)
    with pytest.raises(
        CellError, match=r"gone, Vanilla, all tokens, existence: pretrained 'no/such-model' cannot be"
    ) as e:
        run_plan(plan, tmp_path)
    assert str(e.value).endswith("is neither a folder here nor available from the hub; give another")
    assert "\n" not in str(e.value)
    results = Results(tmp_path / "small")
    assert [result["settings"]["model"] for result in results.read()] == ["tiny", "tiny"]


def test_a_folder_is_written_by_one_run_at_a_time(tmp_path):
    with one_run(tmp_path), pytest.raises(ValueError, match="is being written by another run"), one_run(tmp_path):
        pass
    with one_run(tmp_path):
        pass


def test_progress_tells_the_time_left():
    progress = run.Progress(total=10, skipped=2)
    assert str(progress) == "2 of 10 cells"
    progress.done = 4
    assert progress.seconds_left() is not None
    assert str(progress).startswith("6 of 10 cells, about ")
    assert [run.duration(seconds) for seconds in (5, 65, 3700)] == ["5 s", "1 min 05 s", "1 h 01 min"]


def test_results_are_plain_json(finished):
    path = next(finished.cells.glob("*.json"))
    assert json.loads(path.read_text())["format"] == 2


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no results"):
        cells.find_results(tmp_path)
    with pytest.raises(ValueError, match=r"holds no run.json"):
        Results(tmp_path).plan()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"plan": 1, "cells": []}'])
def test_a_damaged_run_file_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json") as raised:
        Results(tmp_path).plan()
    assert "\n" not in str(raised.value)
