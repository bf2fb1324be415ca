"""A pruned run equals an independent computation, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stacktok import StackTok
from tests.models.by_hand import pruned_by_hand
from tests.tiny import MROPE, RELATIVES, build, picture, video_inputs
from tests.tiny_tiles import TILES, VARIANTS

FAMILIES = ("llava", "llava_next", "llava_next_mistral", *MROPE, *TILES)
QUESTIONS = ["What is in the image?", "Is there a dog on the blue field?"]
WORDS = {
    "llava": ["in image", "there dog on blue field"],
    "qwen": ["Question: What is in the image?", "Question: Is there a dog on the blue field?"],
}
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def words(family: str) -> list[str]:
    return WORDS["qwen" if family.startswith("qwen") else "llava"]


def greedy(model: Any, inputs: Any, steps: int, **settings: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_logits=True, **settings
    )


@pytest.mark.parametrize(
    ("family", "positions"),
    # Compact positions are refused for M-RoPE, which test_compact_positions_are_refused_for_mrope shows.
    [
        (f, p)
        for f in (*FAMILIES, *RELATIVES, *VARIANTS)
        for p in ("compact", "kept")
        if p == "kept" or f not in (*MROPE, *RELATIVES)
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generation_equals_deleting_rows_by_hand(family: str, positions: str, attention: str) -> None:
    tiny = build(family)
    images = [[picture(160, 100)], [picture(90, 150, 1)]]
    inputs = tiny.inputs(QUESTIONS, images)
    expected, columns = pruned_by_hand(tiny, inputs, words(family), 7, positions=positions, steps=5)
    tiny.model.set_attn_implementation(attention)
    try:
        with StackTok(budget=7, positions=positions)(tiny.model, tiny.processor) as pruned:
            out = greedy(tiny.model, inputs, 5)
            plain = tiny.model(**inputs)
    finally:
        tiny.model.set_attn_implementation("sdpa")
    for row in range(2):
        for step in range(5):
            torch.testing.assert_close(out.logits[step][row], expected[row][step][-1], **LOOSE)
        kept = pruned.kept_positions[row]
        assert kept[kept >= 0].tolist() == columns[row]
        torch.testing.assert_close(plain.logits[row, kept >= 0], expected[row][0], **LOOSE)
    length = max(len(c) for c in columns)
    assert plain.logits.shape[1] == length
    assert out.past_key_values.get_seq_length() == length + 4
    assert torch.equal(out.sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    assert [(result.row, result.after) for result in pruned.last] == [(0, 7), (1, 7)]
    assert [result.query for result in pruned.last] == words(family)


@pytest.mark.parametrize("family", [*MROPE, *RELATIVES])
@pytest.mark.parametrize("grids", [[(3, 4, 6)], [(2, 4, 4), (4, 4, 6)]], ids=["one", "two"])
def test_frames_of_a_video_share_its_budget(family: str, grids: list[tuple[int, int, int]]) -> None:
    tiny = build(family)
    inputs = video_inputs(tiny, QUESTIONS[0], grids)
    expected, columns = pruned_by_hand(tiny, inputs, words(family), 0.25, steps=4)
    with StackTok(budget=0.25)(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 4)
    for step in range(4):
        torch.testing.assert_close(out.logits[step][0], expected[0][step][-1], **LOOSE)
    assert [result.modality for result in pruned.last] == ["video"] * len(grids)
    assert [result.after for result in pruned.last] == [t * h * w // 4 // 4 for t, h, w in grids]
    assert [len(result.selection.crops) for result in pruned.last] == [t for t, _, _ in grids]
    assert pruned.kept_positions[0].tolist() == columns[0]
    assert [result.query for result in pruned.last] == words(family)[:1] * len(grids)
