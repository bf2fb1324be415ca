"""Algorithm 1: gate, fallback, saturation, ties, against the paper evaluated naively."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import stacktok
from stacktok.core.greedy import get_backend
from stacktok.kernels import CRITERIA, Problem, Rule
from tests.core import naive
from tests.core.cases import affinities, focused, problems, tied

BACKENDS = ["reference", "cpu"]


def transitions(bound) -> int:
    """How often the gate opened or closed."""
    return int(np.abs(np.diff(np.asarray(bound, dtype=int))).sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("m", [20, 60])
def test_the_gate_binds_and_releases_as_the_paper_says(backend, seed, m):
    a_qv, a_vv = focused(seed, m=m)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 30, strictness=0.97, swap_limit=0, backend=backend)
    order, criteria, bound = naive.select(a_qv, a_vv, 30, range(len(a_vv)), 0.97)
    # A case on which a selector without any gate would pass proves nothing.
    assert transitions(bound) >= 4
    assert selection.order.tolist() == order
    assert list(selection.criterion) == criteria
    assert selection.bound.tolist() == bound


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems())
def test_every_pick_is_the_paper_s(backend, problem):
    a_qv, a_vv, eligible = problem["a_qv"], problem["a_vv"], problem["eligible"]
    selection = stacktok.select_from_affinities(
        a_qv,
        a_vv,
        problem["budget"],
        eligible=eligible,
        strictness=problem["strictness"],
        relevance_depth=problem["depth"],
        swap_limit=0,
        backend=backend,
    )
    k = min(problem["budget"], len(eligible))
    order, criteria, bound = naive.select(a_qv, a_vv, k, eligible, selection.strictness, problem["depth"])
    assert selection.k == k
    assert selection.order.tolist() == order
    assert selection.indices.tolist() == sorted(order)
    assert list(selection.criterion) == criteria
    assert selection.bound.tolist() == bound
    m, n = len(a_qv), len(a_vv)
    for t in range(k + 1):
        assert selection.coverage[t] == naive.total(a_vv, order[:t]) / n
        assert selection.relevance[t] == naive.total(a_qv, order[:t], problem["depth"]) / max(1, m)
    assert selection.target == pytest.approx(selection.strictness * selection.reference, rel=1e-15)


@given(problem=problems(max_n=10))
def test_adding_a_token_repairs_the_deficit_by_its_coverage_gain_at_most(problem):
    a_vv, n = problem["a_vv"], len(problem["a_vv"])
    selection = stacktok.select_from_affinities(problem["a_qv"], a_vv, n // 2, strictness=0.9, swap_limit=0)
    for t in range(selection.k):
        kept = selection.order[:t].tolist()
        target = float(selection.target[t]) * n
        deficit = max(target - naive.total(a_vv, kept), 0)
        for s in set(range(n)) - set(kept):
            repaired = deficit - max(target - naive.total(a_vv, [*kept, s]), 0)
            assert repaired == pytest.approx(min(deficit, naive.gain(a_vv, s, kept)), abs=1e-12)


def test_a_query_s_first_pick_is_by_relevance():
    a_qv, a_vv = affinities(40, 3)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 5, strictness=1.0)
    assert selection.criterion[0] == "relevance"
    assert selection.order[0] == int(np.argmax(a_qv.astype(np.float64).sum(axis=0)))
    assert selection.target[0] == selection.coverage[0] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_relevance_that_has_saturated_gains_exactly_nothing(backend):
    """Once every row has its best token the policy falls back to coverage for good; no rounding noise is chased."""
    a_qv, a_vv = affinities(400, 5, seed=3, d_v=64, d=64)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 200, strictness=0.0, backend=backend)
    saturated = selection.criterion.index("coverage")
    assert set(selection.order[:saturated]) >= set(a_qv.argmax(axis=1))
    assert set(selection.criterion[saturated:]) == {"coverage"}
    assert selection.relevance[saturated] == selection.relevance[-1] == a_qv.astype(np.float64).max(axis=1).sum() / 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_index_fills_the_budget_when_both_have_saturated(backend):
    a_vv = np.zeros((6, 6), dtype=np.float32)
    a_vv[:, 4] = 0.5
    a_qv = np.zeros((1, 6), dtype=np.float32)
    a_qv[0, 3] = 0.5
    selection = stacktok.select_from_affinities(a_qv, a_vv, 6, eligible=[0, 2, 3, 4, 5], backend=backend)
    assert selection.order.tolist() == [3, 4, 0, 2, 5]
    assert selection.criterion == ("relevance", "coverage", "fill", "fill", "fill")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deficit_that_coverage_cannot_repair_falls_back_to_relevance(backend):
    """No target of the paper's is out of reach; one that is still must not keep relevance from its turn."""
    a_vv = np.zeros((8, 8), dtype=np.float32)
    a_vv[:, 2] = 0.5
    a_qv = np.zeros((1, 8), dtype=np.float32)
    a_qv[0, 5] = 0.5
    chosen = get_backend(backend)
    state = chosen.precompute(a_vv, np.ones(8, dtype=bool))
    (steps,) = chosen.greedy([Problem(state, a_qv, np.full(4, 1e9), Rule.GATED)])
    assert steps.order.tolist() == [2, 5, 0, 1]
    assert [CRITERIA[code] for code in steps.criterion] == ["coverage", "relevance", "fill", "fill"]
    assert steps.bound.all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [16, 60])
