"""The product of a question's rows with an image's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stacktok.kernels import products as module
from stacktok.kernels.products import products


@given(
    n=st.integers(1, 40),
    m=st.integers(0, 13),
    d=st.sampled_from([1, 3, 64, 1023, 1024, 1025, 2500]),
    double=st.booleans(),
)
def test_it_is_the_matrix_product(n, m, d, double):
    rng = np.random.default_rng(n + 100 * m + d)
    many, few = (rng.standard_normal((rows, d)).astype(np.float64 if double else np.float32) for rows in (n, m))
    found = products(many, few)
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
    whole = products(many, few)
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 1)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    assert np.array_equal(products(many, few), whole)
    for first in (1, 2, 3, 50, 97, 100):
        assert np.array_equal(products(many[first:], few), whole[:, first:])
