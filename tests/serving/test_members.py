"""Further engines: methods that read the vision tower, other processors and language models, and vLLM without us."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from benchmarks.served import data_url, messages

from stacktok.embedded import NAMES, PREFIX
from stacktok.view.samples import scene_samples
from tests.serving.answers import CATS, DOG, SQUARE, TALL, TOKENS, WIDE, Request, answer_of, answers, expected
from tests.serving.models import reference
from tests.tiny import picture

TOWERS = ("llava", "llava_next", "qwen2_5_vl")

towers = [pytest.param((name, 9, "visionzip", {}), id=f"{name}-visionzip") for name in TOWERS]
# Two layers of the tower; of Qwen2.5-VL such that see the whole image.
towers += [pytest.param((name, 9, "vscan", {}), id=f"{name}-vscan") for name in ("llava", "qwen2_5_vl")]


@pytest.mark.parametrize("engine", towers, indirect=True)
def test_a_method_that_reads_the_vision_tower(engine: Any, request: pytest.FixtureRequest) -> None:
    method = request.node.callspec.params["engine"][2]
    tiny = reference(str(engine.llm_engine.model_config.hf_config.model_type))
    requests = [Request(DOG, (WIDE, SQUARE)), Request(DOG, (TALL,)), Request(CATS, (SQUARE,), budget=16)]
    for asked, answer in zip(requests, answers(engine, tiny, requests), strict=True):
        wanted = expected(tiny, asked, 9, method)
        assert answer.close(wanted), (asked, answer, wanted)


others = [
    pytest.param(("llava_padded", 30, "stacktok", {}), id="llava_padded"),
    pytest.param(("llava_next_mistral", "20%", "stacktok", {}), id="llava_next_mistral"),
]


@pytest.mark.parametrize("engine", others, indirect=True)
def test_other_processors_and_language_models(engine: Any, request: pytest.FixtureRequest) -> None:
    name, budget = request.node.callspec.params["engine"][:2]
    tiny = reference(name)
    # Of a very wide picture that is padded to a square, fewer than 30 tokens may be kept.
    asked = [Request(DOG, (picture(300, 40, 5),)), Request(CATS, (WIDE, SQUARE)), Request(CATS, (TALL,), budget=4)]
    found = answers(engine, tiny, asked)
    for one, answer in zip(asked, found, strict=True):
        wanted = expected(tiny, one, budget)
        assert answer.close(wanted), (one, answer, wanted)


shipped = [pytest.param((f"{PREFIX}{name}", 64, "stacktok", {}), id=f"embedded_{name}") for name in NAMES]


@pytest.mark.parametrize("engine", shipped, indirect=True)
def test_chat_completions_are_those_of_transformers(engine: Any, request: pytest.FixtureRequest) -> None:
    """For every family whose chat template ships: vLLM renders it, and adds no special tokens of its own."""
    from vllm import SamplingParams

    tiny = reference(request.node.callspec.params["engine"][0])
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    for sample in scene_samples(2):
        for question, budget in zip(sample.questions, (64, 16, None), strict=False):
            own = {"stacktok": {"budget": budget}}
            turns = messages(question, data_url(sample.picture))
            (output,) = engine.chat(turns, sampling, mm_processor_kwargs=own, use_tqdm=False)
            wanted = expected(tiny, Request(question, (sample.picture,), budget=budget), 64)
            assert output.prompt_token_ids.count(tiny.processor.tokenizer.bos_token_id) == 1
            assert answer_of(output).close(wanted), (question, budget)


@pytest.mark.parametrize("engine", shipped[1:], indirect=True)
def test_the_embedded_model_with_tiles(engine: Any) -> None:
    tiny = reference("embedded/llava_next")
    asked = [
        Request(question, (sample.picture,), budget=budget)
        for sample in scene_samples(2)
        for question, budget in zip(sample.questions, ("server", 16, None), strict=False)
    ]
    assert len(asked) > 3
    for one, answer in zip(asked, answers(engine, tiny, asked), strict=True):
        assert answer.close(expected(tiny, one, 64)), one


@pytest.mark.parametrize("engine", [pytest.param(("embedded/llava", None, None, {}), id="stock")], indirect=True)
def test_nothing_changes_unless_it_is_asked_for(engine: Any) -> None:
    tiny = reference("embedded/llava")
    request = Request("how many cats are there ?", (scene_samples(1)[0].picture,))
    (answer,) = answers(engine, tiny, [request])
    assert answer.close(expected(tiny, request, None))
    assert engine.collective_rpc("stacktok_counters") == [{}]
    assert engine.llm_engine.model_config.architectures == ["LlavaForConditionalGeneration"]
