"""Stress conditions: selectors see what the plan says, the language model what is there, and every start the same."""

from __future__ import annotations

import pytest
import torch

from stacktok.core.tokens import single_crop
from stacktok.evaluation.cells import cells_of
from stacktok.evaluation.conditions import asked_instead, disturb_image, disturb_query
from stacktok.evaluation.plan import ConditionPart
from stacktok.evaluation.run import run_plan
from stacktok.methods import DivPrune
from tests.evaluation import studies

KINDS = ("token-noise", "query-noise", "modality-gap", "random-question", "other-question")


def condition(kind, strength=2.0, seed=0):
    return ConditionPart(name=kind, kind=kind, strength=strength, seed=seed)


@pytest.fixture
def image():
    draw = torch.Generator().manual_seed(1)
    vision, projected = torch.randn(400, 64, generator=draw), 3 * torch.randn(400, 48, generator=draw) + 5
    return single_crop(vision, projected, (20, 20))


def test_token_noise_has_the_size_it_says_on_both_features(image):
    crop, seen = image.crops[0], disturb_image(condition("token-noise"), image, 7).crops[0]
    for name in ("vision", "projected"):
        before, after = getattr(crop, name), getattr(seen, name)
        # The constant part of the features is no spread between tokens.
        assert (after - before).std().item() == pytest.approx(2 * (before - before.mean(0)).std().item(), rel=0.03)


def test_query_noise_has_the_size_it_says():
    query = 4 * torch.ones(30, 200)
    seen = disturb_query(condition("query-noise", 0.5), query, query, 3)
    assert (seen - query).std().item() == pytest.approx(2, rel=0.05)


def test_a_modality_gap_is_one_vector_for_all_tokens_and_scenes(image):
    gap = condition("modality-gap", 1.5)
    crop = image.crops[0]
    moved = [disturb_image(gap, image, scene).crops[0] for scene in (1, 2)]
    shift = moved[0].projected - crop.projected
    assert torch.equal(moved[0].projected, moved[1].projected)
    assert torch.allclose(shift, shift[:1].expand_as(shift), atol=1e-4)
    assert shift[0].norm().item() == pytest.approx(1.5 * crop.projected.norm(dim=1).mean().item(), rel=1e-4)
    assert torch.equal(moved[0].vision, crop.vision)


def test_a_random_question_is_made_of_as_many_words_of_the_vocabulary():
    words = torch.arange(50.0)[:, None].expand(50, 8)
    query = torch.zeros(6, 8)
    seen = [disturb_query(condition("random-question"), query, words, item) for item in (0, 1, 0)]
    assert seen[0].shape == query.shape
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert set(seen[0][:, 0].tolist()) <= set(range(50))


def test_another_question_is_about_another_scene():
    scenes = [1, 1, 2, 3, 3]
    found = {asked_instead(condition("other-question", seed=seed), 1, scenes) for seed in range(40)}
    assert found == {2, 3, 4}
    with pytest.raises(ValueError, match="needs questions about two scenes; give more scenes"):
        asked_instead(condition("other-question"), 0, [1, 1])


def test_what_a_condition_does_not_name_stays(image):
    query = torch.randn(3, 48)
    for kind in KINDS:
        one = condition(kind)
        if kind not in ("token-noise", "modality-gap"):
            assert disturb_image(one, image, 1) is image
        if kind not in ("query-noise", "random-question"):
            assert disturb_query(one, query, query, 1) is query
        if kind != "other-question":
            assert asked_instead(one, 1, [1, 1, 2]) == 1


def test_seeds_make_other_noise_and_scenes_have_their_own(image):
    first, *others = (
        disturb_image(condition("token-noise", seed=seed), image, scene).crops[0].vision
        for seed, scene in ((0, 1), (1, 1), (0, 2))
    )
    assert torch.equal(first, disturb_image(condition("token-noise"), image, 1).crops[0].vision)
    assert not any(torch.equal(first, other) for other in others)


def test_conditions_are_an_axis_of_a_plan(tmp_path, monkeypatch):
    """The selector gets another query, the answers come from the true image; methods inside the model stay out."""
    checkpoint = studies.save_tiny(tmp_path / "m")
    methods = [{"name": "DivPrune", "method": "divprune"}, {"name": "FastV", "method": "fastv"}]
    kinds = [{"name": kind, "kind": kind, "strength": 2.0} for kind in ("token-noise", "other-question")]
    plan = studies.plan(checkpoint, methods=methods, budgets=[30], conditions=kinds, tasks=studies.SCENES)
    found = [(cell.label, cell.condition and cell.condition.name) for cell in cells_of(plan)]
    assert found == [
        ("Vanilla", None),
        ("DivPrune", None),
        ("DivPrune", "token-noise"),
        ("DivPrune", "other-question"),
        ("FastV", None),
    ]
    seen, reduce = [], DivPrune.reduce_prompt

    def watched(self, prepared, query, budget):
        seen.append((prepared[0].image.crops[0].vision, query))
        return reduce(self, prepared, query, budget)

    monkeypatch.setattr(DivPrune, "reduce_prompt", watched)
    results = {
        (r["settings"]["label"], (r["settings"].get("condition") or {}).get("name")): r["items"]
        for r in run_plan(plan, tmp_path / "out", device="cpu").read()
    }
    count = len(results["DivPrune", None]["score"])
    clean, noisy, other = seen[:count], seen[count : 2 * count], seen[2 * count :]
    for (vision, query), (noise, same), (kept, asked) in zip(clean, noisy, other, strict=True):
        assert not torch.equal(vision, noise)
        assert torch.equal(query, same)
        assert torch.equal(vision, kept)
        assert query.shape != asked.shape or not torch.equal(query, asked)
    # DivPrune does not look at the question, so another one changes nothing of its answers.
    assert results["DivPrune", "other-question"]["answer"] == results["DivPrune", None]["answer"]
