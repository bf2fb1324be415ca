"""VScan's second stage: the cut of the authors' code, behind the scan that other tests hold against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stacktok.methods import VScan, VScanTwoStage
from tests.methods import layer_by_layer
from tests.methods.seeded import Case, fixture
from tests.methods.test_authors import states_view
from tests.models.by_hand import stock_arguments
from tests.models.test_pruned_models import greedy
from tests.tiny import MROPE, build, picture

DEPTH = 6


@pytest.mark.parametrize(("case", "entry"), fixture("vscan_layers"))
def test_the_cut_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    method = VScanTwoStage()
    for count, kept in entry["kept"].items():
        assert method.choose(states_view(case), int(count)).tolist() == kept
        assert method.choose(states_view(case, padding=3), int(count)).tolist() == kept


def test_published_counts() -> None:
    method = VScanTwoStage()
    assert method.layers(32) == (15,)
    assert method.layers(28) == (13,)
    # 96 tokens that enter and 32 that are left average to 64.
    assert [method.keeps(32, entered, t) for t, entered in ((64, 96), (128, 192), (192, 288))] == [(32,), (64,), (96,)]
    assert method.keeps(32, 576, 576) == (576,)
    assert method.keeps(32, 576, 500) == (424,)
    with pytest.raises(ValueError, match="1 layers"):
        method.layers(1)
    with pytest.raises(ValueError, match="window=0"):
        VScanTwoStage(window=0)


@pytest.mark.parametrize("positions", ["compact", "kept"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_generation_equals_the_scan_and_then_the_layers_one_by_one(
    family: str, positions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(family, DEPTH)
    given = None if family in MROPE else positions
    if family in MROPE and positions == "compact":
        with pytest.raises(ValueError, match="positions='compact' is not defined for"):
            VScanTwoStage(budget=8, positions="compact")(tiny.model, tiny.processor)
        return
    inputs = tiny.inputs(["Is there a dog on the blue field?"], [[picture(160, 100)]])
    with VScan(budget=12, window=2, positions=given)(tiny.model, tiny.processor) as pruned:
        # Hooks run in order, so that this one sees what the language model gets of the scan.
        seen = stock_arguments(tiny, inputs)
        left, scanned = pruned.kept_positions, pruned.last[0]
    shorter = {"input_ids": inputs["input_ids"][:, left[0]], "attention_mask": torch.ones_like(left)}
    with monkeypatch.context() as patched:
        patched.setattr(layer_by_layer, "stock_arguments", lambda *given: seen)
        if given == "kept":
            # A kept token's position is its index in the unpruned prompt.
            patched.setattr(layer_by_layer, "sequence", lambda *given: (seen["inputs_embeds"], left, None))
        expected, lengths, last = layer_by_layer.run(
            tiny, shorter, {2: 4}, method="pyramiddrop", positions=positions, steps=4
        )
    with VScanTwoStage(budget=8, window=2, positions=given)(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 4)
        result = pruned.last[0]
        rows = [("What is it, please, in the image?", [picture(60, 170, 1)]), ("A question: is it two?", [])]
        rows.append(("Is there a dog on the blue field?", [picture(160, 100)]))
        together = greedy(tiny.model, tiny.inputs([q for q, _ in rows], [i for _, i in rows]), 4)
        beams = tiny.model.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=False)
    for step in range(4):
        torch.testing.assert_close(out.logits[step][0], expected[step], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(together.logits[step][2], expected[step], rtol=1e-4, atol=2e-5)
    assert beams.shape[1] > inputs["input_ids"].shape[1]
    assert lengths[0] > lengths[-1]
    assert result.per_layer == (12, 12, 12, 4, 4, 4)
    assert result.average == 8
    assert list(result.removed.values()) == [0, result.before - 12, 8]
    # What the scan merged is what an output token is made of.
    first = scanned.reduction
    outputs = [int(min(token.made_of)) for token in last]
    assert result.reduction.anchors.tolist() == first.anchors[outputs].tolist()
    assert [s.tolist() for s in result.reduction.sources] == [sorted(first.sources[i].tolist()) for i in outputs]
    assert max(len(s) for s in result.reduction.sources) > 1


def test_keeping_everything_is_bit_identical() -> None:
    tiny = build("llava_next", DEPTH)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    stock = greedy(tiny.model, inputs, 3)
    with VScanTwoStage(budget=None)(tiny.model, tiny.processor):
        ours = greedy(tiny.model, inputs, 3)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, ours.logits, strict=True))
    with VScanTwoStage(budget=1.0)(build("llava", DEPTH).model, tiny.processor) as pruned:
        greedy(build("llava", DEPTH).model, build("llava", DEPTH).inputs(["Is it?"], [[picture(60, 60)]]), 2)
    assert set(pruned.last[0].per_layer) == {pruned.last[0].before}
