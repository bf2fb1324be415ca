"""Algorithm 2: one budget over crops."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.core.crops import apportion
from tests.core import naive
from tests.core.cases import affinities, features, tied

BACKENDS = ["reference", "cpu"]


@st.composite
def crop_problems(draw):
    """Crops of different sizes and kinds, some identical, some with nothing to keep."""
    m = draw(st.integers(0, 3))
    crops = []
    for _ in range(draw(st.integers(1, 4))):
        if crops and draw(st.booleans()):
            crops.append(crops[-1])
            continue
        n = draw(st.integers(1, 8))
        a_qv, a_vv = draw(st.sampled_from([affinities, tied]))(n, m, seed=draw(st.integers(0, 99)))
        eligible = draw(st.lists(st.integers(0, n - 1), unique=True).map(sorted))
        crops.append((a_qv, a_vv, eligible))
    return crops, draw(st.integers(0, 20)), draw(st.sampled_from([None, 0.5, 1.0])), draw(st.sampled_from([1, 2, None]))


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=crop_problems())
def test_allocation_equals_the_version_without_caches(backend, problem):
    crops, budget, beta, depth = problem
    result = stacktok.select_crops_from_affinities(
        crops, budget, strictness=beta, relevance_depth=depth, swap_limit=0, backend=backend
    )
    betas = [crop.strictness for crop in result.crops]
    order, sets, history = naive.select_crops(crops, budget, betas, depth)
    assert list(result.order) == order
    assert result.k == len(order) == min(budget, sum(len(eligible) for _, _, eligible in crops))
    assert [indices.tolist() for indices in result.indices] == [sorted(kept) for kept in sets]
    for step, nominees in enumerate(history):
        for c in range(len(crops)):
            token, h = nominees.get(c, (-1, np.nan))
            assert result.nominees[step, c] == token
            np.testing.assert_equal(result.nominee_gain[step, c], h)
    for crop, kept in zip(result.crops, sets, strict=True):
        assert crop.order.tolist() == kept
        assert len(crop.coverage) == len(crop.reference) == len(crop.target) == len(kept) + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_identical_crops_share_equally_lowest_first(backend):
    a_qv, a_vv = affinities(12, 3)
    result = stacktok.select_crops_from_affinities([(a_qv, a_vv, None)] * 3, 8, swap_limit=0, backend=backend)
    assert [len(indices) for indices in result.indices] == [3, 3, 2]
    assert [crop for crop, _ in result.order] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_one_crop_is_the_single_image():
    a_qv, a_vv = affinities(30, 4)
    for budget in (5, 20):
        crops = stacktok.select_crops_from_affinities([(a_qv, a_vv, None)], budget)
        assert crops.crops[0] == stacktok.select_from_affinities(a_qv, a_vv, budget)


def test_every_crop_is_refined_by_itself_within_the_limit():
    crops = [(*affinities(30, 6, seed=seed, noise=1.0), None) for seed in range(3)]
    result = stacktok.select_crops_from_affinities(crops, 40, swap_passes=None, swap_limit=14)
    assert sum(len(crop.swaps) for crop in result.crops) > 0
    for crop, (a_qv, a_vv, _) in zip(result.crops, crops, strict=True):
        if crop.k > 14:
            assert not crop.swaps
            continue
        target = crop.strictness * naive.reference(a_vv, range(30), crop.k)[-1]
        kept, swaps = naive.refine(a_qv, a_vv, crop.order.tolist(), range(30), target, 1e-6, None)
        assert crop.indices.tolist() == kept
        assert [tuple(swap) for swap in crop.swaps] == swaps


def test_features_and_affinities_agree_and_a_prepared_image_answers_alike():
    _, _, query = features(20, 4)
    crops = [stacktok.Crop(*features(20 + c, 1, seed=c)[:2], eligible=range(c, 20)) for c in range(3)]
    direct = stacktok.select_crops(crops, query, 25)
    matrices = [(*stacktok.affinities(crop.vision, crop.projected, query), crop.eligible) for crop in crops]
    assert stacktok.select_crops_from_affinities(matrices, 25) == direct
    prepared = stacktok.prepare_crops(crops)
    assert prepared.select(query, 5) == stacktok.select_crops(crops, query, 5)
    assert prepared.select(query, 25) == direct
    assert prepared.select(None, 25) == stacktok.select_crops(crops, None, 25)


def test_a_fraction_is_of_all_encoded_positions_together():
    crops = [(*affinities(n, 2), eligible) for n, eligible in ((10, [0]), (30, None))]
    assert stacktok.select_crops_from_affinities(crops, 0.5).k == 20
    assert stacktok.select_crops_from_affinities(crops, "100%").k == 31


@pytest.mark.parametrize("backend", BACKENDS)
def test_quotas_fix_every_crop_s_share(backend):
    crops = [(*affinities(n, 4, seed=n), None) for n in (4, 20, 30)]
    uniform = stacktok.select_crops_from_affinities(crops, 26, allocation="uniform", swap_limit=0, backend=backend)
    assert [crop.k for crop in uniform.crops] == [4, 11, 11]
    first = stacktok.select_crops_from_affinities(crops, 3, swap_limit=0).nominee_gain[0]
    shares = apportion(26, [Fraction(float(h)) for h in first], [4, 20, 30])
    proportional = stacktok.select_crops_from_affinities(crops, 26, allocation="proportional", swap_limit=0)
    assert [crop.k for crop in proportional.crops] == shares
    for result in (uniform, proportional):
        for crop, (a_qv, a_vv, _) in zip(result.crops, crops, strict=True):
            alone = stacktok.select_from_affinities(a_qv, a_vv, crop.k, swap_limit=0)
            assert crop.order.tolist() == alone.order.tolist()
        with pytest.raises(ValueError, match="has no prefixes; call the selector again with budget=5"):
            result.prefix(5)


@pytest.mark.parametrize("allocation", ["shared", "uniform", "proportional"])
@pytest.mark.parametrize("target", ["size", "final"])
@pytest.mark.parametrize("total", [0, 1, 2, 3])
def test_a_budget_may_be_smaller_than_the_number_of_crops(allocation, target, total):
    crops = [(*affinities(6, 3, seed=seed), None) for seed in range(3)]
    result = stacktok.select_crops_from_affinities(crops, total, allocation=allocation, target=target)
    assert sum(crop.k for crop in result.crops) == total
    for crop, (a_qv, a_vv, _) in zip(result.crops, crops, strict=True):
        assert len(crop.target) == len(crop.relevance) == crop.k + 1
        if target == "size":
            assert crop == stacktok.select_from_affinities(a_qv, a_vv, crop.k)


@given(
    total=st.integers(0, 60),
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    data=st.data(),
)
def test_apportioned_shares_are_whole_capped_and_complete(total, weights, data):
    capacities = data.draw(st.lists(st.integers(0, 30), min_size=len(weights), max_size=len(weights)))
    shares = apportion(min(total, sum(capacities)), [Fraction(w) for w in weights], capacities)
    assert sum(shares) == min(total, sum(capacities))
    assert all(0 <= share <= capacity for share, capacity in zip(shares, capacities, strict=True))


def test_largest_remainders_decide_and_ties_go_to_the_first():
    assert apportion(10, [Fraction(1)] * 3, [10] * 3) == [4, 3, 3]
    assert apportion(10, [Fraction(5), Fraction(3), Fraction(1)], [10] * 3) == [6, 3, 1]


@pytest.mark.parametrize("call", [stacktok.select_crops, stacktok.prepare_crops])
def test_no_crops_is_an_error(call):
    with pytest.raises(ValueError, match="crops is empty; give at least one Crop"):
        call(*([[], None, 3] if call is stacktok.select_crops else [[]]))


def test_what_is_no_crop_is_named():
    x, z, q = features(6, 2)
    with pytest.raises(TypeError, match=r"crops\[1\] has type tuple; give a Crop"):
        stacktok.select_crops([stacktok.Crop(x, z), (x, z)], q, 3)
    with pytest.raises(ValueError, match=r"affinities\[0\] has 2 entries"):
        stacktok.select_crops_from_affinities([affinities(5, 2)], 3)
    broken = x.copy()
    broken[2] = np.inf
    with pytest.raises(ValueError, match=r"crop 1: vision\[2\] holds NaN or infinity"):
        stacktok.select_crops([stacktok.Crop(x, z), stacktok.Crop(broken, z)], q, 3)


def test_the_final_target_of_a_crop_is_that_of_its_horizon():
    crops = [(*affinities(12, 3, seed=seed), None) for seed in range(3)]
    result = stacktok.select_crops_from_affinities(crops, 1, target="final", allocation="uniform")
    for crop, (_, a_vv, _) in zip(result.crops, crops, strict=True):
        assert crop.target[0] == crop.strictness * naive.reference(a_vv, range(12), 1)[-1] / 12


def test_crops_must_share_one_query():
    with pytest.raises(ValueError, match=r"have \[2, 3\] rows; one query serves all crops"):
        stacktok.select_crops_from_affinities([(*affinities(5, 2), None), (*affinities(5, 3), None)], 4)
    with pytest.raises(ValueError, match="affinities is empty"):
        stacktok.select_crops_from_affinities([], 4)
    with pytest.raises(ValueError, match="crop 1: vision_affinity has shape"):
        stacktok.select_crops_from_affinities([(None, np.eye(3), None), (None, np.ones((2, 3)), None)], 4)


def test_crops_of_different_widths_are_refused():
    x = np.eye(4, dtype=np.float32)
    crops = [stacktok.Crop(x, x), stacktok.Crop(x, x[:, :3])]
    with pytest.raises(ValueError, match="crop 1: projected has 3 columns and that of crop 0 4"):
        stacktok.prepare_crops(crops)


def test_crops_of_different_precision_are_selected_like_their_casts():
    rng = np.random.default_rng(0)
    features = [rng.standard_normal((30, 16)).astype(np.float16) for _ in range(3)]
    query = rng.standard_normal((4, 16)).astype(np.float32)
    kinds = (np.float16, np.float32, np.float16)
    mixed = [stacktok.Crop(x, x.astype(kind)) for x, kind in zip(features, kinds, strict=True)]
    cast = [stacktok.Crop(x, x.astype(np.float32)) for x in features]
    assert stacktok.select_crops(mixed, query, 12) == stacktok.select_crops(cast, query, 12)
