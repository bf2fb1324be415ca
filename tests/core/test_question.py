"""A question's affinities in compiled code: products, softmax, grid, entropies, and the threads that share them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.core.affinity import query_sides
from stacktok.core.parameters import Parameters
from stacktok.kernels import question as module
from stacktok.kernels.question import Tokens, query_affinities

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def image(n, d, seed, dtype=torch.float32):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return rows, rows.float().norm(dim=1)


def query(m, d):
    return np.random.default_rng(m + d).standard_normal((m, d)).astype(np.float32)


def ask(rows, images, tau=0.1, bits=40, norm_floor=1e-8, entropy_floor=1e-12):
    return query_affinities(rows, [Tokens.of(*one) for one in images], tau, bits, norm_floor, entropy_floor)


@given(
    n=st.integers(1, 70),
    m=st.integers(1, 13),
    d=st.sampled_from([1, 3, 64, 1023, 1024, 1025, 2500]),
    dtype=st.sampled_from(TYPES),
)
def test_it_is_the_softmax_of_cosines_on_the_grid_and_its_entropies(n, m, d, dtype):
    rows, (tokens, lengths) = query(m, d), image(n, d, seed=n, dtype=dtype)
    ((found, entropies),), bad = ask(rows, [(tokens, lengths)])
    assert bad == -1
    assert found.shape == (m, n)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    cosines = unit @ tokens.double().numpy().T / lengths.double().numpy()
    expected = np.exp((cosines - cosines.max(1, keepdims=True)) / 0.1)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2.0**-40)
    steps = found.astype(np.float64) * 2.0**40
    assert np.array_equal(steps, np.rint(steps))
    a = found.astype(np.float64)
    np.testing.assert_allclose(entropies, -(a * np.log(np.maximum(a, 1e-12))).sum(1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_neither_threads_nor_a_token_s_place_change_a_bit(threads, dtype, monkeypatch):
    """The sum over all tokens may round differently in another order, which moves a whole row alike."""
    rows = query(7, 1300)
    tokens, lengths = image(101, 1300, seed=0, dtype=dtype)
    ((whole, _),), _ = ask(rows, [(tokens, lengths)])
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 1)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    for _ in range(20):
        ((again, _),), _ = ask(rows, [(tokens, lengths)])
        assert np.array_equal(again, whole)
    for shift in (1, 2, 3, 50, 97, 100):
        order = np.roll(np.arange(101), shift)
        moved = torch.from_numpy(order)
        ((found, _),), _ = ask(rows, [(tokens[moved].contiguous(), lengths[moved].contiguous())])
        np.testing.assert_allclose(found, whole[:, order], rtol=1e-6)
        assert np.array_equal(np.argsort(found, axis=1, kind="stable"), np.argsort(whole[:, order], 1, kind="stable"))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_several_images_get_what_each_gets_alone(threads, monkeypatch):
    rows = query(5, 300)
    images = [image(n, 300, seed=n, dtype=TYPES[n % 3]) for n in (1, 3, 4, 15, 16, 17, 100)]
    alone = [ask(rows, [one])[0][0] for one in images]
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 1)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    for _ in range(20):
        together, _ = ask(rows, images)
        for (found, entropies), (expected, expected_entropies) in zip(together, alone, strict=True):
            assert np.array_equal(found, expected)
            assert np.array_equal(entropies, expected_entropies)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_counts_as_its_float32_cast(dtype):
    """All finite bit patterns, the smallest included, as one-dimensional tokens against a query of ones."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    tokens = bits.view(dtype)
    tokens = tokens[torch.isfinite(tokens) & (tokens.float().abs() < 1e30)][:, None]
    lengths = torch.full((len(tokens),), float(tokens.float().abs().max()))
    half, full = (ask(np.ones((1, 1), np.float32), [(t, lengths)], 1.0)[0][0] for t in (tokens, tokens.float()))
    assert np.array_equal(half[0], full[0])
    assert half[1] == full[1]


