"""Eq. (affinity) and the grid on which sums are exact."""

from __future__ import annotations

import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.core.affinity import given_affinity, grid_bits
from tests.core import naive
from tests.core.cases import features


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (37, 5), (700, 12), (1025, 1)])
def test_affinities_are_the_row_softmax_of_cosines(n, m):
    x, z, q = features(n, m)
    a_qv, a_vv = stacktok.affinities(x, z, q)
    assert a_qv.dtype == a_vv.dtype == np.float32
    np.testing.assert_allclose(a_vv, naive.affinity(x, x, 0.2), rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(a_qv, naive.affinity(q, z, 0.02), rtol=5e-4, atol=1e-9)


def test_float64_features_are_not_cast_down():
    x, z, q = (a.astype(np.float64) for a in features(50, 4))
    a_qv, a_vv = stacktok.affinities(x, z, q)
    assert a_qv.dtype == a_vv.dtype == np.float64
    np.testing.assert_allclose(a_vv, naive.affinity(x, x, 0.2), rtol=1e-12, atol=2.0**-44)
    np.testing.assert_allclose(a_qv, naive.affinity(q, z, 0.02), rtol=1e-10, atol=2.0**-44)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_count_as_their_float32_casts(dtype):
    x, z, q = (torch.from_numpy(a).to(dtype) for a in features(600, 7, d_v=1024, d=1024))
    half = stacktok.affinities(x, z, q)
    full = stacktok.affinities(x.float(), z.float(), q.float())
    assert np.array_equal(half[0], full[0])
    assert np.array_equal(half[1], full[1])
    assert stacktok.select(x, z, q, 64) == stacktok.select(x.float(), z.float(), q.float(), 64)


def test_torch_and_numpy_give_the_same_result():
    x, z, q = features(60, 4)
    tensors = [torch.from_numpy(a) for a in (x, z, q)]
    assert stacktok.select(x, z, q, 9) == stacktok.select(*tensors, 9)
    # Views, read-only memory and reversed strides are all fine.
    x.flags.writeable = False
    assert stacktok.select(x[::-1], z[::-1], q, 9) == stacktok.select(x[::-1].copy(), z[::-1].copy(), q, 9)


@given(n=st.integers(1, 40), m=st.integers(1, 20), seed=st.integers(0, 999))
def test_sums_of_grid_entries_do_not_depend_on_their_order(n, m, seed):
    # Both temperatures so low that float32 has entries finer than the grid.
    for a in stacktok.affinities(*features(n, m, seed=seed), tau_vision=0.02):
        rows = len(a)
        scaled = a.astype(np.float64) * 2.0 ** grid_bits(rows)
        assert np.array_equal(scaled, np.rint(scaled))
        shuffled = np.random.default_rng(seed).permutation(a.astype(np.float64), axis=0)
        exact = [sum(int(value) for value in column) for column in scaled.T]
        assert a.astype(np.float64).sum(axis=0).tolist() == shuffled.sum(axis=0).tolist()
        assert [int(s) for s in a.astype(np.float64).sum(axis=0) * 2.0 ** grid_bits(rows)] == exact


def test_grid_of_given_affinities_follows_rows_and_largest_entry():
    assert grid_bits(576) == 42
    assert grid_bits(1024) == 42
    assert grid_bits(1025) == 41
    assert grid_bits(1) == 52
    assert grid_bits(576, 0.01) == 42
    assert grid_bits(576, 4.0) == 40


def test_given_float64_is_kept_only_where_float32_does_not_hold_it():
    exact = np.array([[0.5, 0.25], [0.125, 0.75]])
    assert given_affinity(exact, "a").dtype == np.float32
    assert given_affinity(np.full((4, 4), 3.3 * 2.0**-50), "a").dtype == np.float32
    third = np.array([[1 / 3, 0.25], [0.125, 0.75]])
    kept = given_affinity(third, "a")
    assert kept.dtype == np.float64
    assert kept[0, 0] == np.rint(1 / 3 * 2.0**51) / 2.0**51
    assert third[0, 0] == 1 / 3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e6, 1e30])
