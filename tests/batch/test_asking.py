"""Several questions per call of ``generate`` are answered as one by one, and a picture is encoded and prepared once."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from stacktok.methods import FastV, StackTok, VisionZip
from stacktok.runtime.asking import Counts, ask_rows
from tests.tiny import build, picture

ROWS = [
    (0, "Is there a dog?"),
    (0, "How many cats are there on the blue field?"),
    (1, "Is there a dog?"),
    (1, "Describe the snowboard <image> in the picture, please."),
    (0, "Is there a dog?"),
]
PICTURES = [picture(200, 150, 1), picture(150, 200, 2)]
ONCE = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "llava_onevision")
# Their placeholders stand among text of the prompt, or need it to be told apart.
EACH = ("internvl", "smolvlm", "gemma3", "mistral3")


def plain(answers: list[Any]) -> list[Any]:
    return [(answer.text, answer.before, answer.after) for answer in answers]


@pytest.mark.parametrize("family", [*ONCE, *EACH])
def test_together_as_one_by_one(family: str) -> None:
    tiny, counts, calls, prepared = build(family), Counts(), [], []

    class Watched(StackTok):
        def prepare(self, image: Any) -> Any:
            prepared.append(image)
            return super().prepare(image)

    with Watched(budget=6)(tiny.model, tiny.processor) as pruned:
        single = [
            ask_rows(tiny.model, tiny.processor, pruned, [PICTURES[index]], [(0, question)], 4)[0]
            for index, question in ROWS
        ]
        prepared.clear()
        base = tiny.model.base_model
        tap = base.get_image_features

        @functools.wraps(tap)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return tap(*args, **kwargs)

        base.get_image_features = counted
        try:
            together = ask_rows(tiny.model, tiny.processor, pruned, PICTURES, ROWS, 4, counts)
        finally:
            base.get_image_features = tap
        queries = [result.query for result in pruned.last]
        assert plain(together) == plain(single)
        assert {answer.after for answer in single} == {6}
        assert len(queries) == len(ROWS)
        assert len(set(queries)) == 3
        assert (counts.encoded, counts.prepared) == ((2, 2) if family in ONCE else (5, 5))
        assert len(prepared) == counts.prepared
        assert len(calls) == 1
        pruned.budget = None
        whole = ask_rows(tiny.model, tiny.processor, pruned, PICTURES, ROWS, 4)
        alone = ask_rows(tiny.model, tiny.processor, pruned, PICTURES[:1], ROWS[:1], 4)
        assert plain(whole)[:1] == plain(alone)
        # Text that separates the lines of an image is counted where it is pruned.
        assert whole[0].before == whole[0].after
        assert whole[0].before == single[0].before or family == "mistral3"


@pytest.mark.parametrize("method", [VisionZip(budget=6), FastV(budget=9, counting="kept")], ids=["visionzip", "fastv"])
def test_methods_that_read_attention(method: Any) -> None:
    tiny = build("llava")
    with method(tiny.model, tiny.processor) as pruned:
        single = [ask_rows(tiny.model, tiny.processor, pruned, [PICTURES[i]], [(0, q)], 4)[0] for i, q in ROWS]
        together = ask_rows(tiny.model, tiny.processor, pruned, PICTURES, ROWS, 4)
        assert plain(together) == plain(single)
        assert len(pruned.last) == len(ROWS)
