"""Videos in vLLM: all frames under one budget, chosen for the question; the same answers as in transformers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.serving.answers import CATS, DOG, WIDE, Request, answers, expected, video
from tests.serving.models import reference
from tests.serving.swap import swap

BUDGET = 12
# A prompt is prefilled in pieces, and the cuts go through its video.
SMALL = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "limit_mm_per_prompt": {"image": 2, "video": 2}}

VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

served = pytest.mark.parametrize(
    "engine", [pytest.param((name, BUDGET, "stacktok", SMALL), id=name) for name in VIDEOS], indirect=True
)


def check(engine: Any, requests: list[Request], method: str = "stacktok") -> None:
    tiny = reference(str(engine.llm_engine.model_config.hf_config.model_type))
    for request, answer in zip(requests, answers(engine, tiny, requests), strict=True):
        wanted = expected(tiny, request, BUDGET, method)
        assert answer.close(wanted), (method, request.question, request.budget, answer, wanted)


@served
def test_a_video_is_pruned_for_its_question_under_one_budget(engine: Any) -> None:
    one, other = video(1), video(3, frames=4)
    check(
        engine,
        [
            Request(DOG, videos=(one,)),
            Request(CATS, videos=(one,)),
            Request(CATS, videos=(one,), budget=5),
            Request(DOG, videos=(other,), budget="30%"),
            Request(DOG, videos=(other,), budget=None),
            Request("What is the answer?"),
            Request(DOG, (WIDE,), (one, other)),
        ],
    )


@served
@pytest.mark.parametrize("method", ["evs", "vidcom2"])
def test_methods_for_videos_leave_images_as_they_are(engine: Any, method: str) -> None:
    swap(engine, method, BUDGET)
    try:
        check(engine, [Request(DOG, videos=(video(5),)), Request(CATS, videos=(video(7),), budget=20)], method)
        tiny = reference(str(engine.llm_engine.model_config.hf_config.model_type))
        (answer,) = answers(engine, tiny, [Request(DOG, (WIDE,))])
        assert answer.close(expected(tiny, Request(DOG, (WIDE,)), None))
    finally:
        swap(engine, "stacktok", BUDGET)
