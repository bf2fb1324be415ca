"""The anytime property, prepared images and batches: other ways to the same result."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given

import stacktok
from stacktok.core import batch
from tests.core.cases import affinities, features, focused, problems


@given(problem=problems())
def test_a_prefix_is_the_run_of_the_smaller_budget(problem):
    settings = {
        "eligible": problem["eligible"],
        "strictness": problem["strictness"],
        "relevance_depth": problem["depth"],
    }
    whole = stacktok.select_from_affinities(problem["a_qv"], problem["a_vv"], 10**6, **settings)
    for k in range(whole.k + 1):
        plain = stacktok.select_from_affinities(problem["a_qv"], problem["a_vv"], k, swap_limit=0, **settings)
        refined = stacktok.select_from_affinities(problem["a_qv"], problem["a_vv"], k, **settings)
        assert whole.prefix(k) == plain
        assert whole.prefix(k, refine=True) == refined


def test_a_prefix_of_crops_is_the_run_of_the_smaller_budget():
    crops = [(*affinities(25, 4, seed=seed), None) for seed in range(3)]
    whole = stacktok.select_crops_from_affinities(crops, 75)
    for k in (0, 1, 9, 30, 60, 75):
        assert whole.prefix(k) == stacktok.select_crops_from_affinities(crops, k, swap_limit=0)
        assert whole.prefix(k, refine=True) == stacktok.select_crops_from_affinities(crops, k)


def test_a_prefix_says_what_it_cannot_do():
    a_qv, a_vv = affinities(20, 3)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 10)
    with pytest.raises(ValueError, match="k=11 lies outside 0 to 10"):
        selection.prefix(11)
    with pytest.raises(ValueError, match="k=-1 lies outside"):
        selection.prefix(-1)
    with pytest.raises(TypeError, match=r"k=2\.0 must be an integer"):
        selection.prefix(2.0)
    with pytest.raises(ValueError, match="does not hold"):
        selection.detach().prefix(3, refine=True)
    assert selection.detach().prefix(3) == selection.prefix(3)
    final = stacktok.select_from_affinities(a_qv, a_vv, 10, target="final")
    with pytest.raises(ValueError, match='target="final" has no prefixes; call the selector again with budget=4'):
        final.prefix(4)
    auto = stacktok.select_from_affinities(a_qv, a_vv, 10, relevance_depth="auto")
    with pytest.raises(ValueError, match='relevance_depth="auto" has no prefixes; call the selector again with'):
        auto.prefix(4)


@pytest.mark.parametrize(("rows", "budget"), [(3, 8), (3, 40), (1, 6), (0, 5), (7, 1)])
def test_the_automatic_depth_is_the_rule_s_for_this_budget_and_query(rows, budget):
    x, z, q = features(60, rows)
    depth = max(1, math.ceil(budget / max(1, rows)))
    auto = stacktok.select(x, z, q, budget, relevance_depth="auto")
    assert auto.to_json().replace('relevance_depth=\\"auto\\"', "") == (
        stacktok.select(x, z, q, budget, relevance_depth=depth).to_json()
    )
    pairs = [(*affinities(25, rows, seed=seed), None) for seed in range(3)]
    shared = stacktok.select_crops_from_affinities(pairs, budget, relevance_depth="auto")
    assert shared.order == stacktok.select_crops_from_affinities(pairs, budget, relevance_depth=depth).order
    with pytest.raises(ValueError, match='relevance_depth="auto" has no prefixes'):
        shared.prefix(1)


def test_a_depth_has_to_be_a_number_or_auto():
    with pytest.raises(TypeError, match="relevance_depth='deep' must be an integer, or None"):
        stacktok.Parameters(relevance_depth="deep")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepared_image_answers_as_a_fresh_selection_would(dtype):
    x, z, _ = (torch.from_numpy(a).to(dtype) for a in features(90, 0))
    image = stacktok.prepare(x, z, range(5, 90))
    for seed, budget in ((1, 5), (2, 40), (3, 12), (4, 85), (5, 200)):
        query = torch.from_numpy(features(90, 6, seed=seed)[2]).to(dtype)
        assert image.select(query, budget) == stacktok.select(x, z, query, budget, eligible=range(5, 90))
    assert image.select(None, 7) == stacktok.select(x, z, None, 7, eligible=range(5, 90))
    changed = image.select(query, 7, relevance_depth=4, swap_limit=0)
    assert changed == stacktok.select(x, z, query, 7, eligible=range(5, 90), relevance_depth=4, swap_limit=0)


def test_what_belongs_to_the_image_cannot_change_with_the_question():
    x, z, q = features(10, 2)
    image = stacktok.prepare(x, z)
    for name, value in (("tau_vision", 0.1), ("norm_epsilon", 1e-6), ("backend", "cpu")):
        with pytest.raises(ValueError, match=f"{name}=.* belongs to the prepared image; pass it to prepare"):
            image.select(q, 3, **{name: value})
    with pytest.raises(TypeError, match="unknown parameter 'taus'"):
        image.select(q, 3, taus=1)


def test_a_question_s_settings_are_checked_together_with_the_image_s():
    x, z, q = features(10, 2)
    image = stacktok.prepare(x, z, beta_min=0.1, beta_max=0.5)
    changed = image.select(q, 5, beta_max=0.2)
    assert changed == stacktok.select(x, z, q, 5, beta_min=0.1, beta_max=0.2)
    with pytest.raises(ValueError, match=r"beta_min=0\.6 and beta_max=0\.5"):
        image.select(q, 5, beta_min=0.6)


def test_a_prefix_is_a_copy():
    a_qv, a_vv = affinities(20, 3)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 10)
    selection.prefix(5).order[0] = 99
    assert selection.order[0] != 99


def test_threads_may_share_a_prepared_image():
    x, z, _ = features(200, 0)
    image = stacktok.prepare(x, z)
    queries = [features(200, 5, seed=seed)[2] for seed in range(12)]
    results = {}

    def ask(i):
        results[i] = image.select(queries[i], 10 + 15 * i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, query in enumerate(queries):
        assert results[i] == stacktok.select(x, z, query, 10 + 15 * i)


def test_a_batch_is_its_images_one_by_one():
    sizes = [(30, 2, 5), (1, 0, 3), (120, 9, "10%"), (64, 4, 0.5), (17, 1, 17)]
    images = [features(n, m, seed=n) for n, m, _ in sizes]
    x, z, q = ([image[part] for image in images] for part in range(3))
    q[1] = None
    budgets = [budget for _, _, budget in sizes]
    masks = [None, None, range(100), np.arange(64) % 2 == 0, None]
    together = stacktok.select_batch(x, z, q, budgets, eligible=masks)
    for i in range(len(sizes)):
        assert together[i] == stacktok.select(x[i], z[i], q[i], budgets[i], eligible=masks[i])
    same = stacktok.select_batch(x, z, q, np.int64(4))
    assert [selection.k for selection in same] == [4, 1, 4, 4, 4]
    assert stacktok.select_batch([], [], [], 4) == []


def test_a_batch_names_what_is_missing():
    x, z, q = features(10, 2)
    with pytest.raises(ValueError, match="query has 1 entries for 2 images"):
        stacktok.select_batch([x, x], [z, z], [q], 4)
    with pytest.raises(ValueError, match="budget has 3 entries for 2 images"):
        stacktok.select_batch([x, x], [z, z], [q, q], [1, 2, 3])
    with pytest.raises(ValueError, match="budget=-1 is negative"):
        stacktok.select_batch([x, x], [z, z], [q, q], [1, -1])
    broken = x.copy()
    broken[3] = np.nan
    with pytest.raises(ValueError, match=r"image 1: vision\[3\] holds NaN"):
        stacktok.select_batch([x, broken], [z, z], [q, q], 2)


def test_a_batch_holds_few_affinities_at_a_time(monkeypatch):
    """Images built ahead of the greedy runs wait their turn."""
    alive, most, lock = 0, 0, threading.Lock()
    build, run = batch.PreparedImage, batch._select

    def building(*arguments):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return build(*arguments)

    def running(*arguments):
        nonlocal alive
        with lock:
            alive -= 1
        return run(*arguments)

    monkeypatch.setattr(batch, "PreparedImage", building)
    monkeypatch.setattr(batch, "_select", running)
    x, z, q = features(30, 2)
    assert len(stacktok.select_batch([x] * 20, [z] * 20, [q] * 20, 5)) == 20
    assert most <= 2 * torch.get_num_threads() + 1


def test_a_selection_survives_json_to_the_bit():
    a_qv, a_vv = focused(3)
    for settings in ({}, {"target": "final"}, {"relevance_depth": None}):
        selection = stacktok.select_from_affinities(a_qv, a_vv, 12, strictness=0.95, swap_passes=None, **settings)
        assert selection.swaps
        restored = stacktok.Selection.from_json(selection.to_json())
        assert restored == selection
        assert restored.swaps[0] == selection.swaps[0]
        assert isinstance(restored.swaps[0], stacktok.Swap)
    crops = stacktok.select_crops_from_affinities([(*affinities(3, 2), [1]), (*affinities(9, 2), None)], 8)
    assert np.isnan(crops.nominee_gain).any()
    assert stacktok.CropSelection.from_json(crops.to_json()) == crops
    empty = stacktok.select_crops_from_affinities([(None, np.eye(3), None)], 0)
    assert stacktok.CropSelection.from_json(empty.to_json()) == empty
    with pytest.raises(ValueError, match="not a Selection that to_json wrote"):
        stacktok.Selection.from_json(crops.to_json())


def test_a_selection_travels_to_another_process_and_compares_equal():
    a_qv, a_vv = focused(3)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 12)
    crops = stacktok.select_crops_from_affinities([(a_qv, a_vv, None)] * 2, np.int64(20))
    for record in (selection, crops):
        other = pickle.loads(pickle.dumps(record))
        assert other == record
        assert other.prefix(np.int64(5)).to_json() == record.prefix(5).to_json()
    assert selection != crops
    assert selection != stacktok.select_from_affinities(a_qv, a_vv, 11)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": "20"}, "n has type str, not int"),
        ({"k": True}, "k=True is not a count"),
        ({"k": 21}, "k=21 is larger than n=20"),
        ({"indices": [0, 1]}, r"indices is not an array \(4,\) of numbers"),
        ({"indices": [0, 1, 2, 20]}, "indices does not hold 4 different tokens of 0 to 19"),
        ({"indices": [3, 1, 2, 0]}, "indices are not ascending"),
        ({"order": [1, 1, 2, 3]}, "order does not hold 4 different tokens"),
        ({"order": [1.5, 1, 2, 3]}, "order is not an array"),
        ({"order": [10**30, 1, 2, 3]}, "order is not an array"),
        ({"order": None}, "order is not an array"),
        ({"criterion": ["relevance", "magic", "fill", "fill"]}, "criterion does not hold 4 of relevance"),
        ({"criterion": [[], [], [], []]}, "criterion does not hold 4 of relevance"),
        ({"bound": [0, 1, 0, 1]}, "bound is not an array"),
        ({"coverage": [0.0] * 4}, r"coverage is not an array \(5,\)"),
        ({"coverage": [0.0, 0.1, float("nan"), 0.2, 0.3]}, "coverage holds NaN or infinity"),
        ({"strictness": "high"}, "strictness is not an array"),
        ({"swaps": [[1, 2]]}, r"swaps is not an array \(1, 4\)"),
        ({"not_anytime": 3}, "not_anytime has type int, not str"),
    ],
)
def test_what_is_read_from_json_must_fit_together(change, message):
    a_qv, a_vv = affinities(20, 3)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 4)
    with pytest.raises(ValueError, match=f"the text is not a Selection that to_json wrote: {message}"):
        stacktok.Selection.from_json(json.dumps(selection.to_dict() | change))
    for name in selection.to_dict():
        values = selection.to_dict()
        del values[name]
        with pytest.raises(ValueError, match=f"it has no {name}"):
            stacktok.Selection.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"n": 1}'])
def test_what_is_no_record_is_refused(text):
    for kind in (stacktok.Selection, stacktok.CropSelection):
        with pytest.raises(ValueError, match=f"the text is not a {kind.__name__} that to_json wrote: it "):
            kind.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 3}, "the crops do not hold k=3 tokens together"),
        ({"crops": []}, "crops is empty"),
        ({"crop_order": [[0, 1]] * 4}, "crop_order is not an order of the crops' picks"),
        ({"crop_order": 7}, "crop_order is not an array"),
        ({"nominees": [[0], [1]]}, r"nominees is not an array \(4, 2\)"),
        ({"nominee_gain": "none"}, "nominee_gain is not an array"),
    ],
)
def test_crops_that_are_read_from_json_must_fit_together(change, message):
    crops = stacktok.select_crops_from_affinities([(*affinities(9, 2, seed=seed), None) for seed in range(2)], 4)
    with pytest.raises(ValueError, match=message):
        stacktok.CropSelection.from_json(json.dumps(json.loads(crops.to_json()) | change))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_prepared_images_can_be_pickled_and_copied(backend):
    x, z, q = (torch.from_numpy(array) for array in features(40, 4))
    image = stacktok.prepare(x, z, range(30), backend=backend)
    crops = stacktok.prepare_crops([stacktok.Crop(x, z), stacktok.Crop(x[:9], z[:9])], backend=backend)
    for prepared in (image, crops):
        expected = prepared.select(q, 12)
        for other in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared), copy.copy(prepared)):
            assert other.select(q, 12) == expected
            assert other.nbytes == prepared.nbytes


def test_a_prepared_image_counts_its_bytes():
    """A^vv, what is computed from it, the norms; not the features, which stay the caller's."""
    x, z, q = (torch.from_numpy(array) for array in features(100, 4, d=512))
    image = stacktok.prepare(x, z)
    assert image.nbytes == pytest.approx(4 * 100 * 100, rel=0.05)
    assert image.nbytes > 4 * 100 * 100
    image.select(q, 50)
    assert stacktok.prepare_crops([stacktok.Crop(x, z)] * 2).nbytes == 2 * stacktok.prepare(x, z).nbytes


def test_mask_and_gather_follow_the_indices():
    x, z, q = features(20, 3)
    selection = stacktok.select(x, z, q, 6)
    assert selection.indices.tolist() == sorted(set(selection.indices.tolist()))
    assert np.flatnonzero(selection.mask).tolist() == selection.indices.tolist()
    assert np.array_equal(selection.gather(z), z[selection.indices])
    assert torch.equal(selection.gather(torch.from_numpy(z)), torch.from_numpy(z[selection.indices]))
    with pytest.raises(ValueError, match="projected has 19 rows for a selection over 20"):
        selection.gather(z[:19])
    crops = stacktok.select_crops([stacktok.Crop(x, z), stacktok.Crop(x[:9], z[:9])], q, 7)
    gathered = crops.gather([z, z[:9]])
    assert sum(len(part) for part in gathered) == 7
    assert all(mask.sum() == len(part) for mask, part in zip(crops.mask, gathered, strict=True))
    with pytest.raises(ValueError, match="projected holds 1 matrices for 2 crops"):
        crops.gather([z])
