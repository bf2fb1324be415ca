"""Qwen3-VL's DeepStack: what is added to the hidden states of a visual token stays its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from stacktok import StackTok
from stacktok.methods import AveragePool, VisionZip
from stacktok.models.base import KeptTokens
from stacktok.models.qwen3_vl import Qwen3VLAdapter
from tests.models.by_hand import deepstack_rows, pruned_by_hand, stock_arguments
from tests.models.test_pruned_models import LOOSE, QUESTIONS, words
from tests.tiny import build, picture

IMAGES = [[picture(160, 100), picture(90, 90, 4)], [picture(90, 150, 1)]]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("method", [StackTok(budget=6), AveragePool(budget=5), VisionZip(budget=5)], ids=str)
def test_every_token_gets_its_own_features_and_a_merged_one_the_mean(family: str, method: Any) -> None:
    tiny = build(family)
    inputs = tiny.inputs(QUESTIONS, IMAGES)
    own = deepstack_rows(stock_arguments(tiny, inputs))
    layers = tiny.model.model.language_model.layers
    left: list[torch.Tensor] = []
    entered: list[torch.Tensor] = []
    with method(tiny.model, tiny.processor) as pruned, torch.no_grad():
        handles = [layer.register_forward_hook(lambda m, a, out: left.append(out)) for layer in layers[:2]]
        handles += [
            layer.register_forward_pre_hook(
                lambda m, a, k: entered.append(a[0] if a else k["hidden_states"]), with_kwargs=True
            )
            for layer in layers[1:3]
        ]
        tiny.model(**inputs)
        for handle in handles:
            handle.remove()
    made_of: dict[tuple[int, int], list[int]] = {}
    for row in range(2):
        places = (inputs["input_ids"][row] == tiny.model.config.image_token_id).nonzero()[:, 0].tolist()
        for result in (result for result in pruned.last if result.row == row):
            for anchor, sources in zip(result.reduction.anchors, result.reduction.sources, strict=True):
                column = places[int(result.image.offsets_of(anchor[None])[0])]
                made_of[row, column] = [places[i] for i in result.image.offsets_of(sources).tolist()]
            places = places[result.image.length :]
    merged = sum(len(columns) > 1 for columns in made_of.values())
    assert (merged > 0) == method.merges
    for layer in range(2):
        added = entered[layer] - left[layer]
        for row, columns in enumerate(pruned.kept_positions.tolist()):
            for at, column in enumerate(columns):
                expected = torch.zeros(32)
                if column >= 0 and (row, column) in made_of:
                    expected = torch.stack([own[row, source][layer] for source in made_of[row, column]]).mean(0)
                torch.testing.assert_close(added[row, at], expected, rtol=1e-4, atol=1e-5)


class FirstRows(Qwen3VLAdapter):
    """Gives the kept tokens the features of the first tokens."""

    def shorten(self, kwargs: Mapping[str, Any], kept: KeptTokens) -> dict[str, Any]:
        changed = super().shorten(kwargs, kept)
        count = int(changed["visual_pos_masks"].sum())
        return {**changed, "deepstack_visual_embeds": [rows[:count] for rows in kwargs["deepstack_visual_embeds"]]}


def test_features_on_the_wrong_tokens_are_seen_in_the_logits() -> None:
    tiny = build("qwen3_vl")
    inputs = tiny.inputs(QUESTIONS[:1], IMAGES[1:])
    expected, _ = pruned_by_hand(tiny, inputs, words("qwen3_vl")[:1], 7)
    for adapter, right in ((Qwen3VLAdapter(), True), (FirstRows(), False)):
        with StackTok(budget=7)(tiny.model, tiny.processor, adapter=adapter), torch.no_grad():
            logits = tiny.model(**inputs).logits[0]
        assert torch.allclose(logits, expected[0][0], **LOOSE) == right
