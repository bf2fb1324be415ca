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
    measured = summary(ask_packed(answerer, scenes, control), resamples=1)["all"]
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
