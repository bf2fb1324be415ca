"""Between encoder and language model this package makes nobody wait for a GPU, on any family of transformers models.

The models run on the pretended device of `tests.recording`, in the way that they run on a GPU: `backend="auto"` chooses
Triton, whose interpreter runs the kernels. What waits is noted from the encoder's return to the first decoder layer.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from stacktok.methods.stacktok import StackTok
from stacktok.models import adapter_for
from tests.recording import on_device, recorder  # noqa: F401 - a fixture
from tests.tiny import MROPE, RELATIVES, build, picture
from tests.tiny_tiles import TILES, VARIANTS

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets kernels where TRITON_INTERPRET=1 is set", allow_module_level=True)

FAMILIES = ("llava", "llava_next", "llava_next_mistral", *MROPE, *RELATIVES, *TILES, *VARIANTS)
QUESTIONS = ["What is in the image?", "Is there a dog on the blue field?"]
BUDGET = 3


class ReachedError(Exception):
    """The language model's layers are about to run."""


def watched(tiny, record):
    """The model on the device; it stops at its first decoder layer, and notes what waits from its encoder on."""
    model, adapter = on_device(tiny.model), adapter_for(tiny.model)
    model.set_attn_implementation("eager")
    base = adapter.base(model)
    for modality in adapter.modalities:
        encode = getattr(base, f"get_{modality}_features")

        @functools.wraps(encode)
        def encoded(*args, encode=encode, **kwargs):
            found = encode(*args, **kwargs)
            record.active = True
            return found

        vars(base)[f"get_{modality}_features"] = encoded

    def stop(*_):
        record.active = False
        raise ReachedError

    adapter.layers(model)[0].register_forward_pre_hook(stop)
    return model


def waits_of(record, run):
    """Waits and launches of a call that ends at the language model."""
    record.waits.clear()
    record.launches.clear()
    with pytest.raises(ReachedError), torch.no_grad():
        run()
    return list(record.waits), list(record.launches)


@pytest.fixture(autouse=True)
def masks_by_indices(monkeypatch):
    """The library's masks by broadcasting: its other way, vmap, cannot look into tensors of the pretended device."""
    monkeypatch.setattr(
        masking_utils,
        "_vmap_expansion_sdpa",
        lambda function: lambda *indices: function(*masking_utils._non_vmap_expansion_sdpa(*indices)),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_waits_between_encoder_and_language_model(family, recorder):  # noqa: F811
    """Two prompts of unlike length in one batch: no wait of ours, none added to the model's own, one launch each."""
    with _disable_current_modes():
        tiny = build(family)
        inputs = dict(tiny.inputs(QUESTIONS, [[picture(160, 100)], [picture(90, 150, 1)]]))
        with StackTok(budget=BUDGET)(tiny.model, tiny.processor) as pruned, torch.no_grad():
            tiny.model(**inputs)
            expected, crops = pruned.kept_positions, [len(result.image.crops) for result in pruned.last]
    model, there = watched(tiny, recorder), on_device(inputs)
    with StackTok(budget=None)(model, tiny.processor) as pruned:
        stock, _ = waits_of(recorder, lambda: model.generate(**there, max_new_tokens=1, do_sample=False))
        pruned.budget = BUDGET
        waits, launches = waits_of(recorder, lambda: model.generate(**there, max_new_tokens=1, do_sample=False))
        assert [wait for wait in waits if wait.ours] == []
        assert not Counter(waits) - Counter(stock)
        merged = [("merge", (sum(own > 1 for own in crops),))] if max(crops) > 1 else []
        both = (sum(crops),)
        assert launches == [("facility_location", both)] * 2 + merged + [("swaps", both)]
        # Counts are known; looking closer reads the device, and finds what the host keeps.
        assert [result.after for result in pruned.last] == [BUDGET] * 2
        assert torch.equal(pruned.kept_positions, expected)


@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl", "gemma3"])
def test_a_plain_forward_pass_waits_for_nothing_either(family, recorder):  # noqa: F811
    with _disable_current_modes():
        tiny = build(family)
        inputs = dict(tiny.inputs(QUESTIONS[:1], [[picture(60, 100)]]))
    model, there = watched(tiny, recorder), on_device(inputs)
    with StackTok(budget=BUDGET)(model, tiny.processor):
        waits, launches = waits_of(recorder, lambda: model(**there))
    assert [wait for wait in waits if wait.ours] == []
    assert launches
