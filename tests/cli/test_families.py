"""The commands' own functions on the tiny model of every family with tiles, row breaks or ready masks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from stacktok.cli.ask import answer
from stacktok.cli.show import draw
from stacktok.evaluation.answering import Answerer, Prompt
from stacktok.evaluation.loop import Loop
from stacktok.methods import DivPrune, StackTok, VisionZip
from stacktok.models.prompt import prompt_inputs
from stacktok.view.engine import Engine
from tests.tiny import build, picture
from tests.tiny_tiles import READY_MASKS, TILES, VARIANTS

QUESTION = "Is there a dog on the blue field?"


@pytest.mark.parametrize("family", [*TILES, *VARIANTS])
def test_ask_and_show(family: str) -> None:
    tiny, image = build(family), picture(200, 200)
    inputs = prompt_inputs(tiny.processor, image, QUESTION, tiny.model)
    found = answer(
        tiny.model, tiny.processor, inputs, StackTok(budget=9), max_new_tokens=2, question=QUESTION, compare=True
    )
    assert (found["tokens_after"], found["query"]) == (9, "there dog on blue field")
    assert {"answer", "full_answer"} <= set(found)
    figures = draw(tiny.model, tiny.processor, inputs, image, QUESTION, [StackTok(), DivPrune(), VisionZip()], [6, 9])
    assert {"kept", "relevance", "trajectory"} <= set(figures)


@pytest.mark.parametrize("family", TILES)
def test_the_inspector(family: str) -> None:
    tiny = build(family)
    engine = Engine(tiny.model, tiny.processor, name=family, max_new_tokens=2)
    data = io.BytesIO()
    picture(200, 200).save(data, "PNG")
    held = engine.upload(data.getvalue())
    described = engine.describe(held)
    assert len(described["crops"]) == len(engine.views(held.name) or ()) == len(held.encoded.crops)
    assert ("fastv" in engine.methods) == (family not in READY_MASKS)
    for method in ("stacktok", "visionzip"):
        left = engine.left(held, QUESTION, method, 7)
        assert len(left.reduction) == 7
        assert sum(map(len, engine.indices(held, left))) <= 7
    given: Any = engine.answer(held.name, QUESTION, "stacktok", 7)
    assert given["tokens"] == 7


def test_the_views_of_a_resized_canvas_are_base_view_and_whole_picture() -> None:
    from stacktok.figures.encoder_views import encoder_views

    tiny, image = build("llava_onevision"), picture(200, 200)
    inputs = tiny.inputs([QUESTION], [[image]])
    with StackTok(budget=7)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    base, canvas = encoder_views(image, pruned.last[0].image, inputs["pixel_values"], tiny.processor.image_processor)
    whole = np.asarray(image.resize(canvas.size), dtype=float)
    assert base.size == (70, 70)
    assert np.abs(np.asarray(canvas, dtype=float) - whole).mean() < 4


@pytest.mark.parametrize("family", TILES)
def test_evaluation_answers_a_batch_of_prompts(family: str) -> None:
    tiny = build(family)
    answerer = Answerer.__new__(Answerer)
    answerer.model, answerer.processor, answerer._run = tiny.model, tiny.processor, None
    messages: list[Any] = [
        [{"role": "user", "content": [{"type": "image"}] * count + [{"type": "text", "text": QUESTION}]}]
        for count in (1, 2, 0)
    ]
    images = [[picture(160, 100)], [picture(90, 150, 1), picture(60, 60, 2)], []]
    prompts = [Prompt(own, pictures) for own, pictures in zip(messages, images, strict=True)]
    with answerer.pruned(StackTok(budget=6)):
        answers = answerer.answer(prompts, max_new_tokens=2, do_sample=False)
    assert [one.log.tokens for one in answers] == [6, 12, 0]


@pytest.mark.parametrize("family", ["internvl", "mistral3", "gemma3"])
def test_the_loop_without_hooks_says_what_it_does_not_lay_out(family: str) -> None:
    tiny = build(family)
    with pytest.raises(ValueError, match="cannot be laid out apart from their prompts"):
        Loop(tiny.model, tiny.processor)
