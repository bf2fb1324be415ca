"""Two ranks of tensor parallelism: both keep the same tokens, and the answers are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.serving.answers import CATS, DOG, SQUARE, TALL, WIDE, Request, answers, expected_and_kept, video
from tests.serving.models import reference

BUDGET = 10
TWO = {"tensor_parallel_size": 2, "max_num_batched_tokens": 24, "limit_mm_per_prompt": {"image": 2, "video": 2}}


@pytest.fixture(scope="module", autouse=True)
def unbound() -> Iterator[None]:
    """Ranks share the cores: vLLM would bind each to a memory node of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.mark.parametrize("engine", [pytest.param(("qwen3_vl", BUDGET, "stacktok", TWO), id="qwen3_vl")], indirect=True)
def test_both_ranks_keep_the_same_tokens(engine: Any) -> None:
    tiny = reference("qwen3_vl")
    engine.collective_rpc("record_kept")
    for request in [
        Request(DOG, (WIDE,)),
        Request(CATS, (WIDE,)),
        Request(CATS, (TALL, SQUARE), budget=7),
        Request(DOG, videos=(video(1),)),
    ]:
        (answer,) = answers(engine, tiny, [request])
        wanted, tokens = expected_and_kept(tiny, request, BUDGET)
        first, second = engine.collective_rpc("kept")
        assert first == second == tokens, request
        assert answer.close(wanted), (request, answer, wanted)
