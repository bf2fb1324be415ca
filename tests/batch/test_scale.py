"""Shards over Ray: two workers give the rows of one; a killed one's shard is done by another, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stacktok.batch.engines import EngineSpec
from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import run_batch
from stacktok.methods import StackTok
from stacktok.scenes import seed_for
from stacktok.scenes.parquet import write_parquet
from tests.batch.stub import JOB, Stub, output, records, run, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs ray: make test-eval")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()


def test_two_workers_give_the_rows_of_one(cluster: Any, tmp_path: Path) -> None:
    rows = records(60)
    rows[7]["image"] = b"no picture"
    data = write(tmp_path / "in", "jsonl-paths", rows, files=2)
    spread = run(data, tmp_path / "ray", ray="local", workers=(2, 2))
    alone = run(data, tmp_path / "one")
    assert output(tmp_path / "ray") == output(tmp_path / "one")
    counted = ("rows", "errors", "shards", "tokens_before", "tokens_after")
    assert [spread[name] for name in counted] == [alone[name] for name in counted]


@dataclass
class Mortal:
    """Makes an engine that kills its process once, before or after a number of answers."""

    mark: str

    def __call__(self) -> Any:
        mark = Path(self.mark)

        class Dying(Stub):
            def answer(self, pictures: Any, rows: Any) -> Any:
                found = super().answer(pictures, rows)
                if len(self.calls) == 4 and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

        return Dying()


def test_a_killed_worker_loses_and_repeats_nothing(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "in", "parquet", records(60))
    source = Input(data, Columns(question="question", id="name"))
    how: dict[str, Any] = {"shard_rows": 10, "batch_rows": 4, "ray": "local", "workers": (1, 2)}
    summary = run_batch(source, tmp_path / "ray", Mortal(str(tmp_path / "mark")), JOB, **how)
    assert (tmp_path / "mark").exists()
    run(data, tmp_path / "one")
    assert output(tmp_path / "ray") == output(tmp_path / "one")
    assert (summary["rows"], summary["shards"]) == (60, 6)
    assert run_batch(source, tmp_path / "ray", Stub, JOB, **how)["resumed_rows"] == 60


def test_the_embedded_model_on_two_workers(cluster: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", [seed_for("test", index) for index in range(3)])
    source = Input(tmp_path / "in.parquet", Columns(question="question", id="question_id"))
    spec = EngineSpec("transformers", "embedded/llava", StackTok(budget=64))
    for name, more in (("ray", {"ray": "local", "workers": (2, 2)}), ("one", {})):
        run_batch(source, tmp_path / name, spec, spec.job(), shard_rows=8, **more)
    found = output(tmp_path / "ray")
    assert found == output(tmp_path / "one")
    assert all(row["error"] is None and row["answer"] for row in found)