def test_a_norm_is_not_below_the_floor():
    tokens = torch.eye(4)
    ((found, _),), bad = ask(
        np.array([[3e-4, 4e-4, 0, 0], [0, 0, 0, 0]], np.float32), [(tokens, torch.ones(4))], 1, 40, 1e-2
    )
    assert bad == -1
    expected = np.exp([[3e-2, 4e-2, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), rtol=1e-6)


def test_logarithms_and_exponentials_are_those_of_a_library():
    generator = np.random.default_rng(0)
    near = 1 + np.arange(-500, 500) * 2.0**-50
    for x in (np.exp(generator.uniform(-700, 700, 10_000)), near, generator.uniform(0.5, 2, 10_000), np.ones(1)):
        found = x.copy()
        module._logarithms(found, np.empty(len(x)))
        np.testing.assert_allclose(found, np.log(x), rtol=5e-16, atol=0)
    for x in (-generator.uniform(0, 87, 10_000), -np.exp(generator.uniform(-80, 4, 10_000)), np.zeros(1)):
        found = x.astype(np.float32)
        expected = np.exp(found.astype(np.float64))
        module._exponentials(found, np.empty(len(x), np.float32))
        np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=0)
    assert found[0] == 1
    smallest = np.array([-88, -1e5, -3e38], np.float32)
    module._exponentials(smallest, np.empty(3, np.float32))
    assert ((smallest >= 0) & (smallest < 2e-38)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_the_first_row_without_a_finite_norm_is_named(value):
    rows = query(6, 10)
    rows[[2, 4], 3] = value
    assert ask(rows, [image(8, 10, seed=0)])[1] == 2


def test_no_temperature_is_too_small():
    ((found, entropies),), _ = ask(np.eye(3, dtype=np.float32), [(torch.eye(3), torch.ones(3))], tau=1e-300)
    assert np.array_equal(found, np.eye(3))
    assert np.array_equal(entropies, np.zeros(3))


def test_questions_from_several_threads_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 1)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    images = [image(40, 64, seed=seed) for seed in range(3)]
    queries = [query(m, 64) for m in (1, 5, 12)]
    expected = [ask(rows, images)[0] for rows in queries]
    wrong = []

    def call(which):
        for _ in range(50):
            found = ask(queries[which], images)[0]
            wrong.extend(
                1 for mine, right in zip(found, expected[which], strict=True) if not np.array_equal(mine[0], right[0])
            )

    callers = [threading.Thread(target=call, args=(which,)) for which in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.fixture
def flushing():
    """Denormal numbers count as zero, as a caller may set it for speed."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_the_smallest_half_precision_numbers_count_where_denormal_numbers_are_flushed(flushing):
    tokens = torch.arange(-1023, 1024, 7, dtype=torch.float64)[:, None] * 2.0**-24
    lengths = torch.full((len(tokens),), 2.0**-14)
    half, full = (ask(np.ones((1, 1), np.float32), [(tokens.to(t), lengths)])[0][0][0] for t in TYPES[::-2])
    assert np.array_equal(half, full)
    assert len(np.unique(half)) == len(tokens)


@pytest.mark.parametrize("dtype", TYPES)
def test_embeddings_cannot_be_taken_away_from_a_prepared_image(dtype):
    x, z = (torch.randn(20, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    prepared = stacktok.prepare(x, z)
    with pytest.raises(RuntimeError, match="not resizable"):
        z.untyped_storage().resize_(0)
    assert prepared.query_affinity(z[:2]).shape == (2, 20)


@pytest.mark.parametrize("n", [3, 400])
def test_embeddings_may_move_between_questions(n):
    x, z, q = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((n, 8), (n, 3000), (5, 3000))
    )
    prepared = stacktok.prepare(x, z)
    before, address = prepared.query_affinity(q), z.data_ptr()
    z.share_memory_()
    assert z.data_ptr() != address
    assert np.array_equal(prepared.query_affinity(q), before)


def test_a_column_may_be_a_transposed_row():
    x, z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 9.0)[None].T
    assert np.allclose(stacktok.prepare(x, z).query_affinity(torch.ones(2, 1)), 1 / 8)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_no_question_needs_no_embeddings(dtype):
    x, z = (torch.randn(20, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    side = query_sides(z[:0], [stacktok.prepare(x, z).embeddings], Parameters())[0]
    assert side.affinity.shape == (0, 20)
    assert side.entropies.shape == (0,)
