"""The processor in vLLM's HTTP process, without an engine."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import VideoProcessorItems

from stacktok.models.query import word_ids
from stacktok.serving import engine_arguments
from stacktok.serving.fields import ImageRequest, field, unpack
from stacktok.serving.plugin import register
from stacktok.serving.question import QUERY_ROWS
from tests.serving.answers import CATS, DOG, SQUARE
from tests.serving.models import FAMILIES, folder, reference


def model_config(name: str, budget: Any = 10, **settings: Any) -> ModelConfig:
    """The configuration of a tiny model that is served pruned."""
    register()
    overrides = engine_arguments(name, budget, **settings)["hf_overrides"]
    return ModelConfig(str(folder(name)), hf_overrides=overrides, dtype="float32", max_model_len=1024)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_further_processor_scans_no_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config(name)
    first = MULTIMODAL_REGISTRY.create_processor(config)
    scans: list[Any] = []
    distributions = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **kw: scans.append(kw) or distributions(**kw))
    assert not list(importlib.metadata.entry_points(group="stacktok.no_such_group"))
    assert len(scans) == 1
    second = MULTIMODAL_REGISTRY.create_processor(config)
    assert len(scans) == 1
    assert second is not first
    assert second.settings == first.settings


def test_processors_of_other_settings_are_not_shared() -> None:
    budgets = [MULTIMODAL_REGISTRY.create_processor(model_config("llava", n)).settings.method.budget for n in (3, 4, 3)]
    assert budgets == [3, 4, 3]


class Renderer:
    """A renderer of vLLM without an engine."""

    def __init__(self, name: str, **settings: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers.registry import renderer_from_config

        register()
        overrides = engine_arguments(name, 10, **settings)["hf_overrides"]
        arguments = EngineArgs(str(folder(name)), hf_overrides=overrides, dtype="float32", max_model_len=1024)
        self.renderer = renderer_from_config(arguments.create_engine_config())

    def ask(self, question: str, image: Any, uuid: str | None = None, **own: Any) -> Any:
        """The engine's input for a question on a picture."""
        tiny = reference(self.renderer.model_config.hf_config.model_type)
        prompt: dict[str, Any] = {
            "prompt_token_ids": tiny.processor.tokenizer(tiny.prompt(question, 1))["input_ids"],
            "multi_modal_data": {"image": [image]},
            "mm_processor_kwargs": {"stacktok": own},
        }
        if uuid is not None:
            prompt["multi_modal_uuids"] = {"image": [uuid]}
        return self.renderer._process_tokens(prompt)

    def asked(self, question: str, image: Any, **own: Any) -> ImageRequest:
        """The request that reaches the model."""
        (item,) = self.ask(question, image, **own)["mm_kwargs"]["image"]
        names = [field("image", name) for name in ("keep", "query", "item", "request")]
        return unpack({name: [item[name].data] for name in names})[0]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer("llava")


def test_a_known_uuid_answers_for_its_picture_whatever_is_asked(renderer: Renderer) -> None:
    first = renderer.ask(DOG, SQUARE, "the square")
    again = renderer.ask(CATS, None, "the square")
    sent = renderer.ask(CATS, SQUARE, "the square", budget=9)
    assert first["mm_hashes"] != again["mm_hashes"]
    assert (
        len(first["prompt_token_ids"]) - len(renderer.ask(DOG, None, "the square", budget=4)["prompt_token_ids"]) == 6
    )
    pixels = [found["mm_kwargs"]["image"][0]["pixel_values"].data for found in (first, again, sent)]
    assert torch.equal(pixels[0], pixels[1])
    keys = [found["mm_kwargs"]["image"][0][field("image", "item")].data.tolist() for found in (first, again, sent)]
    assert keys[0] == keys[1] == keys[2]
    with pytest.raises(ValueError, match="data is not provided"):
        renderer.ask(CATS, None, "another")


def test_of_a_prompt_without_end_the_selector_sees_the_last_words(renderer: Renderer) -> None:
    tokenizer = reference("llava").processor.tokenizer
    short = renderer.asked("cats dogs squares", SQUARE).query.tolist()
    assert short == word_ids(tokenizer, ["cats", "dogs", "squares"])
    long = renderer.asked("picture " * 600 + "cats dogs squares", SQUARE).query.tolist()
    assert len(long) <= QUERY_ROWS
    assert long[-len(short) :] == short
    assert len(long) > QUERY_ROWS - len(word_ids(tokenizer, ["picture"])) - 1


def test_a_query_of_too_many_tokens_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="more than 256 tokens"):
        renderer.ask(DOG, SQUARE, query="cat " * 900)


def test_videos_that_vllm_would_normalise_as_pictures_are_refused(tmp_path: Path) -> None:
    """The processor's two halves have numbers of their own; vLLM takes one for both, unless it is told not to."""
    shutil.copytree(folder("qwen3_vl"), tmp_path / "model")
    for path in (tmp_path / "model").glob("*processor*.json"):
        found = json.loads(path.read_text())
        for part in (found, found.get("video_processor", {})):
            if "Video" in str(part.get("video_processor_type", "")):
                part["image_mean"] = [0.1, 0.2, 0.3]
        path.write_text(json.dumps(found))
    register()
    overrides = engine_arguments("qwen3_vl", 10)["hf_overrides"]
    common: dict[str, Any] = {"hf_overrides": overrides, "dtype": "float32", "max_model_len": 1024}
    frames = VideoProcessorItems([(np.zeros((4, 64, 64, 3), np.uint8), {})])
    for normalise in (True, False):
        config = ModelConfig(str(tmp_path / "model"), mm_device_do_normalize=normalise, **common)
        processor = MULTIMODAL_REGISTRY.create_processor(config)
        refused = pytest.raises(ValueError, match="takes the latter for both; start the server with")
        with refused if normalise else nullcontext():
            processor._check_items("video", frames)


def test_gemma_is_refused_where_its_image_tokens_would_not_see_each_other() -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from stacktok.serving.gemma3 import PrunedGemma3

    def model(backend: Any) -> Any:
        found, layer = torch.nn.Module(), Attention.__new__(Attention)
        torch.nn.Module.__init__(layer)
        layer.attn_backend = backend
        found.layer = layer
        return found

    PrunedGemma3.check_config(model(TritonAttentionBackend))
    with pytest.raises(ValueError, match="the attention backend CPU_ATTN leaves out without a word; run it on a GPU"):
        PrunedGemma3.check_config(model(CPUAttentionBackend))
