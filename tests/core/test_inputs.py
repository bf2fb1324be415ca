"""Wrong inputs are refused in one clear sentence; odd but valid ones give the result that the paper implies."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import stacktok
from stacktok.core.budget import parse_budget, resolve_budget
from tests.core.cases import affinities, features

X, Z, Q = features(12, 3)


def changed(array, value, at=(4, 2)):
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["vision", "projected", "query"])
def test_features_must_be_finite(name, value):
    arrays = {"vision": X, "projected": Z, "query": Q}
    row = 2 if name == "query" else 4
    arrays[name] = changed(arrays[name], value, at=(row, 2))
    with pytest.raises(ValueError, match=rf"{name}\[{row}\] holds NaN or infinity; give finite features"):
        stacktok.select(**arrays, budget=3)


@pytest.mark.parametrize("name", ["vision", "projected", "query"])
def test_norms_must_not_overflow(name):
    arrays = {"vision": X, "projected": Z, "query": Q}
    arrays[name] = changed(arrays[name], np.float32(3e38), at=(1, slice(None)))
    with pytest.raises(ValueError, match=rf"{name}\[1\] is finite but its norm overflows torch.float32; scale"):
        stacktok.select(**arrays, budget=3)
    stacktok.select(**{key: array.astype(np.float64) for key, array in arrays.items()}, budget=3)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((X[:5], Z, Q), ValueError, "vision has 5 rows and projected 12"),
        ((X, Z, Q[:, :5]), ValueError, "query has 5 columns and projected 24"),
        ((X[0], Z, Q), ValueError, r"vision has shape \(16,\); give a matrix"),
        ((X[:0], Z[:0], Q), ValueError, "vision has 0 rows"),
        ((X[:, :0], Z, Q), ValueError, "vision has 0 columns"),
        ((X, Z[:, :0], Q[:, :0]), ValueError, "projected has 0 columns"),
        ((X, Z, Q[None]), ValueError, r"query has shape \(1, 3, 24\)"),
        (([1, 2], Z, Q), TypeError, "vision has type list; give a torch tensor or a numpy array"),
        ((X, Z, "what"), TypeError, "query has type str"),
        ((X.astype(complex), Z, Q), TypeError, "vision has dtype torch.complex128; give real numbers"),
        ((X > 0, Z, Q), TypeError, "vision has dtype torch.bool"),
        ((X.astype(object), Z, Q), TypeError, "vision has dtype object"),
        ((torch.from_numpy(X).to("meta"), Z, Q), ValueError, "vision lies on the meta device and holds no numbers"),
        ((torch.from_numpy(X).to_sparse(), Z, Q), TypeError, r"vision has layout torch.sparse_coo; .* vision.to_dense"),
        ((torch.from_numpy(X).to_sparse_csr(), Z, Q), TypeError, "vision has layout torch.sparse_csr"),
        ((torch.nested.nested_tensor([torch.ones(2, 3)]), Z, Q), TypeError, "vision is a nested tensor; give one"),
        ((X, Z, torch.quantize_per_tensor(torch.from_numpy(Q), 0.1, 0, torch.qint8)), TypeError, "query is quantised"),
    ],
)
def test_shapes_types_and_devices_must_agree(arrays, error, message):
    with pytest.raises(error, match=message):
        stacktok.select(*arrays, 3)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (True, TypeError, "budget=True is a bool; give a count such as 64"),
        (-1, ValueError, "budget=-1 is negative"),
        (64.0, ValueError, r"budget=64\.0 is not a fraction in \(0, 1\]"),
        (0.0, ValueError, r"budget=0\.0 is not a fraction"),
        (-0.5, ValueError, "not a fraction"),
        (float("nan"), ValueError, "budget=nan is not finite"),
        (float("inf"), ValueError, "budget=inf is not finite"),
        ("64", ValueError, "budget='64' is not a percentage"),
        ("200%", ValueError, r"budget='200%' is not a fraction in \(0, 1\]"),
        ("0%", ValueError, "not a fraction"),
        ("lots", ValueError, "budget='lots' is not a percentage"),
        ("%", ValueError, "budget='%' is not a percentage"),
        (None, TypeError, "budget=None has type NoneType"),
        ([3], TypeError, r"budget=\[3\] has type list"),
    ],
)
def test_a_nonsense_budget_is_refused(budget, error, message):
    with pytest.raises(error, match=message):
        stacktok.select(X, Z, Q, budget)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        # Fraction works on these for a minute and more.
        ("1e30000000%", "budget='1e30000000%' is not a percentage"),
        ("1e-30000000%", "is not a percentage"),
        ("9" * 10_000_000 + "%", r"budget='9+'\.\.\. \(10000001 characters\) is not a percentage"),
        ("1/" + "3" * 1_000_000 + "%", "is not a percentage"),
        (-(10**5000), r"budget=\(an integer of 16610 bits\) is negative"),
        (Fraction(10**5000, 3), r"is not a fraction in \(0, 1\]"),
    ],
    ids=["large exponent", "small exponent", "long", "ratio", "long integer", "large fraction"],
)
def test_a_budget_that_would_take_long_to_read_is_refused_at_once(budget, message):
    with pytest.raises(ValueError, match=message) as raised:
        stacktok.select(X, Z, Q, budget)
    assert len(str(raised.value)) < 500


def test_budgets_round_down_but_keep_one():
    assert resolve_budget(64, 576, 576) == 64
    assert resolve_budget(np.int32(64), 576, 10) == 10
    assert resolve_budget(0, 576, 576) == 0
    assert resolve_budget(0.2, 576, 576) == 115
    assert resolve_budget("20%", 576, 576) == 115
    assert resolve_budget(" 5.5 % ", 1000, 1000) == 55
    assert resolve_budget(0.29, 100, 100) == 29
    assert resolve_budget(0.001, 576, 576) == 1
    assert resolve_budget(0.001, 576, 0) == 0
    assert resolve_budget(1.0, 576, 500) == 500
    assert resolve_budget(np.float32(0.5), 9, 9) == 4
    assert resolve_budget(np.float32(0.29), 100, 100) == 29
    assert resolve_budget(Fraction(2, 3), 3, 3) == 2


def test_budgets_as_people_type_them():
    assert parse_budget("64") == 64
    assert parse_budget("0.2") == 0.2
    assert parse_budget(" 20% ") == "20%"
    assert parse_budget("5e-2") == 0.05
    for nonsense in ("", "many", "-3", "64.0", "0", "9" * 5000, "1e999999999", "1e30000000%", "1_000"):
        if nonsense == "0":
            assert parse_budget(nonsense) == 0
            continue
        with pytest.raises(ValueError, match="budget="):
            parse_budget(nonsense)


@pytest.mark.parametrize(
    ("eligible", "error", "message"),
    [
        ([3, 12], ValueError, "eligible holds index 12, outside 0 to 11"),
        ([-1], ValueError, "eligible holds index -1, outside 0 to 11"),
        ([3, 5, 3], ValueError, "eligible holds index 3 more than once"),
        (np.ones(11, dtype=bool), ValueError, "eligible is a mask of length 11 for 12 positions"),
        (torch.ones(13, dtype=torch.bool), ValueError, "mask of length 13"),
        (np.ones((3, 4), dtype=bool), ValueError, r"eligible has shape \(3, 4\)"),
        ([0.5, 1.0], TypeError, "eligible has dtype float64"),
        ("all", TypeError, "eligible has type str"),
        (5, TypeError, "eligible has type int"),
    ],
)
def test_eligible_positions_are_checked(eligible, error, message):
    with pytest.raises(error, match=message):
        stacktok.select(X, Z, Q, 3, eligible=eligible)


@pytest.mark.parametrize(
    "eligible",
    [
        [1, 5, 7],
        (1, 5, 7),
        {1, 5, 7},
        np.array([7, 1, 5], dtype=np.uint8),
        torch.tensor([5, 7, 1]),
        [i in (1, 5, 7) for i in range(12)],
        torch.tensor([i in (1, 5, 7) for i in range(12)]),
    ],
)
def test_eligible_positions_in_any_form(eligible):
    selection = stacktok.select(X, Z, Q, 12, eligible=eligible)
    assert selection.indices.tolist() == [1, 5, 7]
    assert selection.k == 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tau_query": 0}, ValueError, "tau_query=0 must be greater than 0"),
        ({"tau_vision": -0.2}, ValueError, r"tau_vision=-0\.2 must be greater than 0"),
        ({"tau_query": float("nan")}, ValueError, "tau_query=nan must be finite"),
        ({"tau_query": "0.02"}, TypeError, "tau_query='0.02' must be a number, not str"),
        ({"tau_query": True}, TypeError, "tau_query=True must be a number, not bool"),
        ({"beta_min": 0.95}, ValueError, "beta_min=0.95 and beta_max=0.9 must satisfy"),
        ({"beta_max": 1.1}, ValueError, "beta_max=1.1 must satisfy 0 <= beta_min <= beta_max <= 1"),
        ({"beta_min": -0.1}, ValueError, "beta_min=-0.1"),
        ({"strictness": 1.5}, ValueError, r"strictness=1.5 must lie in \[0, 1\]"),
        ({"swap_limit": -1}, ValueError, "swap_limit=-1 must be at least 0"),
        ({"swap_limit": None}, TypeError, "swap_limit=None must be an integer"),
        ({"swap_passes": 1.5}, TypeError, "swap_passes=1.5 must be an integer, or None"),
        ({"swap_epsilon": -1e-9}, ValueError, "swap_epsilon=-1e-09 must be 0 or greater"),
        ({"norm_epsilon": 0.0}, ValueError, "norm_epsilon=0.0 must be greater than 0"),
        ({"entropy_floor": 0.0}, ValueError, "entropy_floor=0.0 must be greater than 0"),
        ({"relevance_depth": 0}, ValueError, r"relevance_depth=0 must be at least 1, or None \(unlimited\)"),
        (
            {"backend": "cuda"},
            ValueError,
            "backend='cuda' is not known; use one of 'auto', 'cpu', 'reference', ",
        ),
        ({"criterion": "magic"}, ValueError, "criterion='magic' is not known"),
        ({"alpha": -1}, ValueError, "alpha=-1 must be 0 or greater"),
        ({"taus": 1}, TypeError, "unknown parameter 'taus'; the parameters are tau_query, tau_vision"),
    ],
)
def test_parameters_are_checked_wherever_they_are_given(settings, error, message):
    a_qv, a_vv = affinities(5, 2)
    for call in (
        lambda: stacktok.select(X, Z, Q, 3, **settings),
        lambda: stacktok.prepare(X, Z, **settings),
        lambda: stacktok.select_from_affinities(a_qv, a_vv, 3, **settings),
        lambda: stacktok.select_crops([stacktok.Crop(X, Z)], Q, 3, **settings),
        lambda: stacktok.select_crops_from_affinities([(a_qv, a_vv, None)], 3, **settings),
        lambda: stacktok.select_batch([X], [Z], [Q], 3, **settings),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("a_qv", "a_vv", "message"),
    [
        (np.ones((2, 3)), -np.eye(3), r"vision_affinity holds -1\.0; affinities must not be negative"),
        (np.full((2, 3), np.nan), np.eye(3), "query_affinity holds NaN or infinity"),
        (np.ones((2, 3)), np.full((3, 3), np.inf), "vision_affinity holds NaN or infinity"),
        (np.ones((2, 4)), np.eye(3), "query_affinity has 4 columns for 3 tokens"),
        (None, np.ones((2, 3)), r"vision_affinity has shape \(2, 3\); give a square matrix"),
        (None, np.ones((0, 0)), "vision_affinity has no columns"),
        (None, np.full((3, 3), 1e308), "whose sums overflow; scale the affinities down"),
    ],
)
def test_given_affinities_are_checked(a_qv, a_vv, message):
    with pytest.raises(ValueError, match=message):
        stacktok.select_from_affinities(a_qv, a_vv, 2)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_odd_but_valid_inputs(backend):
    def run(*arguments, **settings):
        return stacktok.select(*arguments, backend=backend, **settings)

    nothing = run(X, Z, Q, 0)
    assert nothing.k == 0
    assert nothing.indices.tolist() == []
    assert nothing.coverage.tolist() == nothing.reference.tolist() == [0.0]
    assert run(X, Z, Q, 5, eligible=[]).k == 0
    assert run(X, Z, Q, 5, eligible=np.array([])).k == 0
    assert run(X, Z, Q, 5, eligible=np.zeros(12, dtype=bool)).indices.tolist() == []
    everything = run(X, Z, Q, 12)
    assert everything.indices.tolist() == list(range(12))
    assert not everything.swaps
    assert run(X, Z, Q, 10**9).k == 12
    for query in (None, Q[:0]):
        alone = run(X, Z, query, 4)
        assert set(alone.criterion) == {"coverage"}
        assert alone.relevance.tolist() == [0.0] * 5
        assert alone.strictness == 0.9
        assert not alone.bound.any()
    single = run(X[:1], Z[:1], Q, 1)
    assert single.indices.tolist() == [0]
    assert single.strictness == 0.3
    assert run(X[:1], Z[:1], None, 1).criterion == ("coverage",)
    same = run(np.ones((9, 4)), np.ones((9, 4)), None, 4)
    assert same.order.tolist() == [0, 1, 2, 3]
    assert same.criterion == ("coverage", "fill", "fill", "fill")
    integers = np.arange(12).reshape(6, 2)
    assert run(integers, integers, integers[:2], 3).k == 3


def test_the_other_byte_order_is_read():
    swapped = [array.astype(array.dtype.newbyteorder()) for array in (X, Z, Q)]
    assert stacktok.select(*swapped, 4) == stacktok.select(X, Z, Q, 4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("depth", [10**30, np.uint64(2**64 - 1)])
def test_a_depth_that_no_set_reaches_is_unlimited(backend, depth):
    a_qv, a_vv = affinities(12, 3)
    for budget in (5, 12):
        settings = {"swap_passes": None, "backend": backend}
        deep = stacktok.select_from_affinities(a_qv, a_vv, budget, relevance_depth=depth, **settings)
        assert deep == stacktok.select_from_affinities(a_qv, a_vv, budget, relevance_depth=None, **settings)
        assert stacktok.select(X, Z, Q, budget, relevance_depth=depth, backend=backend).k == budget


@pytest.mark.parametrize("value", [None, 3, "crops", {"a": 1}])
def test_crops_are_a_list(value):
    with pytest.raises(TypeError, match=f"crops has type {type(value).__name__}; give a list of Crop"):
        stacktok.select_crops(value, Q, 3)
    with pytest.raises(TypeError, match=f"affinities has type {type(value).__name__}; give a list of"):
        stacktok.select_crops_from_affinities(value, 3)
    with pytest.raises(TypeError, match=f"vision has type {type(value).__name__}; give a list of"):
        stacktok.select_batch(value, [Z], [Q], 3)
