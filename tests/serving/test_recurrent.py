"""Qwen3.5 in vLLM, whose recurrent layers on CPUs take bfloat16 alone: both sides run in that."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.serving.answers import CATS, DOG, SQUARE, TALL, WIDE, Request, answers, expected_and_kept, video
from tests.serving.models import reference

BUDGET = 10
# Of a log-probability; two towers in bfloat16 already differ in their last bits.
TOLERANCE = 0.08
HALF = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "limit_mm_per_prompt": {"image": 2, "video": 2}}


@pytest.mark.parametrize("engine", [pytest.param(("qwen3_5", BUDGET, "stacktok", HALF), id="qwen3_5")], indirect=True)
def test_the_same_tokens_are_kept_and_the_first_token_has_the_same_probability(engine: Any) -> None:
    tiny = reference("qwen3_5", "bfloat16")
    engine.collective_rpc("record_kept")
    for request in [
        Request(DOG, (WIDE,)),
        Request(CATS, (WIDE,)),
        Request(CATS, (TALL, SQUARE), budget=7),
        Request(DOG, (SQUARE,), budget="25%"),
        Request(DOG, (TALL,), budget=None),
        Request(DOG, videos=(video(1),)),
        Request(CATS, (WIDE,), (video(3, frames=4),), budget=5),
        Request("What is the answer?"),
    ]:
        (answer,) = answers(engine, tiny, [request], tokens=1)
        wanted, tokens = expected_and_kept(tiny, request, BUDGET, tokens=1)
        (kept,) = engine.collective_rpc("kept")
        assert request.budget is None or kept == tokens, (request, kept, tokens)
        assert answer.length == wanted.length
        assert abs(answer.scores[0] - wanted.scores[0]) <= TOLERANCE, (request, answer, wanted)
