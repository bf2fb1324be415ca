"""The commands' own functions on the tiny model of every family."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stacktok.cli.ask import answer
from stacktok.cli.show import draw
from stacktok.evaluation.answering import Answerer, Prompt
from stacktok.evaluation.loop import Loop
from stacktok.evaluation.run import run_plan
from stacktok.methods import DivPrune, StackTok, VisionZip
from stacktok.models.prompt import prompt_inputs
from stacktok.view.engine import Engine
from tests.evaluation.studies import plan, save_tiny
from tests.tiny import MROPE, RELATIVES, build, picture
from tests.tiny_tiles import READY_MASKS, TILES, VARIANTS

QUESTION = "Is there a dog on the blue field?"
FAMILIES = ("llava_next", *MROPE, *TILES)


@pytest.mark.parametrize("family", [*FAMILIES, *RELATIVES, *VARIANTS])
def test_ask_and_show(family: str) -> None:
    tiny, image = build(family), picture(200, 200)
    inputs = prompt_inputs(tiny.processor, image, QUESTION, tiny.model)
    found = answer(
        tiny.model, tiny.processor, inputs, StackTok(budget=9), max_new_tokens=2, question=QUESTION, compare=True
    )
    words = f"Question: {QUESTION}" if family.startswith("qwen") else "there dog on blue field"
    assert (found["tokens_after"], found["query"]) == (9, words)
    assert {"answer", "full_answer"} <= set(found)
    if family not in FAMILIES:
        return
    figures = draw(tiny.model, tiny.processor, inputs, image, QUESTION, [StackTok(), DivPrune(), VisionZip()], [6, 9])
    assert {"kept", "relevance", "trajectory"} <= set(figures)


@pytest.mark.parametrize("family", FAMILIES)
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
        left = engine.pruned_view(held, QUESTION, method, 7)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_answers_a_batch_of_prompts(family: str) -> None:
    tiny = build(family)
    answerer = Answerer.__new__(Answerer)
    answerer.model, answerer.processor, answerer._run = tiny.model, tiny.processor, None
    messages: list[Any] = [
        [{"role": "user", "content": [{"type": "image"}] * count + [{"type": "text", "text": QUESTION}]}]
        for count in (1, 2, 0)
    ]
    images = [[picture(160, 100)], [picture(90, 150, 1), picture(120, 120, 2)], []]
    prompts = [Prompt(own, pictures) for own, pictures in zip(messages, images, strict=True)]
    with answerer.pruned(StackTok(budget=6)):
        answers = answerer.answer(prompts, max_new_tokens=2, do_sample=False)
    assert [one.log.tokens for one in answers] == [6, 12, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_is_run_by_the_packages_own_engine(family: str, tmp_path: Path) -> None:
    small = plan(save_tiny(tmp_path / "m", family), scenes=1, limit=2, budgets=[5])
    small = small.model_copy(update={"methods": small.methods[:1], "tasks": small.tasks[:1]})
    results = list(run_plan(small, tmp_path / "out", device="cpu").read())
    assert sorted(result["items"]["tokens"][0] == 5 for result in results) == [False, True]


def test_evaluation_hands_the_question_over() -> None:
    """Read back from the prompt, the begun answer would be taken for a part of the question."""
    tiny = build("llava")
    answerer = Answerer.__new__(Answerer)
    answerer.model, answerer.processor, answerer._run = tiny.model, tiny.processor, None
    question = "Is ASSISTANT: or <image> or USER: on the red square?"
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "first"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It says USER: root."}]},
        {"role": "user", "content": [{"type": "text", "text": question}]},
    ]
    with answerer.pruned(StackTok(budget=6)):
        answerer.answer([Prompt(messages, [picture()])], max_new_tokens=2, do_sample=False)
        assert answerer._run.last[0].query == "ASSISTANT USER on red square"
        # Too long to be handed over.
        messages[-1]["content"][0]["text"] = "red " * 5001
        answerer.answer([Prompt(messages, [picture()])], max_new_tokens=1, do_sample=False)
        assert answerer._run.last[0].query.startswith("root ")


@pytest.mark.parametrize("family", ["internvl", "mistral3", "gemma3"])
def test_the_loop_without_hooks_says_what_it_does_not_lay_out(family: str) -> None:
    tiny = build(family)
    with pytest.raises(ValueError, match="cannot be laid out apart from their prompts"):
        Loop(tiny.model, tiny.processor)
