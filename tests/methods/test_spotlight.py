"""Spotlight against its definition: F(S) = sum_i w_i max_{j in S} A^vv_ij, evaluated as it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stacktok
from stacktok import CropSelection, Selection, StackTok
from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.evaluation.evidence_dpp import EvidenceDPP
from stacktok.methods import Spotlight
from tests.core import naive
from tests.core.cases import features
from tests.tiny import build, picture

BACKENDS = ["reference", "cpu"]


def slow_weights(crops: list[Any], query: Any, views: list[int], focus: float, exponent: float = 2.0) -> list[Any]:
    """w_i of every crop, token by token."""
    unit = [[z / np.linalg.norm(z) for z in np.asarray(crop, dtype=np.float64)] for crop in crops]
    rho = [np.zeros(len(crop)) for crop in crops]
    for q in np.asarray(query, dtype=np.float64):
        cosines = [np.array([z @ q / np.linalg.norm(q) for z in crop]) for crop in unit]
        mean = np.concatenate(cosines).mean()
        for own, cosine in zip(rho, cosines, strict=True):
            own += np.maximum(cosine - mean, 0) ** exponent
    found = []
    for own, view in zip(rho, views, strict=True):
        members = [r for r, v in zip(rho, views, strict=True) if v == view]
        found.append((1 - focus) / sum(map(len, members)) + focus * own / sum(r.sum() for r in members))
    return found


def check_greedy(order: list[tuple[int, int]], matrices: list[Any], weights: list[Any]) -> list[float]:
    """Every pick has the largest gain of F, up to float32; returns F after every pick."""
    kept: list[list[int]] = [[] for _ in matrices]
    values = []
    for crop, token in order:
        gains = {
            (c, s): naive.gain(w[:, None] * a, s, kept[c])
            for c, (a, w) in enumerate(zip(matrices, weights, strict=True))
            for s in range(len(a))
            if s not in kept[c]
        }
        assert gains[crop, token] >= max(gains.values()) - 1e-6
        kept[crop].append(token)
        values.append(sum(naive.total(w[:, None] * a, s) for a, w, s in zip(matrices, weights, kept, strict=True)))
    return values


def image_of(sizes: list[tuple[int, int]], base: int | None, seed: int = 0) -> tuple[EncodedImage, torch.Tensor]:
    n = sum(rows * columns for rows, columns in sizes)
    x, z, q = (torch.from_numpy(part) for part in features(n, 3, seed=seed))
    layout = ImageLayout.raster(*sizes)
    return EncodedImage.of(ImageLayout(layout.crops, layout.length, base=base), x, z), q


@pytest.mark.parametrize("focus", [0.0, 0.5, 0.95, 1.0])
def test_every_pick_has_the_largest_gain_of_weighted_coverage(focus: float) -> None:
    for seed in range(3):
        x, z, q = features(40, 4, seed=seed)
        found = Spotlight(budget=12, focus=focus).select(x, z, q)
        (weights,) = slow_weights([z], q, [0], focus)
        matrix = naive.affinity(x, x, 0.2)
        values = check_greedy([(0, token) for token in found.order.tolist()], [matrix], [weights])
        np.testing.assert_allclose(found.relevance[1:], values, atol=1e-6)
        np.testing.assert_allclose(found.row_weights, weights, atol=1e-7)
        covered = [naive.total(matrix, found.order[:t].tolist()) / 40 for t in range(13)]
        np.testing.assert_allclose(found.coverage, covered, atol=1e-6)
        assert (found.focus, found.m, set(found.criterion)) == (focus, 4, {"relevance"})


@pytest.mark.parametrize(("base", "views"), [(0, [0, 1, 1]), (2, [0, 0, 1]), (None, [0, 0, 0])])
def test_crops_share_a_budget_by_the_gain_of_one_sum(base: int | None, views: list[int]) -> None:
    image, q = image_of([(4, 4), (3, 5), (2, 6)], base)
    record = Spotlight(focus=0.9).reduce(image, q, 10).record
    weights = slow_weights([crop.projected for crop in image.crops], q, views, 0.9)
    matrices = [naive.affinity(crop.vision, crop.vision, 0.2) for crop in image.crops]
    values = check_greedy(list(record.order), matrices, weights)
    assert sum(crop.final_relevance for crop in record.crops) == pytest.approx(values[-1], abs=1e-6)
    for crop, own in zip(record.crops, weights, strict=True):
        np.testing.assert_allclose(crop.row_weights, own, atol=1e-7)
    for view in set(views):
        assert sum(w.sum() for w, v in zip(weights, views, strict=True) if v == view) == pytest.approx(1)


def test_views_can_be_weighted_by_their_tokens() -> None:
    image, q = image_of([(4, 4), (3, 5), (2, 6)], 0)
    one_view = Spotlight(focus=0.9, equal_views=False).reduce(image, q, 10).record
    assert one_view == Spotlight(focus=0.9).reduce(image_of([(4, 4), (3, 5), (2, 6)], None)[0], q, 10).record


@pytest.mark.parametrize(
    "settings",
    [{}, {"focus": 0.9}, {"focus": 0.9, "swap_limit": 16}, {"strictness": 0.9, "focus": 1.0, "swap_limit": 16}],
)
def test_backends_give_the_same_bits_and_smaller_budgets_are_prefixes(settings: dict[str, Any]) -> None:
    x, z, q = features(48, 5, seed=3)
    runs = [Spotlight(budget=30, backend=backend, **settings).select(x, z, q) for backend in BACKENDS]
    assert runs[0] == runs[1]
    for k in (0, 1, 7, 30):
        assert runs[0].prefix(k, refine=True) == Spotlight(budget=k, **settings).select(x, z, q)
    image, query = image_of([(4, 4), (3, 5), (2, 6)], 0)
    records = [Spotlight(backend=backend, **settings).reduce(image, query, 20).record for backend in BACKENDS]
    assert records[0] == records[1]
    assert records[0].prefix(6, refine=True) == Spotlight(**settings).reduce(image, query, 6).record


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_tokens_tie_and_the_lowest_index_wins(backend: str) -> None:
    x, z, q = features(12, 3, seed=1)
    x, z = np.concatenate([x, x]), np.concatenate([z, z])
    found = Spotlight(budget=16, focus=0.9, backend=backend).select(x, z, q)
    # A copy of a kept token gains nothing, so all different tokens come first; then the lowest index fills up.
    assert sorted(found.order[:12].tolist()) == list(range(12))
    assert found.order[12:].tolist() == [12, 13, 14, 15]
    assert found.criterion[12:] == ("fill",) * 4


def test_without_a_question_it_is_coverage_alone() -> None:
    x, z, q = features(49, 3)
    plain = StackTok(budget=12, criterion="coverage", swap_limit=0).select(x, z, None)
    for found in (Spotlight(budget=12).select(x, z, None), Spotlight(budget=12, focus=0).select(x, z, q)):
        assert found.order.tolist() == plain.order.tolist()
        np.testing.assert_array_equal(found.coverage, plain.coverage)
        np.testing.assert_array_equal(found.relevance, plain.coverage)
        np.testing.assert_array_equal(found.reference, plain.coverage)
    assert set(Spotlight(budget=12).select(x, z, None).criterion) == {"coverage"}


def test_a_question_that_finds_nothing_weighs_all_tokens_alike() -> None:
    x, _, q = features(20, 2)
    z = np.tile(q[:1], (20, 1))
    found = Spotlight(budget=5, focus=0.95, centred=True).select(x, z, q)
    np.testing.assert_allclose(found.row_weights, np.full(20, 0.05), rtol=1e-12)


def test_swaps_raise_weighted_coverage_and_nothing_else_decides() -> None:
    swapped = 0
    for seed in range(30):
        x, z, q = features(24, 4, seed=seed, clusters=6, noise=0.3, d_v=3)
        plain = Spotlight(budget=3, focus=0.7, tau_vision=0.5).select(x, z, q)
        found = Spotlight(budget=3, focus=0.7, tau_vision=0.5, swap_limit=8).select(x, z, q)
        assert found.order.tolist() == plain.order.tolist()
        matrix = slow_weights([z], q, [0], 0.7)[0][:, None] * naive.affinity(x, x, 0.5)
        assert found.final_relevance == pytest.approx(naive.total(matrix, found.indices.tolist()), abs=1e-6)
        assert all(swap.after > swap.before for swap in found.swaps)
        if found.swaps:
            swapped += 1
            assert found.swaps[-1].after == pytest.approx(found.final_relevance)
            assert found.final_relevance > plain.final_relevance
    assert swapped


def test_the_gate_is_the_papers_with_weighted_coverage_as_relevance() -> None:
    x, z, q = features(40, 4, seed=2)
    found = Spotlight(budget=12, focus=1.0, strictness=None).select(x, z, q)
    a_qv, a_vv = stacktok.affinities(x, z, q)
    beta = naive.strictness(a_qv)
    rows = slow_weights([z], q, [0], 1.0)[0][:, None] * a_vv
    paper = stacktok.select_from_affinities(40 * rows, a_vv, 12, strictness=beta, swap_limit=0)
    assert found.order.tolist() == paper.order.tolist()
    assert found.criterion == paper.criterion
    np.testing.assert_allclose(found.relevance, paper.relevance, atol=1e-6)
    assert found.strictness == pytest.approx(beta)


def test_auto_focus_follows_the_strongest_evidence() -> None:
    x, z, _ = features(30, 1, noise=2.0)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    found = []
    for query in (z[:1], z[:1] + 12 * np.linalg.norm(z[0]) * np.eye(24, dtype=np.float32)[3], z[:1] + 3 * z[1:2]):
        cosines = unit.astype(np.float64) @ (query[0] / np.linalg.norm(query[0]))
        strongest = (cosines - cosines.mean()).max()
        expected = 0.95 * min(max((strongest - 0.35) / 0.25, 0.0), 1.0)
        found.append(expected)
        assert Spotlight(budget=5).select(x, z, query).focus == pytest.approx(expected, abs=1e-5)
    assert found[0] == 0.95
    assert min(found) < 0.95


def test_the_control_takes_the_same_evidence_to_a_determinantal_point_process() -> None:
    image, q = image_of([(4, 5)], None)
    (crop,) = image.crops
    (weights,) = slow_weights([crop.projected], q, [0], 1.0)
    (relevance,) = EvidenceDPP().relevance(image.crops, q)
    expected = (weights - weights.min()) / (weights.max() - weights.min())
    np.testing.assert_allclose(relevance, expected, atol=1e-4)
    assert len(EvidenceDPP().reduce(image, q, 6)) == len(EvidenceDPP().reduce(image, None, 6)) == 6


def test_records_keep_weights_and_focus_through_json() -> None:
    image, q = image_of([(4, 4), (3, 5)], 0)
    crops = Spotlight().reduce(image, q, 8).record
    single = Spotlight(budget=8).select(*features(20, 3))
    assert CropSelection.from_json(crops.to_json()) == crops
    again = Selection.from_json(single.to_json())
    np.testing.assert_array_equal(again.row_weights, single.row_weights)
    assert again.focus == single.focus
    assert "row_weights" not in StackTok(budget=8).select(*features(20, 3)).to_dict()


def test_images_of_a_prompt_can_share_a_budget() -> None:
    (first, q), (second, _) = image_of([(4, 4), (3, 5)], 0), image_of([(5, 5)], None, seed=1)
    method = Spotlight(focus=0.9, share_budget=True)
    reductions = method.reduce_prompt([method.prepare(first), method.prepare(second)], q, 12)
    assert sum(len(reduction) for reduction in reductions) == 12
    weights = slow_weights([crop.projected for crop in first.crops], q, [0, 1], 0.9)
    weights += slow_weights([crop.projected for crop in second.crops], q, [0], 0.9)
    for own, record in zip(weights, [crop for one in reductions for crop in one.record.crops], strict=True):
        np.testing.assert_allclose(record.row_weights, own, atol=1e-7)
    with pytest.raises(TypeError, match=r"give those of Spotlight\.prepare"):
        method.reduce_shared([method.prepare(first), StackTok().prepare(second)], q, 12)


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "internvl"])
def test_the_view_of_the_whole_picture_weighs_as_much_as_all_its_parts(family: str) -> None:
    tiny = build(family)
    with Spotlight(budget=8, focus=0.9)(tiny.model, tiny.processor) as pruned, torch.inference_mode():
        tiny.model(**tiny.inputs(["What is in the image?"], [[picture(160, 100)]]))
    (result,) = pruned.last
    base, crops = result.image.layout.base, result.image.crops
    assert (base is None) == (len(crops) == 1)
    if base is not None:
        assert base == (len(crops) - 1 if family == "internvl" else 0)
        totals = [crop.row_weights.sum() for crop in result.selection.crops]
        assert totals[base] == pytest.approx(1)
        assert sum(totals) == pytest.approx(2)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"focus": 1.5}, ValueError, r"focus=1\.5 must lie in \[0, 1\], or be 'auto'"),
        ({"focus": "strong"}, ValueError, r"focus='strong' must lie in \[0, 1\], or be 'auto'"),
        ({"focus": True}, ValueError, r"focus=True must lie in \[0, 1\]"),
        ({"strictness": "high"}, ValueError, r"strictness='high' must lie in \[0, 1\], or be None for the paper's"),
        ({"strictness": 2}, ValueError, r"strictness=2 must lie in \[0, 1\]"),
        ({"exponent": 0}, ValueError, "exponent=0 must be a finite number greater than 0"),
        ({"centred": 1}, TypeError, "centred=1 is not a bool; give True or False"),
        ({"tau_vision": 0}, ValueError, "tau_vision=0 must be greater than 0"),
    ],
)
def test_wrong_parameters_are_refused_by_name(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Spotlight(**settings)


def test_selecting_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="give Spotlight a budget"):
        Spotlight().select(*features(10, 2))
