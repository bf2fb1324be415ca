"""Down-sampling: the stock model given a picture that was resized to a grid of tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stacktok.evaluation.answering import Answerer, question_prompt
from stacktok.methods import DownSample, PixelPrune, method_class
from stacktok.methods.downsample import grid_within
from stacktok.serving.settings import Settings
from tests.models.test_pruned_models import greedy
from tests.tiny import build, picture

SIDES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32}


@pytest.mark.parametrize("family", SIDES)
def test_the_model_gets_the_resized_picture_and_no_more_tokens_than_the_budget(family: str) -> None:
    tiny, side = build(family), SIDES[family]
    whole = picture(6 * side, 4 * side)
    method = DownSample(budget=12)
    smaller = method.apply(whole, tiny.processor)
    # Four by three tokens are nearer to six by four than three by four or six by two.
    expected = whole.resize((4 * side, 3 * side), Image.Resampling.BICUBIC)
    assert smaller.tobytes() == expected.tobytes()
    inputs = tiny.inputs(["Is there a dog?"], [[smaller]])
    stock = greedy(tiny.model, tiny.inputs(["Is there a dog?"], [[expected]]), 3)
    with method(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 3)
        assert (pruned.before, pruned.after) == (12, 12)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, stock.logits, strict=True))
    assert method.apply(smaller, tiny.processor) is smaller
    assert DownSample(budget="50%").apply(whole, tiny.processor).size == (4 * side, 3 * side)


def test_answers_of_an_evaluation_are_those_of_the_resized_picture() -> None:
    tiny = build("qwen2_vl")
    answerer: Any = Answerer.__new__(Answerer)
    answerer.model, answerer.processor, answerer._run, answerer._method = tiny.model, tiny.processor, None, None
    whole, method = picture(168, 112), DownSample(budget=12)
    with answerer.pruned(method):
        (found,) = answerer.answer([question_prompt(whole, "Is there a dog?")], max_new_tokens=3, do_sample=False)
    smaller = question_prompt(method.apply(whole, tiny.processor), "Is there a dog?")
    (stock,) = answerer.answer([smaller], max_new_tokens=3, do_sample=False)
    assert (found.text, found.log.tokens) == (stock.text, 12)


def test_what_cannot_be_down_sampled_says_so() -> None:
    with pytest.raises(ValueError, match="brings pictures to a fixed size or to tiles"):
        DownSample(budget=9).apply(picture(), build("llava").processor)
    # The tiny processor scales pictures of fewer than four tokens up.
    with pytest.raises(ValueError, match=r"budget=2 makes a picture of .* which the processor scales again"):
        DownSample(budget=2).apply(picture(168, 112), build("qwen2_vl").processor)
    with pytest.raises(ValueError, match="budget=-1"):
        DownSample(budget=-1)
    with pytest.raises(ValueError, match="method='downsample' changes the picture"):
        Settings.read({"method": "downsample", "budget": 8})
    assert method_class("downsample") is DownSample


def test_down_sampling_and_pixelprune_go_together() -> None:
    tiny = build("qwen2_vl")
    method = DownSample(budget=12, before=PixelPrune())
    flat = method.apply(Image.new("RGB", (168, 112), "white"), tiny.processor)
    with method(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, tiny.inputs(["Is there a dog?"], [[flat]]), 1)
        assert list(pruned.last[0].removed.values()) == [11, 0, 0]


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 400))
def test_a_grid_fits_the_budget_and_the_shape(width: int, height: int, allowed: int) -> None:
    columns, rows = grid_within(width, height, allowed)
    assert 1 <= columns * rows <= allowed
    if allowed >= 16 and max(width, height) <= 4 * min(width, height):
        assert columns * rows > allowed / 2
        assert abs(math.log(columns / rows) - math.log(width / height)) < 0.7
