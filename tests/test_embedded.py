"""The shipped weights load everywhere and do what their card says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stacktok import embedded
from stacktok.scenes import make_scene, questions, render, seed_for

pytest.importorskip("transformers")

from training.card import SHIPPED
from training.evaluate import STYLES, Answerer, ask, ask_packed, summary


@pytest.fixture(scope="module", params=embedded.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each embedded model in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def answerer(name: str) -> Answerer:
    """The model, loaded from the package."""
    return Answerer(embedded.path(name))


def test_the_package_holds_every_file(name: str) -> None:
    for file in (*SHIPPED, "README.md", "curves.png"):
        assert (embedded.path(name) / file).is_file(), file
    assert (embedded.path(name) / "model.safetensors").stat().st_size < 24e6


def test_importing_is_light() -> None:
    code = "import sys, stacktok.embedded, stacktok.scenes; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    baseline = "import sys, stacktok; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    alone = subprocess.run([sys.executable, "-c", baseline], capture_output=True, text=True, check=True).stdout.strip()
    assert heavy == alone


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="name is 'gpt'"):
        embedded.path("gpt")


@pytest.mark.parametrize("control", ["picture", "blank"])
def test_the_card_is_reproduced_on_its_subset(name: str, answerer: Answerer, control: str) -> None:
    evaluation = json.loads((embedded.path(name) / "evaluation.json").read_text())
    subset = evaluation["subset"]
    scenes = [make_scene(seed_for("test", index), STYLES[evaluation["style"]]) for index in range(subset["scenes"])]
    measured = summary(ask_packed(answerer, scenes, control))["all"]
    low, high = subset[control]["interval"]
    assert measured["questions"] == subset[control]["questions"]
    assert low <= measured["accuracy"] <= high
    if control == "blank":
        assert measured["accuracy"] < evaluation["chance"]["all"] + 0.08


def test_heads_are_wide_enough_for_serving(answerer: Answerer) -> None:
    config = answerer.model.config
    assert config.text_config.head_dim >= 32
    assert config.vision_config.hidden_size // config.vision_config.num_attention_heads >= 32


def test_generation_answers_as_the_packed_pass_and_alone_as_in_a_batch(name: str, answerer: Answerer) -> None:
    evaluation = json.loads((embedded.path(name) / "evaluation.json").read_text())
    scene = make_scene(seed_for("dev", 0), STYLES[evaluation["style"]])
    generated = ask(answerer, [scene])
    assert generated == ask_packed(answerer, [scene])
    asked = questions(scene)[0]
    assert (answerer.answers([render(scene)], [asked.text]) == [asked.answer]) == generated[0].right


def test_template_and_processor_agree_on_the_start_token(name: str, answerer: Answerer) -> None:
    processor = answerer.processor
    picture = render(make_scene(seed_for("dev", 0), STYLES["standard"]))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "How many cats are there?"}]
    turns = [{"role": "user", "content": content}]
    rendered = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    by_template = processor.apply_chat_template(turns, tokenize=True, return_dict=True, add_generation_prompt=True)
    by_processor = processor(images=[picture], text=[rendered])["input_ids"][0]
    assert list(by_template["input_ids"][0]) == list(by_processor)
    assert [token for token in by_processor if token == processor.tokenizer.bos_token_id] == [by_processor[0]]
    # As vLLM reads a rendered conversation; the processor has since put in a placeholder per image token.
    served = processor.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert served == [token for k, token in enumerate(by_processor) if token != image or by_processor[k - 1] != image]
