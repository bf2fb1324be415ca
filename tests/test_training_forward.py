"""Training computes what a user gets: the packed pass equals single prompts through the processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from training.config import ModelSizes
from training.data import TextPacker, View, make_batch
from training.labels import SLOTS
from training.losses import Heads, Objective
from training.model import build_model
from training.text import build_processor

from stacktok.scenes import FAMILIES, Style, make_scene, questions, render, seed_for

SMALL = {
    "image_size": 112,
    "vision_hidden": 64,
    "vision_mlp": 96,
    "vision_layers": 3,
    "vision_heads": 2,
    "text_hidden": 64,
    "text_mlp": 96,
    "text_layers": 2,
    "text_heads": 2,
}
STYLE = Style(size=112, thing_edge=(30, 50), groups=False, singles=(2, 3), sign_chances=(0.0, 1.0), sign_edge=(56, 42))


@pytest.mark.parametrize("architecture", ["llava", "llava_next"])
def test_packed_answers_equal_single_prompts(architecture: str) -> None:
    edge = 112 if architecture == "llava" else 56
    sizes = ModelSizes(**{**SMALL, "architecture": architecture, "image_size": edge})
    model = build_model(sizes, seed=1)
    processor = build_processor(sizes)
    scene = make_scene(seed_for("dev", 3), STYLE)
    view = View(112, 14, None if architecture == "llava" else edge)
    asked = questions(scene)
    with torch.no_grad():
        objective = Objective(model, Heads(64, 64))
        batch = make_batch([scene], view, questions, 1, TextPacker())
        tokens, _ = objective.encode(batch.pixels, batch.corner)
        packed = objective.answer_logits(objective.prompt(batch, tokens))[0]
        for number, question in enumerate(asked):
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}],
                add_generation_prompt=True,
            )
            inputs = processor(text=f"{prompt} {question.answer}", images=render(scene), return_tensors="pt")
            mine = (batch.block[0] == number) & (batch.target[0] >= 0)
            alone = model(**inputs).logits[0, -int(mine.sum()) :]
            torch.testing.assert_close(packed[mine], alone, rtol=1e-3, atol=1e-4)


def test_labels_name_what_a_patch_shows() -> None:
    scene = make_scene(seed_for("dev", 5))
    batch = make_batch([scene], View(336, 14), questions, 1, TextPacker())
    nouns = SLOTS["noun"][0]
    words = batch.words[0, 0].unflatten(0, (24, 24))
    for sign in scene.signs:
        x, y = (sign.box[0] + sign.box[2]) // 28, (sign.box[1] + sign.box[3]) // 28
        assert nouns[int(words[y, x])] == "sign"
    shown = {nouns[int(word)] for word in words.flatten()}
    assert {thing.kind for thing in scene.things} <= shown
    assert scene.background in shown
    assert int(batch.centre.sum()) == len(scene.things) + len(scene.signs)
    assert set(np.unique(batch.family)) <= set(range(len(FAMILIES)))
