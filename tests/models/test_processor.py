"""Checkpoints load from disk with their processors, Qwen2.5-VL's for images where torchvision is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stacktok import StackTok
from stacktok.cli.common import load
from tests.evaluation.studies import save_tiny
from tests.tiny import build, picture


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_a_loaded_processor_gives_the_inputs_of_the_one_that_was_saved(family: str, tmp_path: Path) -> None:
    tiny = build(family)
    model, processor = load(save_tiny(tmp_path, family), "float32", "cpu", quiet=True)
    questions, images = ["Is there a dog?", "How many cats are there?"], [picture(120, 80), picture(70, 150, seed=3)]
    expected = tiny.inputs(questions, [[image] for image in images])
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for question in questions
    ]
    inputs = processor(images=images, text=texts, return_tensors="pt", padding=True)
    assert set(inputs) == set(expected)
    for name in expected:
        assert torch.equal(inputs[name], expected[name]), name
    given = []
    for own, other in ((model, processor), (tiny.model, tiny.processor)):
        with StackTok(budget=5)(own, other):
            given.append(own.generate(**inputs, max_new_tokens=3, do_sample=False))
    assert torch.equal(*given)


def test_a_processor_without_its_video_half_saves_and_loads_itself(tmp_path: Path) -> None:
    _, first = load(save_tiny(tmp_path / "a", "qwen2_5_vl"), "float32", "cpu", quiet=True)
    build("qwen2_5_vl").model.save_pretrained(tmp_path / "b")
    first.save_pretrained(tmp_path / "b")
    _, second = load(str(tmp_path / "b"), "float32", "cpu", quiet=True)
    assert second.chat_template == first.chat_template
    assert second.image_token_id == first.image_token_id
    assert second.image_processor.to_dict() == first.image_processor.to_dict()
