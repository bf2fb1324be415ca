"""The product of a question's rows with an image's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stacktok.kernels import products as module
from stacktok.kernels.products import products, unit_rows


@given(
    n=st.integers(1, 40),
    m=st.integers(0, 13),
    d=st.sampled_from([1, 3, 64, 1023, 1024, 1025, 2500]),
    double=st.booleans(),
)
def test_it_is_the_matrix_product(n, m, d, double):
    rng = np.random.default_rng(n + 100 * m + d)
    many, few = (rng.standard_normal((rows, d)).astype(np.float64 if double else np.float32) for rows in (n, m))
    (found,) = products([many], few)
    assert found.shape == (m, n)
    assert found.dtype == many.dtype
    assert found.flags.c_contiguous
    exact = few.astype(np.longdouble) @ many.astype(np.longdouble).T
    scale = np.linalg.norm(few, axis=1)[:, None] * np.linalg.norm(many, axis=1)
    np.testing.assert_array_less(np.abs(found - exact), (1e-13 if double else 1e-5) * scale + 1e-30)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_threads_nor_a_row_s_place_change_a_bit(threads, monkeypatch):
    rng = np.random.default_rng(0)
    many, few = (rng.standard_normal((rows, 1300)).astype(np.float32) for rows in (101, 7))
    (whole,) = products([many], few)
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 1)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    for first in (0, 1, 2, 3, 50, 97, 100):
        found = products([many[:50], many[first:]], few)
        assert np.array_equal(found[0], whole[:, :50])
        assert np.array_equal(found[1], whole[:, first:])


@given(m=st.integers(0, 5), d=st.sampled_from([1, 7, 4096]), double=st.booleans())
def test_rows_are_brought_to_length_one(m, d, double):
    rows = np.random.default_rng(d).standard_normal((m, d)).astype(np.float64 if double else np.float32)
    unit, norms = unit_rows(rows, 1e-8)
    np.testing.assert_allclose(norms, np.linalg.norm(rows.astype(np.float64), axis=1), rtol=1e-12 if double else 1e-5)
    np.testing.assert_array_equal(unit, rows / norms[:, None])


def test_a_norm_is_not_below_the_floor_and_not_finite_where_squares_overflow():
    unit, norms = unit_rows(np.array([[0, 0], [3e-4, 4e-4], [1e30, 0]], dtype=np.float32), 1e-2)
    np.testing.assert_allclose(unit[:2], [[0, 0], [3e-2, 4e-2]], rtol=1e-6)
    np.testing.assert_allclose(norms[:2], [0, 5e-4], rtol=1e-6)
    assert norms[2] == np.inf
