"""Shards over Ray: workers give the rows of one process; a dead worker's or node's shard is done by another, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stacktok.batch.engines import EngineSpec
from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import Progress, run_batch
from stacktok.methods import StackTok
from stacktok.scenes import seed_for
from stacktok.scenes.parquet import write_parquet
from tests.batch.stub import COLUMNS, JOB, Stub, output, records, run, write

ROOT = Path(__file__).resolve().parents[2]
TWO = {"num_cpus": 2, "num_gpus": 1}
"""What a node says that it has; Ray hands out GPUs by count, whether there are any or not."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of a head without workers and one node."""
    ray = pytest.importorskip("ray", reason="needs ray: make test-eval")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.node = nodes.add_node(**TWO)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def test_a_local_cluster_is_not_one_that_runs_here_already(cluster: Any) -> None:
    code = (
        "from stacktok.evaluation.scale import cluster\n"
        "with cluster('local') as ray: print(ray.get_runtime_context().gcs_address)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] != cluster.address


@dataclass
class Engines:
    """Makes engines that leave a mark of their process and GPU, take their time, and die once where that is asked."""

    marks: str
    seconds: float = 0.0
    mortal: bool = False

    def __call__(self) -> Any:
        import ray

        where, seconds, mortal = Path(self.marks), self.seconds, self.mortal
        (where / f"{os.getpid()}.json").write_text(json.dumps(ray.get_runtime_context().get_accelerator_ids()["GPU"]))

        class Marked(Stub):
            def answer(self, pictures: Any, rows: Any) -> Any:
                found = super().answer(pictures, rows)
                time.sleep(seconds)
                if mortal and len(self.calls) == 4 and not (where / "died").exists():
                    (where / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

        return Marked()


def test_two_workers_give_the_rows_of_one(cluster: Any, tmp_path: Path) -> None:
    rows = records(60)
    rows[7]["image"] = b"no picture"
    data = write(tmp_path / "in", "jsonl-paths", rows, files=2)
    spread = run(data, tmp_path / "ray", ray=cluster.address, workers=(2, 2))
    alone = run(data, tmp_path / "one")
    assert output(tmp_path / "ray") == output(tmp_path / "one")
    counted = ("rows", "errors", "shards", "tokens_before", "tokens_after")
    assert [spread[name] for name in counted] == [alone[name] for name in counted]


def test_a_killed_worker_loses_and_repeats_nothing(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "in", "parquet", records(60))
    source = Input(data, COLUMNS)
    how: dict[str, Any] = {"shard_rows": 10, "batch_rows": 4, "ray": cluster.address, "workers": (1, 2)}
    summary = run_batch(source, tmp_path / "ray", Engines(str(tmp_path), mortal=True), JOB, **how)
    assert (tmp_path / "died").exists()
    run(data, tmp_path / "one")
    assert output(tmp_path / "ray") == output(tmp_path / "one")
    assert (summary["rows"], summary["shards"]) == (60, 6)
    assert run_batch(source, tmp_path / "ray", Stub, JOB, **how)["resumed_rows"] == 60


def test_the_pool_grows_and_workers_share_a_gpu(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "in", "parquet", records(160))
    how: dict[str, Any] = {"shard_rows": 4, "ray": cluster.address, "workers": (1, 2), "gpus": 0.5}
    run_batch(Input(data, COLUMNS), tmp_path / "ray", Engines(str(tmp_path), seconds=0.5), JOB, **how)
    marks = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert marks == [["0"]] * 2


def test_a_killed_node_loses_and_repeats_nothing(cluster: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "in", "parquet", records(80))
    lost: list[int] = []

    def report(progress: Progress) -> None:
        if progress.totals.rows and not lost:
            lost.append(progress.totals.rows)
            another = cluster.add_node(**TWO)
            cluster.remove_node(cluster.node, allow_graceful=False)
            cluster.node = another

    how: dict[str, Any] = {"shard_rows": 4, "ray": cluster.address, "workers": (2, 2), "report": report}
    summary = run_batch(Input(data, COLUMNS), tmp_path / "ray", Engines(str(tmp_path), seconds=0.2), JOB, **how)
    assert lost[0] < 80
    assert summary["rows"] == 80
    # Two workers on the node that died, and two on the one that took its place.
    assert len(list(tmp_path.glob("*.json"))) >= 4
    run(data, tmp_path / "one", shard_rows=4)
    assert output(tmp_path / "ray") == output(tmp_path / "one")


def test_the_embedded_model_on_two_workers(cluster: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", [seed_for("test", index) for index in range(3)])
    source = Input(tmp_path / "in.parquet", Columns(question="question", id="question_id"))
    spec = EngineSpec("transformers", "embedded/llava", StackTok(budget=64))
    for name, more in (("ray", {"ray": cluster.address, "workers": (2, 2)}), ("one", {})):
        run_batch(source, tmp_path / name, spec, spec.job(), shard_rows=8, **more)
    found = output(tmp_path / "ray")
    assert found == output(tmp_path / "one")
    assert all(row["error"] is None and row["answer"] for row in found)
