"""The loop that compacts inputs itself answers as the hooked model does, to the token."""

from __future__ import annotations

import pytest
import torch

from stacktok import StackTok
from stacktok.evaluation.loop import Loop
from stacktok.methods import DivPrune, VisionZip
from tests.tiny import build, picture


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("positions", ["compact", "kept"])
@pytest.mark.parametrize(("make", "budget"), [(StackTok, None), (StackTok, 7), (VisionZip, 9), (DivPrune, 5)])
def test_answers_equal_those_of_the_runtime(family, positions, make, budget):
    tiny = build(family)
    loop = Loop(tiny.model, tiny.processor)
    pictures = [picture(120, 90), picture(90, 120, 1)]
    texts = ["How many red cats are there?", "Is there a dog?"]
    prompts = [loop.prompt(image, loop.encode(image), text) for image, text in zip(pictures, texts, strict=True)]
    method = make(budget=budget, positions=positions)
    kept = [None if budget is None else method.reduce(prompt.image, prompt.query, budget) for prompt in prompts]
    together = loop.answers(prompts, kept, positions)
    alone = [loop.answers([prompt], [one], positions)[0] for prompt, one in zip(prompts, kept, strict=True)]
    assert together == alone
    for image, text, given in zip(pictures, texts, alone, strict=True):
        content = [{"type": "image"}, {"type": "text", "text": text}]
        rendered = tiny.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = tiny.processor(images=image, text=rendered, return_tensors="pt")
        with method(tiny.model, tiny.processor) as pruned, torch.inference_mode():
            out = tiny.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        new = out[0, inputs["input_ids"].shape[1] :]
        assert tiny.processor.decode(new, skip_special_tokens=True).strip() == given
        if budget is not None:
            assert pruned.after == budget


def test_a_family_with_three_dimensional_positions_is_refused():
    tiny = build("qwen2_5_vl")
    with pytest.raises(ValueError, match="has \\(t, h, w\\) positions"):
        Loop(tiny.model, tiny.processor)
