"""Qwen3.5 in vLLM, whose recurrent layers on CPUs take bfloat16 alone: both sides run in that."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.serving.answers import CATS, DOG, SQUARE, TALL, WIDE, Request, answers, expected_and_kept, video
from tests.serving.models import reference

BUDGET = 10
# Of a log-probability.
TOLERANCE = 0.08
HALF = {"dtype": "bfloat16", "max_num_batched_tokens": 64, "limit_mm_per_prompt": {"image": 2, "video": 2}}


@pytest.mark.parametrize("engine", [pytest.param(("qwen3_5", BUDGET, "stacktok", HALF), id="qwen3_5")], indirect=True)
def test_the_same_tokens_are_kept_and_the_first_token_has_the_same_probability(engine: Any) -> None:
    """But for near ties: the features of two towers in bfloat16 differ in their last bits."""
    tiny = reference("qwen3_5", "bfloat16")
    equal = 0
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
        assert answer.length == wanted.length
        if request.budget is not None:
            pairs = list(zip(kept, tokens, strict=True))
            assert all(len(set(own) - set(other)) <= 1 for own, other in pairs), (request, kept, tokens)
        if request.budget is None or kept == tokens:
            equal += 1
            assert abs(answer.scores[0] - wanted.scores[0]) <= TOLERANCE, (request, answer, wanted)
    # Of eight; seven where this was written.
    assert equal >= 6
