"""vLLM gives the answers of this package's transformers path, token by token."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.exceptions import VLLMValidationError

from stacktok.methods import FeatureMethod, available
from stacktok.methods.video_method import VideoMethod
from tests.serving.answers import CATS, DOG, SQUARE, TALL, WIDE, Request, answers, expected
from tests.serving.models import FAMILIES, reference
from tests.serving.swap import swap
from tests.tiny import picture

BUDGET = 10
# Ten tokens at a time: a prompt is prefilled in pieces, and the cut goes through its image.
CHUNKED = {"max_num_batched_tokens": 10, "max_num_seqs": 8}

# Every family runs in pieces, which mixes requests within a step too; the first ones of each kind also whole.
WHOLE = ("llava", "llava_next", "qwen2_5_vl")

plain = [pytest.param((name, BUDGET, "stacktok", {}), id=name) for name in WHOLE]
chunked = [pytest.param((name, BUDGET, "stacktok", CHUNKED), id=f"{name}-chunked") for name in FAMILIES]
either = pytest.mark.parametrize("engine", [*plain, *chunked], indirect=True)
every = pytest.mark.parametrize("engine", chunked, indirect=True)


def name_of(engine: Any) -> str:
    return str(engine.llm_engine.model_config.hf_config.model_type)


@either
def test_a_batch_of_all_kinds_of_requests(engine: Any) -> None:
    tiny = reference(name_of(engine))
    requests = [
        Request(DOG, (WIDE,)),
        Request("What is the answer?"),
        Request(CATS, (TALL, SQUARE)),
        Request(CATS, (WIDE,)),
        Request(DOG, (WIDE,), budget=3),
        Request(DOG, (SQUARE,), budget="25%"),
        Request(DOG, (SQUARE,), budget=0.5),
        Request(DOG, (TALL,), budget=None),
        Request(DOG, (TALL,), query="the blue field"),
        Request(DOG, (TALL,), query=None),
        Request(CATS, (WIDE, TALL, SQUARE), budget=7),
    ]
    found = answers(engine, tiny, requests)
    for request, answer in zip(requests, found, strict=True):
        wanted = expected(tiny, request, BUDGET)
        assert answer.close(wanted), (request, answer, wanted)


@either
def test_two_questions_on_one_image_are_never_mixed_up(engine: Any) -> None:
    tiny = reference(name_of(engine))
    questions = [Request(DOG, (SQUARE,)), Request(CATS, (SQUARE,))]
    single = [expected(tiny, request, BUDGET) for request in questions]
    assert single[0].tokens != single[1].tokens
    found = answers(engine, tiny, questions * (50 if name_of(engine) in WHOLE else 10))
    for index, answer in enumerate(found):
        assert answer.close(single[index % 2]), index


@every
def test_a_second_question_does_not_run_the_vision_tower(engine: Any) -> None:
    tiny, image = reference(name_of(engine)), picture(210, 180, 40)
    (before,) = engine.collective_rpc("stacktok_counters")
    answers(engine, tiny, [Request(DOG, (image,))])
    (first,) = engine.collective_rpc("stacktok_counters")
    answers(engine, tiny, [Request(CATS, (image,)), Request(DOG, (image,), budget=2)])
    (second,) = engine.collective_rpc("stacktok_counters")
    assert first["encoder_runs"] == before["encoder_runs"] + 1
    assert second["encoder_runs"] == first["encoder_runs"]
    assert second["encoder_cache_hits"] == first["encoder_cache_hits"] + 2
    assert second["images"] == before["images"] + 3
    assert second["tokens_after"] == before["tokens_after"] + BUDGET + BUDGET + 2
    assert second["tokens_before"] - before["tokens_before"] > 3 * BUDGET
    assert second["encoder_cache_bytes"] > 0


@every
def test_nonsense_is_refused_and_the_engine_goes_on(engine: Any) -> None:
    tiny = reference(name_of(engine))
    for budget in (0, -1, 1.5, "many", True, [3]):
        with pytest.raises((ValueError, TypeError), match="budget"):
            answers(engine, tiny, [Request(DOG, (SQUARE,), budget=budget)])
    for query in (3, "x" * 4001):
        with pytest.raises((ValueError, TypeError), match="query"):
            answers(engine, tiny, [Request(DOG, (SQUARE,), query=query)])
    with pytest.raises(VLLMValidationError, match="At most 8 image"):
        answers(engine, tiny, [Request(DOG, (SQUARE,) * 9)])
    assert answers(engine, tiny, [Request(DOG, (SQUARE,))])[0].close(expected(tiny, Request(DOG, (SQUARE,)), BUDGET))


# Every method that can be served and leaves images other than they are, on every family.
METHODS = [
    name
    for name, kind in available().items()
    if issubclass(kind, FeatureMethod) and kind.stage == "before" and not issubclass(kind, VideoMethod)
]

# PruMerge+ reads the tower's last layer, which vLLM does not build for these families.
ANOTHER_LAYER = {("llava", "prumerge"), ("llava_next", "prumerge")}


@every
def test_every_method_before_the_language_model(engine: Any) -> None:
    tiny = reference(name_of(engine))
    assert {"mmtok", "visionzip", "vscan"} < set(METHODS)
    try:
        for seed, method in enumerate(METHODS):
            if (tiny.family, method) in ANOTHER_LAYER:
                continue
            swap(engine, method, BUDGET)
            budget = ("server", "30%")[seed % 2]
            request = Request(CATS, (picture(200, 150, 60 + seed), TALL), budget=budget)
            (answer,) = answers(engine, tiny, [request])
            wanted = expected(tiny, request, BUDGET, method)
            assert answer.close(wanted), (method, request, answer, wanted)
    finally:
        swap(engine, "stacktok", BUDGET)