def test_given_affinities_of_any_scale_have_exact_sums(scale):
    a = np.random.default_rng(0).random((40, 30)) * scale
    rounded = given_affinity(a, "a").astype(np.float64)
    largest = max(1.0, a.max())
    assert np.abs(rounded - a).max() <= largest * 40 * 2.0**-51
    assert rounded.sum(axis=0).tolist() == rounded[::-1].sum(axis=0).tolist()


def test_a_deep_row_has_exact_sums_too():
    """Where a row counts many entries at once, the grid leaves room for their sum."""
    a = np.random.default_rng(0).random((3, 500))
    for depth in (1, 40, None):
        rounded = given_affinity(a, "a", depth)
        counted = 500 if depth is None else depth
        largest = np.sort(rounded.astype(np.float64), axis=1)[:, -counted:]
        assert Fraction(float(largest.sum())) == sum(Fraction(value) for value in largest.ravel().tolist())


def test_given_affinities_already_on_the_grid_are_not_copied():
    a = stacktok.affinities(*features(30, 3))[1]
    assert np.shares_memory(given_affinity(a, "a"), a)


def test_a_caller_s_affinities_are_never_written():
    a = np.random.default_rng(0).random((9, 9)).astype(np.float32) * 1e-4
    before = a.copy()
    stacktok.select_from_affinities(a[:2], a, 4, swap_passes=None)
    assert np.array_equal(a, before)


def test_zero_vectors_and_identical_tokens_are_uniform():
    n = 6
    a_qv, a_vv = stacktok.affinities(np.zeros((n, 4)), np.ones((n, 5)), np.ones((2, 5)), tau_vision=1e-3)
    np.testing.assert_allclose(a_vv, 1 / n, rtol=1e-12)
    np.testing.assert_allclose(a_qv, 1 / n, rtol=1e-12)
    selection = stacktok.select(np.zeros((n, 4)), np.ones((n, 5)), np.ones((2, 5)), 3)
    assert selection.order.tolist() == [0, 1, 2]
    assert selection.criterion == ("relevance", "fill", "fill")


