"""Swap refinement, Eq. (swap), against a version that recomputes everything."""

from __future__ import annotations

import pytest
from hypothesis import given

import stacktok
from tests.core import naive
from tests.core.cases import focused, problems, tied

BACKENDS = ["reference", "cpu"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passes", [1, None])
@given(problem=problems(max_n=10))
def test_swaps_are_those_of_the_definition(backend, passes, problem):
    a_qv, a_vv, eligible, depth = (problem[key] for key in ("a_qv", "a_vv", "eligible", "depth"))
    selection = stacktok.select_from_affinities(
        a_qv,
        a_vv,
        problem["budget"],
        eligible=eligible,
        strictness=problem["strictness"],
        relevance_depth=depth,
        swap_passes=passes,
        backend=backend,
    )
    k = selection.k
    if 0 < k < len(eligible):
        target = selection.strictness * naive.reference(a_vv, eligible, k)[-1]
        kept, swaps = naive.refine(a_qv, a_vv, selection.order.tolist(), eligible, target, 1e-6, passes, depth)
    else:
        kept, swaps = sorted(selection.order.tolist()), []
    assert selection.indices.tolist() == kept
    assert [tuple(swap) for swap in selection.swaps] == swaps
    assert selection.final_relevance == naive.total(a_qv, kept, depth) / max(1, len(a_qv))
    assert selection.final_coverage == naive.total(a_vv, kept) / len(a_vv)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("make", "k"), [(lambda seed: tied(24, 6, seed), 6), (lambda seed: focused(seed, n=40), 12)])
@pytest.mark.parametrize("depth", [1, 2, None])
def test_no_admissible_swap_is_left_when_passes_are_unlimited(backend, make, k, depth):
    accepted = 0
    for seed in range(8):
        a_qv, a_vv = make(seed)
        n = len(a_vv)
        selection = stacktok.select_from_affinities(
            a_qv, a_vv, k, swap_passes=None, relevance_depth=depth, backend=backend
        )
        target = selection.target[-1] * n
        kept = selection.indices.tolist()
        left = [
            (out, into)
            for out in kept
            for into in set(range(n)) - set(kept)
            if naive.admissible(a_qv, a_vv, kept, out, into, target, 1e-6, depth)
        ]
        assert left == []
        assert all(swap.after > swap.before for swap in selection.swaps)
        assert len(set(kept)) == selection.k == k
        accepted += len(selection.swaps)
    assert accepted > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_of_several_admissible_replacements_is_taken(backend):
    several = 0
    for seed in range(6):
        a_qv, a_vv = focused(seed, n=30, m=20)
        settings = {"strictness": 0.5, "swap_passes": None, "backend": backend}
        selection = stacktok.select_from_affinities(a_qv, a_vv, 6, **settings)
        target = 0.5 * naive.reference(a_vv, range(30), 6)[-1]
        kept, swaps = naive.refine(a_qv, a_vv, selection.order.tolist(), range(30), target, 1e-6, None)
        assert selection.indices.tolist() == kept
        assert [tuple(swap) for swap in selection.swaps] == swaps
        before = sorted(selection.order.tolist())
        for out, *_ in swaps[:1]:
            options = [
                into
                for into in set(range(30)) - set(before)
                if naive.admissible(a_qv, a_vv, before, out, into, target, 1e-6)
            ]
            several += len(options) > 1
    # Cases with a single way out would not tell the best from the first.
    assert several > 0


def test_swaps_never_push_coverage_below_the_floor():
    for seed in range(8):
        a_qv, a_vv = focused(seed)
        before = stacktok.select_from_affinities(a_qv, a_vv, 12, strictness=0.95, swap_limit=0)
        after = stacktok.select_from_affinities(a_qv, a_vv, 12, strictness=0.95, swap_passes=None)
        assert after.final_coverage >= min(before.target[-1], before.final_coverage)


def test_refinement_is_off_above_its_limit_and_at_zero():
    a_qv, a_vv = focused(7)
    refined = stacktok.select_from_affinities(a_qv, a_vv, 16)
    assert refined.swaps
    assert not stacktok.select_from_affinities(a_qv, a_vv, 17).swaps
    assert not stacktok.select_from_affinities(a_qv, a_vv, 16, swap_limit=0).swaps
    assert not stacktok.select_from_affinities(a_qv, a_vv, 16, swap_passes=0).swaps
    assert stacktok.select_from_affinities(a_qv, a_vv, 17, swap_limit=17).swaps
    assert refined.order.tolist() == stacktok.select_from_affinities(a_qv, a_vv, 17).order[:16].tolist()


def test_a_large_epsilon_accepts_nothing():
    a_qv, a_vv = focused(3)
    assert not stacktok.select_from_affinities(a_qv, a_vv, 16, swap_epsilon=10.0).swaps
