"""Proposition 1 (for every relevance depth) and Theorem 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.core.reference import coverage_sum, gain_sums, row_thresholds
from tests.core import naive
from tests.core.cases import affinities, problems

DEPTHS = [1, 2, 3, None]


@st.composite
def chains(draw):
    """A matrix, a chain S of T, and a token outside T."""
    p, n = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    levels = draw(st.lists(st.integers(0, 6), min_size=p * n, max_size=p * n))
    a = np.array(levels, dtype=np.float64).reshape(p, n) / 8
    tokens = draw(st.permutations(range(n)))
    t = draw(st.integers(0, n - 1))
    s = draw(st.integers(0, t))
    return a, tokens[:s], tokens[:t], tokens[t]


@pytest.mark.parametrize("depth", DEPTHS)
@given(case=chains())
def test_coverage_is_normalised_monotone_submodular_with_the_stated_gain(depth, case):
    a, small, large, token = case
    matrix = torch.from_numpy(a)
    assert coverage_sum(matrix, [], depth) == 0
    assert coverage_sum(matrix, small, depth) <= coverage_sum(matrix, large, depth)
    gains_small = gain_sums(matrix, row_thresholds(matrix, small, depth))
    gains_large = gain_sums(matrix, row_thresholds(matrix, large, depth))
    assert gains_small[token] >= gains_large[token]
    for kept, gains in ((small, gains_small), (large, gains_large)):
        assert coverage_sum(matrix, kept, depth) == naive.total(a, kept, depth)
        assert float(gains[token]) == naive.gain(a, token, kept, depth)


def test_an_unlimited_depth_holds_the_share_of_the_query_s_mass():
    a_qv, a_vv = affinities(30, 4)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 30, relevance_depth=None)
    assert selection.final_relevance == pytest.approx(1, abs=1e-6)
    kept = selection.order[:7]
    assert selection.relevance[7] == pytest.approx(a_qv[:, kept].sum() / 4, abs=1e-7)


@given(problem=problems(max_n=8))
def test_reference_is_near_optimal_at_every_size_and_concave(problem):
    a_vv, eligible = problem["a_vv"], problem["eligible"]
    selection = stacktok.select_from_affinities(None, a_vv, problem["budget"], eligible=eligible)
    curve = selection.reference * len(a_vv)
    for t in range(1, selection.k + 1):
        bound = 1 - (1 - 1 / t) ** t
        assert bound >= 1 - 1 / math.e
        assert curve[t] >= bound * naive.optimum(a_vv, eligible, t) * (1 - 1e-12)
    steps = np.diff(curve)
    assert (steps >= 0).all()
    assert (np.diff(steps) <= 1e-12 * max(1, curve[-1])).all()


@given(problem=problems(max_n=10))
def test_reference_is_the_coverage_greedy_chain_and_meets_the_target(problem):
    a_qv, a_vv, eligible = problem["a_qv"], problem["a_vv"], problem["eligible"]
    selection = stacktok.select_from_affinities(a_qv, a_vv, problem["budget"], eligible=eligible)
    expected = np.array(naive.reference(a_vv, eligible, selection.k)) / len(a_vv)
    assert selection.reference.tolist() == expected.tolist()
    # Adjusted-threshold consequence: the chain itself meets every target.
    assert (selection.reference >= selection.target).all()
    # Without a query the run is the chain.
    alone = stacktok.select_from_affinities(None, a_vv, problem["budget"], eligible=eligible, swap_limit=0)
    assert alone.coverage.tolist() == alone.reference.tolist()
