"""The kernels for GPUs return the bits of the reference; Triton interprets them here, so that no GPU is needed.

`make test-triton` runs this file in an environment that has Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stacktok
from stacktok.core import reference
from stacktok.kernels import Problem, Rule
from stacktok.kernels.diversity import greedy_map, max_min
from tests.core.cases import affinities, features, focused, problems, tied

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets kernels where TRITON_INTERPRET=1 is set", allow_module_level=True)

from stacktok.kernels import triton as kernels  # noqa: E402
from stacktok.kernels.triton import facility_location  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ZERO = 2.0**-20


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def same(found, expected):
    return all(np.array_equal(np.asarray(a), b) for a, b in zip(found, expected, strict=True))


def run(problem):
    """One problem of arrays on both backends."""
    (matrix, eligible), query, targets = problem.state, problem.query_affinity, problem.targets
    weights = None if problem.weights is None else tensor(problem.weights)
    state = kernels.precompute(tensor(matrix), tensor(eligible))
    return problem._replace(
        state=state, query_affinity=tensor(query), targets=tensor(targets), weights=weights
    ), reference.greedy([problem])[0]


@settings(max_examples=25, deadline=None)
@given(
    problem=problems(max_n=12, max_m=4),
    criterion=st.sampled_from(["gated", "gated", "gated", "relevance", "coverage", "scalarized"]),
    fill=st.sampled_from(["coverage", "index"]),
    target=st.sampled_from(["size", "final"]),
    passes=st.sampled_from([1, 2, None]),
)
def test_records_agree_to_the_bit(problem, criterion, fill, target, passes):
    """Ties, saturation, no query, nothing eligible, budgets beyond the image: order, curves and swaps."""
    found, expected = (
        stacktok.select_from_affinities(
            problem["a_qv"],
            problem["a_vv"],
            problem["budget"],
            eligible=problem["eligible"],
            strictness=problem["strictness"],
            relevance_depth=problem["depth"],
            swap_passes=passes,
            criterion=criterion,
            fill=fill,
            target=target,
            alpha=0.3,
            backend=backend,
        )
        for backend in ("triton", "reference")
    )
    assert found == expected


@pytest.mark.parametrize(("case", "depth"), [(focused(0, n=70, m=20), 1), (focused(1), 4), (affinities(90, 7), None)])
def test_the_gate_closes_and_opens_again_alike(case, depth):
    found, expected = (
        stacktok.select_from_affinities(*case, 24, relevance_depth=depth, strictness=0.97, backend=backend)
        for backend in ("triton", "reference")
    )
    assert found == expected
    assert {"relevance", "coverage"} <= set(found.criterion)


def test_an_image_of_several_tiles():
    rng = np.random.default_rng(0)
    matrix = (rng.integers(0, 64, (1030, 1030)) / 64).astype(np.float32)
    found, expected = (
        stacktok.select_from_affinities(matrix[:3], matrix, 3, swap_limit=0, backend=backend)
        for backend in ("triton", "reference")
    )
    assert found == expected


def test_affinities_that_need_float64():
    rng = np.random.default_rng(0)
    a_qv, a_vv = rng.random((5, 30)), rng.random((30, 30))
    found, expected = (
        stacktok.select_from_affinities(a_qv, a_vv, 7, backend=backend) for backend in ("triton", "reference")
    )
    assert found == expected


def test_a_ragged_batch_is_one_launch(monkeypatch):
    """Sizes, queries, budgets, rules, depths, weights and kinds of entries differ from unit to unit."""
    rng, batch, expected = np.random.default_rng(3), [], []
    for seed, (n, m, k) in enumerate([(1, 0, 1), (7, 3, 7), (33, 5, 9), (20, 0, 6), (12, 2, 0), (25, 4, 8)]):
        a_qv, a_vv = (tied if seed % 2 else affinities)(n, m, seed=seed)
        eligible = np.arange(n) % 5 != 1 if n > 20 else np.ones(n, dtype=bool)
        weights = rng.choice([0.0, 0.5, 1.0], size=n) if seed in (2, 5) else None
        targets = 0.6 * np.linspace(0, n, k) ** 0.5
        rule = Rule.COVERAGE if m == 0 else Rule(seed % 4)
        problem = Problem((a_vv, eligible), a_qv, targets, rule, (1, 2, None)[seed % 3], 0.3, weights)
        ours, theirs = run(problem)
        batch.append(ours)
        expected.append(theirs)
    launches, kernel = [], facility_location.facility_location

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(facility_location, "facility_location", Counted())
    found = kernels.greedy(batch)
    assert launches == [(6,)]
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", list(Rule))
def test_weights_count_under_every_rule(rule):
    a_qv, a_vv = focused(4, n=24, m=9)
    weights = np.random.default_rng(1).choice([0.25, 1.0, 1.5], size=len(a_vv))
    targets = 0.9 * np.linspace(0, len(a_vv), 8) ** 0.5
    ours, expected = run(Problem((a_vv, np.ones(24, dtype=bool)), a_qv, targets, rule, 2, 0.5, weights))
    assert same(kernels.greedy([ours])[0], expected)


@pytest.mark.parametrize("allocation", ["shared", "uniform", "proportional"])
def test_crops_that_share_a_budget(allocation):
    crops = [(*focused(seed, n=16 + 3 * seed, m=5), None) for seed in range(3)]
    found, expected = (
        stacktok.select_crops_from_affinities(crops, 14, allocation=allocation, backend=backend)
        for backend in ("triton", "reference")
    )
    assert found == expected


def test_the_merge_of_crops_is_algorithm_2():
    """Two images in one launch, with identical crops, which tie, and crops that run dry."""
    pairs = [focused(0, n=9, m=4), focused(0, n=9, m=4), affinities(4, 4, seed=2), affinities(6, 4, seed=3)]
    both = [run(Problem((v, np.ones(len(v), bool)), q, np.zeros(min(6, len(v))), Rule.GATED)) for q, v in pairs]
    steps = kernels.greedy([ours for ours, _ in both])
    images = [
        kernels.Runs(steps[:3], [(4, 9), (4, 9), (4, 4)], 13),
        kernels.Runs(steps[3:], [(4, 6)], 5),
    ]
    expected = [
        reference.allocate(
            [reference.nominee_gains(host, 4, len(v)) for (_, host), (_, v) in own],
            budget,
        )[0]
        for own, budget in (
            (list(zip(both[:3], pairs[:3], strict=True)), 13),
            (list(zip(both[3:], pairs[3:], strict=True)), 5),
        )
    ]
    for (winners, sizes), want in zip(kernels.allocate(images), expected, strict=True):
        assert winners.tolist() == want.tolist()
        assert sizes.tolist() == np.bincount(want, minlength=len(sizes)).tolist()


def test_retained_sets_are_marked_and_small_ones_refined_in_one_launch():
    sets, expected = [], []
    for seed, size in enumerate((4, 9, 0, 12)):
        a_qv, a_vv = tied(12, 3, seed=seed)
        eligible = np.ones(12, dtype=bool)
        order = np.random.default_rng(seed).permutation(12)[:size].astype(np.int64)
        targets = np.linspace(0, 2, size + 1)
        state = kernels.precompute(tensor(a_vv), tensor(eligible))
        sets.append(kernels.Retained(state, tensor(a_qv), tensor(order), torch.tensor([size]), tensor(targets), 1, 12))
        small = 0 < size <= 8
        expected.append(
            reference.refine(a_vv, a_qv, order, eligible, 1, float(targets[size]), 1e-6, 2)
            if small
            else (np.sort(order), [])
        )
    found = kernels.refine(sets, 8, 1e-6, 2)
    for refined, (indices, swaps) in zip(found, expected, strict=True):
        assert np.flatnonzero(refined.mask.numpy()).tolist() == indices.tolist()
        assert int(refined.accepted) == len(swaps)
        exchanges, objectives = (values[: len(swaps)].tolist() for values in (refined.exchanges, refined.objectives))
        assert [(*a, *b) for a, b in zip(exchanges, objectives, strict=True)] == [tuple(swap) for swap in swaps]
    assert any(swaps for _, swaps in expected)


def test_max_min_of_several_sets():
    rng = np.random.default_rng(0)
    distances, candidates, sizes = [], [], []
    for n in (1, 6, 15):
        distance = rng.integers(0, 6, (n, n)) / 8
        distances.append(np.maximum(distance, distance.T).astype(np.float32))
        candidates.append(np.arange(n) % 4 != 1)
        sizes.append(max(1, n // 3))
    found = kernels.pick_max_min(list(map(tensor, distances)), list(map(tensor, candidates)), sizes)
    for order, *arguments in zip(found, distances, candidates, sizes, strict=True):
        assert order.tolist() == max_min(*arguments).tolist()


def test_determinantal_greedy_of_several_sets():
    """More picks than dimensions: the last ones are spanned already, and the lowest index fills."""
    rng = np.random.default_rng(0)
    similarities, weights, candidates, sizes = [], [], [], []
    for n in (1, 8, 22):
        rows = rng.normal(size=(n, 5))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        similarity = (rows @ rows.T).astype(np.float32)
        np.fill_diagonal(similarity, 1.0)
        similarities.append(similarity)
        weights.append(rng.random(n) + 0.1)
        candidates.append(np.arange(n) % 6 != 2)
        sizes.append(max(1, n // 2))
    found = kernels.pick_determinantal(
        *(list(map(tensor, arrays)) for arrays in (similarities, weights, candidates)), sizes, ZERO
    )
    for order, *arguments in zip(found, similarities, weights, candidates, sizes, strict=True):
        assert order.tolist() == greedy_map(*arguments, ZERO).tolist()


def test_features_select_as_on_the_host():
    """Repeated tokens too, whose affinities must be equal to the bit."""
    x, z, q = features(20, 3)
    x[12:16], z[12:16] = x[2:6], z[2:6]
    found, expected = (stacktok.select(x, z, q, 8, backend=backend) for backend in ("triton", "cpu"))
    assert found == expected
    # What a prepared image shows are arrays, whatever holds them.
    images = [stacktok.prepare(x, z, backend=backend) for backend in ("triton", "cpu")]
    assert all(isinstance(image.vision_affinity, np.ndarray) for image in images)
    assert np.array_equal(images[0].vision_affinity, images[1].vision_affinity)
    assert np.array_equal(images[0].query_affinity(q), images[1].query_affinity(q))


def test_tensors_of_the_cpu_are_refused_where_nothing_interprets():
    code = "import numpy as np, stacktok; a = np.eye(3); stacktok.select_from_affinities(a, a, 2, backend='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert 'ValueError: backend="triton" runs on GPUs and the tensors lie on the CPU' in ran.stderr


def test_a_kernel_that_spills_is_noticed():
    """With a quarter of its registers facility location must spill; with its own it does not."""
    code = """
from benchmarks.kernel_resources import TARGETS, compile_kernel
print(*(compile_kernel("facility location", TARGETS["sm_80"], **o).spilled for o in ({}, {"maxnreg": 32})))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    own, starved = map(int, ran.stdout.split())
    assert own == 0 < starved