@pytest.mark.parametrize("tau", [1e-4, 1e-39, 1e-300])
def test_no_temperature_is_too_small(tau):
    x, z, q = features(40, 6)
    a_qv, a_vv = stacktok.affinities(x, z, q, tau_query=tau, tau_vision=tau)
    np.testing.assert_allclose(a_qv.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(a_vv.sum(axis=1), 1, rtol=1e-5)
    assert stacktok.select(x, z, q, 20, tau_query=tau, tau_vision=tau).strictness == 0.3


def test_no_norm_floor_is_too_small_for_zero_vectors():
    _, z, q = features(6, 2)
    a_qv, a_vv = stacktok.affinities(np.zeros((6, 4), dtype=np.float32), z, q, norm_epsilon=1e-50)
    np.testing.assert_allclose(a_vv, 1 / 6, rtol=1e-6)
    assert np.isfinite(a_qv).all()


def test_a_larger_norm_floor_shrinks_small_vectors():
    x, z, q = features(20, 3)
    _, small = stacktok.affinities(x * 1e-3, z, q, norm_epsilon=1.0)
    norms = np.linalg.norm(x * 1e-3, axis=1)
    logits = (x * 1e-3) @ (x * 1e-3).T / 0.2
    assert (norms < 1).all()
    np.testing.assert_allclose(small, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("settings", [{"tau_query": 0}, {"tau_vision": -1}, {"norm_epsilon": 0}])
def test_affinities_check_their_parameters(settings):
    with pytest.raises(ValueError, match="must be greater than 0"):
        stacktok.affinities(*features(5, 2), **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_the_precision(dtype):
    x, z, q = (torch.from_numpy(a) for a in features(40, 3))
    expected = stacktok.select(x, z, q, 9)
    with torch.autocast("cpu", dtype=dtype):
        assert stacktok.select(x, z, q, 9) == expected


def test_eight_bit_features_are_cast_up():
    x, z, q = (torch.from_numpy(a).to(torch.float8_e4m3fn) for a in features(30, 3))
    assert stacktok.select(x, z, q, 5) == stacktok.select(x.float(), z.float(), q.float(), 5)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("d", [37, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_tokens_tie_whatever_their_place(m, d, dtype):
    """A matrix product may round equal rows differently at different places."""
    generator = torch.Generator().manual_seed(m)
    label = torch.randint(40, (300,), generator=generator)
    x, z = (torch.randn(40, width, generator=generator)[label].to(dtype) for width in (d, d))
    a_qv, a_vv = stacktok.affinities(x, z, torch.randn(m, d, generator=generator))
    for a in (a_qv, a_vv):
        for kind in range(40):
            same = a[:, (label == kind).numpy()]
            assert (same == same[:, :1]).all()


@given(
    n=st.integers(1, 30),
    m=st.integers(0, 4),
    seed=st.integers(0, 99),
    dtypes=st.tuples(*[st.sampled_from([torch.float16, torch.bfloat16, torch.float32])] * 3),
)
def test_any_mix_of_types_gives_the_result_of_its_float32_casts(n, m, seed, dtypes):
    mixed = [torch.from_numpy(a).to(dtype) for a, dtype in zip(features(n, m, seed=seed), dtypes, strict=True)]
    assert stacktok.select(*mixed, 5) == stacktok.select(*(tensor.float() for tensor in mixed), 5)


@given(
    n=st.integers(1, 70),
    m=st.integers(1, 13),
    d=st.sampled_from([1, 3, 64, 1025]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_question_s_affinities_are_the_softmax_of_cosines_on_the_grid(n, m, d, dtype):
    generator = torch.Generator().manual_seed(n)
    x, z = torch.randn(n, 4, generator=generator), torch.randn(n, d, generator=generator).to(dtype)
    query = torch.randn(m, d, generator=generator)
    found = stacktok.prepare(x, z, tau_query=0.1).query_affinity(query)
    np.testing.assert_allclose(found, naive.affinity(query, z.double(), 0.1), rtol=2e-4, atol=2.0**-40)
    steps = found.astype(np.float64) * 2.0 ** grid_bits(m)
    assert np.array_equal(steps, np.rint(steps))


@pytest.mark.parametrize(("n", "m", "d"), [(200, 5, 24), (40, 5, 300), (300, 1, 4096), (21, 4, 17)])
def test_neither_an_address_nor_a_thread_changes_a_bit(n, m, d):
    """Products of the same numbers at other addresses round differently, as do those of a thread's first call."""
    arrays = features(n, m, d_v=d, d=d)
    expected = stacktok.affinities(*arrays)

    def check(at):
        moved = []
        for array in arrays:
            memory = np.empty(array.size + 16, dtype=np.float32)
            moved.append(memory[at : at + array.size].reshape(array.shape))
            moved[-1][:] = array
        for found, right in zip(stacktok.affinities(*moved), expected, strict=True):
            wrong.append(not np.array_equal(found, right))

    wrong: list[bool] = []
    for at in range(16):
        check(at)
    threads = [threading.Thread(target=check, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 40
    assert not any(wrong)


def test_embeddings_may_move_between_questions():
    x, z, q = (torch.from_numpy(array) for array in features(400, 5, d=300))
    prepared = stacktok.prepare(x, z)
    before, address = prepared.query_affinity(q), z.data_ptr()
    z.share_memory_()
    assert z.data_ptr() != address
    assert np.array_equal(prepared.query_affinity(q), before)


def test_a_column_may_be_a_transposed_row():
    x, z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 9.0)[None].T
    assert np.allclose(stacktok.prepare(x, z).query_affinity(torch.ones(2, 1)), 1 / 8)


def test_a_query_s_norm_is_not_below_the_floor():
    query = np.array([[3e-4, 4e-4, 0, 0], [0, 0, 0, 0]], np.float32)
    found, _ = stacktok.affinities(np.eye(4), np.eye(4), query, tau_query=1.0, norm_epsilon=1e-2)
    expected = np.exp([[3e-2, 4e-2, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), rtol=1e-6)
