"""Engines: one at a time, each shared by the tests that ask for the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# vLLM's own switches, for machines with two cores.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine; the parameter is (model, budget, method or None for vLLM without us, further arguments)."""
    pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
    from vllm import LLM

    from stacktok.serving import engine_arguments
    from tests.serving.models import folder, reference

    name, budget, method, more = request.param
    model_type = reference(name).model.config.model_type
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16}
    caches = {"enable_prefix_caching": True, "limit_mm_per_prompt": {"image": 8}}
    ours = {} if method is None else engine_arguments(model_type, budget, method=method)
    ours["worker_extension_cls"] = "tests.serving.swap.SwapExtension"
    llm = LLM(str(folder(name)), **{**common, **caches, **ours, **more})
    yield llm
    llm.llm_engine.engine_core.shutdown()