def test_ties_go_to_the_lowest_index(backend, seed, n):
    a_qv, a_vv = tied(n, 4, seed, levels=2)
    selection = stacktok.select_from_affinities(a_qv, a_vv, 16, backend=backend, swap_limit=0)
    assert selection.order.tolist() == naive.select(a_qv, a_vv, 16, range(n), selection.strictness)[0]


@pytest.mark.parametrize("m", [1, 2, 12])
def test_strictness_is_the_clipped_normalised_entropy(m):
    for seed in range(5):
        a_qv, a_vv = affinities(50, m, seed=seed)
        low = stacktok.select_from_affinities(a_qv, a_vv, 1, beta_min=0.0, beta_max=1.0).strictness
        assert low == pytest.approx(naive.strictness(a_qv, 0.0, 1.0), rel=1e-12)
        clipped = stacktok.select_from_affinities(a_qv, a_vv, 1, beta_min=0.4, beta_max=0.41).strictness
        assert clipped == min(max(low, 0.4), 0.41)


def test_strictness_at_the_edges():
    one = np.ones((1, 1))
    assert stacktok.select_from_affinities(None, np.eye(4), 2).strictness == 0.9
    assert stacktok.select_from_affinities(np.zeros((0, 4)), np.eye(4), 2).strictness == 0.9
    assert stacktok.select_from_affinities(one, one, 1).strictness == 0.3
    assert stacktok.select_from_affinities(None, one, 1).strictness == 0.9
    uniform = np.full((3, 8), 1 / 8)
    assert stacktok.select_from_affinities(uniform, np.eye(8), 1, beta_max=1.0).strictness == pytest.approx(1)
    assert stacktok.select_from_affinities(uniform, np.eye(8), 1).strictness == 0.9
    focus = np.eye(8)[:3]
    assert stacktok.select_from_affinities(focus, np.eye(8), 1, beta_min=0.0).strictness == 0
    assert stacktok.select_from_affinities(focus, np.eye(8), 1, strictness=0.7).strictness == 0.7


@pytest.mark.parametrize("backend", BACKENDS)
def test_ablations_are_what_their_names_say(backend):
    a_qv, a_vv = focused(1)
    n = len(a_vv)

    def run(**settings):
        return stacktok.select_from_affinities(a_qv, a_vv, 20, swap_limit=0, backend=backend, **settings)

    def greedy(score):
        kept = []
        for _ in range(20):
            candidates = [s for s in range(n) if s not in kept]
            kept.append(max(candidates, key=lambda s: (score(s, kept), -s)))
        return kept

    def relevance(s, kept):
        return naive.gain(a_qv, s, kept)

    def coverage(s, kept):
        return naive.gain(a_vv, s, kept)

    assert run(criterion="relevance", fill="index").order.tolist() == greedy(relevance)
    assert run(criterion="coverage").order.tolist() == greedy(coverage)
    by_sum = greedy(lambda s, kept: relevance(s, kept) / len(a_qv) + 0.25 * (coverage(s, kept) / n))
    assert run(criterion="scalarized", alpha=0.25).order.tolist() == by_sum
    ungated = run(strictness=0.0).order.tolist()
    assert run(criterion="relevance", fill="coverage").order.tolist() == ungated
    # Nothing but the paper's policy has a target to hold, or swaps that would bring the other signal in.
    assert run(criterion="relevance", fill="coverage", target="final").order.tolist() == ungated
    for criterion in ("relevance", "coverage", "scalarized"):
        assert not stacktok.select_from_affinities(a_qv, a_vv, 8, criterion=criterion, swap_passes=None).swaps
    final = run(target="final", strictness=0.9)
    assert len(set(final.target.tolist())) == 1
    assert final.target[0] == pytest.approx(0.9 * final.reference[-1])
    assert final.criterion[0] == "coverage"
    order, _, _ = _final_target(a_qv, a_vv, 20, 0.9)
    assert final.order.tolist() == order


def _final_target(a_qv, a_vv, k, beta):
    theta = beta * naive.reference(a_vv, range(len(a_vv)), k)[-1]
    kept, criteria = [], []
    for _ in range(k):
        candidates = [s for s in range(len(a_vv)) if s not in kept]
        pick, name = naive.score(a_qv, a_vv, kept, candidates, theta > naive.total(a_vv, kept))
        kept.append(pick)
        criteria.append(name)
    return kept, criteria, theta
