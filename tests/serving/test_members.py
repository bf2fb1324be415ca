"""Further engines: other processors and language models, the models that ship, and vLLM without us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from benchmarks.served import data_url, messages

from stacktok.embedded import NAMES, PREFIX
from stacktok.view.samples import scene_samples
from tests.serving.answers import CATS, DOG, SQUARE, TALL, TOKENS, WIDE, Request, answer_of, answers, expected
from tests.serving.models import reference
from tests.tiny import picture

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


# Drafts come from the prompt itself.
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MORE = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "speculative_config": DRAFTS,
    "disable_log_stats": False,
    "max_num_batched_tokens": 128,
}


@pytest.mark.parametrize("engine", [pytest.param(("llava", 10, "stacktok", MORE), id="lora-ngram")], indirect=True)
def test_adapters_of_the_language_model_and_speculative_decoding(engine: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    tiny = reference("llava")
    asked = [Request(DOG, (WIDE,)), Request(CATS, (WIDE, SQUARE), budget=7)]
    for one, answer in zip(asked, answers(engine, tiny, asked, tokens=24), strict=True):
        assert answer.close(expected(tiny, one, 10, tokens=24)), one
    drafts = [metric.value for metric in engine.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"]
    assert sum(drafts) > 0
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    with adapter(tiny, tmp_path):
        wanted = [expected(tiny, one, 10) for one in asked]
    adapted = engine.generate(
        [one.offline(tiny) for one in asked], sampling, use_tqdm=False, lora_request=LoRARequest("it", 1, str(tmp_path))
    )
    for one, output, answer in zip(asked, adapted, wanted, strict=True):
        assert answer_of(output).close(answer), one
        assert not answer_of(output).close(expected(tiny, one, 10)), one


@contextmanager
def adapter(tiny: Any, where: Path) -> Iterator[None]:
    """Writes a LoRA adapter of the language model to a folder; within, the model has it in its weights."""
    generator = torch.Generator().manual_seed(5)
    saved, merged = {}, {}
    for name, module in tiny.model.model.language_model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            down = 0.3 * torch.randn(4, module.in_features, generator=generator)
            up = 0.3 * torch.randn(module.out_features, 4, generator=generator)
            path = f"base_model.model.model.language_model.{name}"
            saved |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
            merged[module] = module.weight.data + 2 * up @ down
    save_file(saved, where / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (where / "adapter_config.json").write_text(json.dumps(settings))
    before = {module: module.weight.data for module in merged}
    for module, weight in merged.items():
        module.weight.data = weight
    yield
    for module, weight in before.items():
        module.weight.data = weight


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
