"""`stacktok batch` on vLLM's offline engine gives the rows of the transformers engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("pyarrow", reason="needs pyarrow: make setup-vllm")

from stacktok.batch.engines import EngineSpec
from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import run_batch
from stacktok.methods import StackTok
from stacktok.scenes import seed_for
from stacktok.scenes.parquet import write_parquet
from tests.batch.stub import output

OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}


def test_the_rows_of_the_transformers_engine(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", [seed_for("test", index) for index in range(3)])
    source = Input(tmp_path / "in.parquet", Columns(question="question", id="question_id"))
    summaries = {}
    for name, options in (("transformers", {}), ("vllm", OPTIONS)):
        spec = EngineSpec(name, "embedded/llava", StackTok(budget=64), 16, "float32", options=options)
        summaries[name] = run_batch(source, tmp_path / name, spec, spec.job(), shard_rows=1000)
    found = output(tmp_path / "vllm")
    assert found == output(tmp_path / "transformers")
    assert all(row["error"] is None and row["answer"] for row in found)
    assert summaries["vllm"]["encoded"] == summaries["vllm"]["prepared"] == summaries["vllm"]["pictures"] == 3
