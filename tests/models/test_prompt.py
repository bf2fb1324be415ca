"""Prompts from a person's text: markers in it are text, and pictures are bounded."""

from __future__ import annotations

import pytest
from PIL import Image

from stacktok.evaluation.answering import Answerer, question_prompt
from stacktok.models.pictures import PictureError, PictureLimits
from stacktok.models.prompt import plain_text, prompt_inputs
from tests import tiny

MARKERS = ("<image>", "<video>", "<|image_pad|>", "<<image>image>")


@pytest.mark.parametrize("family", list(tiny.BUILDERS))
@pytest.mark.parametrize("template", [True, False])
def test_markers_in_a_question_are_text(family: str, template: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tiny.build(family)
    if not template:
        monkeypatch.setattr(built.processor, "chat_template", None)
    picture, token = tiny.picture(90, 60), built.model.config.image_token_id
    expected = (prompt_inputs(built.processor, picture, "red", built.model)["input_ids"] == token).sum()
    for marker in MARKERS:
        inputs = prompt_inputs(built.processor, picture, f"{marker} red {marker}", built.model)
        assert (inputs["input_ids"] == token).sum() == expected, marker
        built.model.generate(**inputs, max_new_tokens=1, do_sample=False)


def test_text_without_markers_stays_as_it_is() -> None:
    processor = tiny.build("llava").processor
    for text in ("", "a < b > c <b> images?", "<", "<image", "image>"):
        assert plain_text(text, processor) == text
    assert plain_text("a <image>b", processor) == "a < image >b"


def test_evaluations_take_markers_as_text(tmp_path: object) -> None:
    built = tiny.build("llava")
    answerer = Answerer.__new__(Answerer)
    answerer.model, answerer.processor = built.model, built.processor
    answerer._run = answerer._method = None
    (answer,) = answerer.answer([question_prompt(tiny.picture(90, 60), "<image> <image>?")], max_new_tokens=1)
    assert answer.log.tokens == answer.log.tokens_full > 0


def test_strips_and_large_pictures_are_refused_before_they_are_processed() -> None:
    built = tiny.build("llava")

    class Never:
        chat_template = None
        tokenizer = built.processor.tokenizer

        def __call__(self, **kwargs: object) -> None:
            raise AssertionError("the picture was processed")

    for size, says in (((6000, 1), "6000 x 1 pixels"), ((1, 51), "1 x 51 pixels"), ((5000, 5000), "25 megapixels")):
        with pytest.raises(PictureError, match=says):
            prompt_inputs(Never(), Image.new("RGB", size), "red", built.model, PictureLimits(megapixels=20))
    with pytest.raises(PictureError, match="visual tokens; give a smaller one, of at most 3 tokens"):
        prompt_inputs(built.processor, tiny.picture(90, 60), "red", built.model, PictureLimits(tokens=3))
    with pytest.raises(ValueError, match="tokens=0 is not greater than 0"):
        PictureLimits(tokens=0)
