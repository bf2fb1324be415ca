"""`stacktok batch` on vLLM, offline and through `ray.data.llm`, gives the rows of the transformers engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("pyarrow", reason="needs pyarrow: make setup-vllm")

import pyarrow as pa
import pyarrow.parquet as pq

from stacktok.batch.engines import EngineSpec
from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import run_batch
from stacktok.methods import StackTok
from stacktok.scenes import seed_for
from stacktok.scenes.parquet import write_parquet
from tests.batch.stub import output

OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}


ROOT = Path(__file__).resolve().parents[2]
COLUMNS = Columns(question="question", id="question_id")


def spec(engine: str) -> EngineSpec:
    return EngineSpec(
        engine, "embedded/llava", StackTok(budget=64), 16, "float32", options=OPTIONS if engine == "vllm" else {}
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions on three scenes, and after the first of them a row whose picture is broken."""
    path = tmp_path_factory.mktemp("data") / "in.parquet"
    write_parquet(path, [seed_for("test", index) for index in range(3)])
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows.insert(1, {**rows[0], "question_id": "broken", "image": {"bytes": b"no picture", "path": None}})
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return path


@pytest.fixture(scope="module")
def wanted(data: Path) -> list[dict[str, Any]]:
    """The rows of the transformers engine."""
    run_batch(Input(data, COLUMNS), data.with_name("transformers"), spec("transformers"), {})
    rows = output(data.with_name("transformers"))
    assert [row["id"] for row in rows if row["error"]] == ["broken"]
    assert all(row["answer"] for row in rows if not row["error"])
    return rows


def test_the_rows_of_the_transformers_engine(data: Path, wanted: list[dict[str, Any]], tmp_path: Path) -> None:
    summary = run_batch(Input(data, COLUMNS), tmp_path / "out", spec("vllm"), spec("vllm").job())
    assert output(tmp_path / "out") == wanted
    assert summary["encoded"] == summary["prepared"] == 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs ray: make setup-vllm")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    how = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    ray.init("local", **how, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()


def test_the_same_rows_through_the_engines_of_ray(
    cluster: Any, data: Path, wanted: list[dict[str, Any]], tmp_path: Path
) -> None:
    count = len(wanted)
    how: dict[str, Any] = {"shard_rows": -(-count // 2), "ray": "local"}
    summary = run_batch(Input(data, COLUMNS), tmp_path / "out", spec("vllm"), spec("vllm").job(), **how)
    assert output(tmp_path / "out") == wanted
    assert (summary["rows"], summary["errors"], summary["shards"]) == (count, 1, 2)
    assert summary["encoded"] == summary["prepared"] == 3
    again = run_batch(Input(data, COLUMNS), tmp_path / "out", spec("vllm"), spec("vllm").job(), **how)
    assert again["resumed_rows"] == count
