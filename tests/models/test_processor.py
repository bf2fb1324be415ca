"""Checkpoints load from disk with their processors, for images alone where torchvision is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stacktok import StackTok
from stacktok.cli.common import load
from tests.evaluation.studies import save_tiny
from tests.tiny import BUILDERS, build, picture
from tests.tiny_tiles import BUILDERS as TILED

EVERY = [name for name in (*BUILDERS, *TILED) if name not in ("llava_next_mistral", "gemma4_large")]


@pytest.mark.parametrize("family", EVERY)
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
    inputs = processor(images=[[image] for image in images], text=texts, return_tensors="pt", padding=True)
    assert set(inputs) == set(expected)
    for name in expected:
        assert torch.equal(inputs[name], expected[name]), name
    given = []
    for own, other in ((model, processor), (tiny.model, tiny.processor)):
        with StackTok(budget=5)(own, other):
            given.append(own.generate(**inputs, max_new_tokens=3, do_sample=False))
    assert torch.equal(*given)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "mistral3", "gemma4"])
def test_a_processor_for_images_saves_and_loads_itself(family: str, tmp_path: Path) -> None:
    _, first = load(save_tiny(tmp_path / "a", family), "float32", "cpu", quiet=True)
    build(family).model.save_pretrained(tmp_path / "b")
    first.save_pretrained(tmp_path / "b")
    _, second = load(str(tmp_path / "b"), "float32", "cpu", quiet=True)
    assert second.chat_template == first.chat_template
    assert second.image_token_id == first.image_token_id
    assert second.to_dict() == first.to_dict()


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "smolvlm", "gemma4"])
def test_videos_without_torchvision_are_refused_with_what_to_install(family: str, tmp_path: Path) -> None:
    _, processor = load(save_tiny(tmp_path, family), "float32", "cpu", quiet=True)
    frames = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="need torchvision, which is not installed; pip install torchvision"):
        processor(text=["x"], videos=[frames])
