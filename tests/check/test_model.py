"""`stacktok check` on a model: it passes where all is well, and finds faults that are planted."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stacktok import StackTok
from stacktok.check import Outcomes, check_model
from stacktok.core import greedy, reference
from stacktok.runtime import attach, before, cache
from tests.tiny import build, picture

SAMPLES = [(picture(96, 64, 0), "Is there a dog?"), (picture(64, 96, 1), "How many cats are there?")]

BY_HAND = "pruned is the same tokens deleted by hand"
RAGGED = "a ragged batch is its single runs"
BEAMS = "beams have the scores of their tokens"
HOOKS = "no hook is left"
CPU = "backend cpu equals the reference to the bit"


def outcomes(family: str = "llava", **settings: Any) -> Outcomes:
    tiny = build(family)
    method = StackTok(budget="25%", **settings)
    return check_model(tiny.model, tiny.processor, SAMPLES, method, name="tiny", new_tokens=3, repeats=1)


def failed(found: Outcomes) -> dict[str, str]:
    return {row.name: row.detail for row in found.rows if row.status == "fail"}


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen3_vl", "qwen3_5", "mistral3", "gemma3", "gemma4"])
def test_a_sound_model_passes(family: str) -> None:
    found = outcomes(family)
    assert failed(found) == {}
    assert {row.name for row in found.rows if row.status == "pass"} >= {BY_HAND, RAGGED, BEAMS, HOOKS, CPU}


def test_beams_of_a_model_whose_pixels_are_repeated_wrongly_are_checked_on_encoded_images() -> None:
    """In transformers 5.19, `generate` repeats the images of Qwen3.5 patch by patch: rows of one prompt differ."""
    tiny = build("qwen3_5")
    inputs = tiny.inputs(["Is there a dog?"], [[SAMPLES[0][0]]])
    beams = {"num_beams": 2, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    first, second = tiny.model.generate(**inputs, **beams, do_sample=False).logits[0]
    if torch.equal(first, second):
        pytest.skip("this version of transformers repeats the images of Qwen3.5 as a whole")
    (row,) = [row for row in outcomes("qwen3_5").rows if row.name == BEAMS]
    assert (row.status, "with encoded images alone" in row.detail) == ("pass", True)


@pytest.mark.parametrize("family", ["llava", "qwen3_5"])
def test_a_position_shifted_for_beams_is_found(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    continued = before.BeforePruning._continue

    def shifted(self: Any, call: Any, state: Any, kwargs: Any) -> Any:
        found = continued(self, call, state, kwargs)
        positions = found["position_ids"]
        return found if positions.shape[-2] == 1 else {**found, "position_ids": positions + 3}

    monkeypatch.setattr(before.BeforePruning, "_continue", shifted)
    assert "scores of beams" in failed(outcomes(family))[BEAMS]


def test_kept_positions_pass_too() -> None:
    assert failed(outcomes(positions="kept")) == {}


def test_the_query_and_the_stages_are_shown() -> None:
    found = outcomes()
    assert found.queries == {"Is there a dog?": "there dog", "How many cats are there?": "many cats there"}
    assert [stage["tokens"] for stage in found.stages] == ["full", "25%"]
    assert all(stage["prefill"] > 0 for stage in found.stages)


def test_a_shifted_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    count = before.count_positions
    monkeypatch.setattr(before, "count_positions", lambda valid: count(valid) + 1)
    assert "position" in failed(outcomes())[BY_HAND]


def test_a_position_shifted_while_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    continued = before.BeforePruning._continue

    def shifted(self: Any, call: Any, state: Any, kwargs: Any) -> Any:
        found = continued(self, call, state, kwargs)
        return {**found, "position_ids": found["position_ids"] + 1}

    monkeypatch.setattr(before.BeforePruning, "_continue", shifted)
    assert "step 1" in failed(outcomes())[BY_HAND]


def test_a_mask_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = cache.CacheState.mask

    def short(self: Any, *args: Any) -> torch.Tensor:
        found = mask(self, *args).clone()
        first = found.long().argmax(1)
        found[torch.arange(len(found)), first] = False
        return found

    monkeypatch.setattr(cache.CacheState, "mask", short)
    assert "mask" in failed(outcomes())[RAGGED]


def test_a_kept_hook_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Any] = []
    attached = attach.BeforePruning.attach

    def leaky(self: Any, undo: list[Callable[[], object]]) -> None:
        attached(self, undo)
        handles.append(self.model.register_forward_hook(lambda module, args, output: None))

    monkeypatch.setattr(attach.BeforePruning, "attach", leaky)
    try:
        assert "not as it was" in failed(outcomes())[HOOKS]
    finally:
        for handle in handles:
            handle.remove()


def test_a_backend_with_another_tie_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted backend runs the reference on tokens in reverse order, so that ties go to the highest index."""

    def flipped(problems: Any) -> Any:
        found = []
        for problem in problems:
            a_vv, eligible = problem.state[0], problem.state[1]
            state = reference.precompute(a_vv[::-1, ::-1].copy(), eligible[::-1].copy())
            query = problem.query_affinity[:, ::-1].copy()
            (steps,) = reference.greedy([problem._replace(state=state, query_affinity=query)])
            found.append(steps._replace(order=len(a_vv) - 1 - steps.order))
        return found

    original = greedy.get_backend
    planted = SimpleNamespace(precompute=reference.precompute, greedy=flipped, refine=reference.refine)
    monkeypatch.setattr(greedy, "get_backend", lambda name: original(name) if name == "reference" else planted)
    assert "than the reference" in failed(outcomes())[CPU]


def test_the_backend_for_gpus_is_held_against_the_reference_where_it_can_run() -> None:
    """Triton interprets the kernels in the environment of `make test-triton`; elsewhere the row says why not."""
    (row,) = (row for row in outcomes().rows if row.name == "backend triton equals the reference to the bit")
    if find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
        assert (row.status, row.detail) == ("pass", "4 selections")
    else:
        assert row.status == "skipped"
        assert row.detail.startswith("not available here: ")


def test_an_error_inside_a_check_is_its_outcome_and_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> None:
        raise RuntimeError("no room in /home/somebody/secret/kernel.so")

    monkeypatch.setattr(before.BeforePruning, "_shorten", broken)
    found = outcomes()
    assert not found.passed
    assert "RuntimeError" in failed(found)[BY_HAND]
    assert "somebody" not in found.block()
    assert "kernel.so" in found.block()


def test_a_method_that_makes_tokens_is_refused() -> None:
    from stacktok.methods import AveragePool

    tiny = build("llava")
    with pytest.raises(ValueError, match="cannot be deleted by hand"):
        check_model(tiny.model, tiny.processor, SAMPLES, AveragePool(budget=4), name="tiny")
