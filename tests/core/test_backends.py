"""Identical results from every backend, and a light import."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.core import greedy, reference
from stacktok.kernels import Problem, Rule, cpu
from tests.core import naive
from tests.core.cases import affinities, focused, problems, tied


@given(
    problem=problems(max_n=30, max_m=8),
    criterion=st.sampled_from(["gated", "gated", "relevance", "coverage", "scalarized"]),
    fill=st.sampled_from(["coverage", "index"]),
    target=st.sampled_from(["size", "final"]),
)
def test_backends_agree_to_the_bit(problem, criterion, fill, target):
    runs = [
        stacktok.select_from_affinities(
            problem["a_qv"],
            problem["a_vv"],
            problem["budget"],
            eligible=problem["eligible"],
            strictness=problem["strictness"],
            relevance_depth=problem["depth"],
            swap_passes=None,
            criterion=criterion,
            fill=fill,
            target=target,
            alpha=0.3,
            backend=backend,
        )
        for backend in ("reference", "cpu", "auto")
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("case", [affinities(300, 12), tied(120, 7, 1), focused(0, n=200, m=40)])
@pytest.mark.parametrize("depth", [1, 4, None])
def test_backends_agree_on_larger_images(case, depth):
    runs = [
        stacktok.select_from_affinities(*case, 90, relevance_depth=depth, strictness=0.95, backend=backend)
        for backend in ("reference", "cpu")
    ]
    assert runs[0] == runs[1]


def test_float64_affinities_agree_too():
    rng = np.random.default_rng(0)
    a_qv, a_vv = rng.random((5, 40)), rng.random((40, 40))
    runs = [
        stacktok.select_from_affinities(a_qv, a_vv, 12, swap_passes=None, backend=backend)
        for backend in ("reference", "cpu")
    ]
    assert runs[0] == runs[1]


def test_an_update_that_is_split_over_threads_changes_nothing(monkeypatch):
    """Large images split their updates; a small one, which is not, is the measure."""
    large = np.random.default_rng(0).random((1100, 1100)).astype(np.float32)
    assert large.size >= cpu._WORTH_SPLITTING
    splits, split = [], cpu._run_parallel

    def counted(tasks):
        splits.append(len(tasks))
        return split(tasks)

    monkeypatch.setattr(cpu, "_run_parallel", counted)
    for threads in (1, 3):
        monkeypatch.setattr(cpu.torch, "get_num_threads", lambda threads=threads: threads)
        runs = [
            stacktok.select_from_affinities(large[:3], large, 6, swap_limit=0, backend=backend)
            for backend in ("reference", "cpu")
        ]
        assert runs[0] == runs[1]
        assert {"relevance", "coverage"} == set(runs[0].criterion)
    # Column sums, the first update of the reference chain, and that of the run.
    assert splits == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kinds", [(np.float32,) * 3, (np.float32, np.float64, np.float32)])
def test_crops_run_in_parallel_as_each_alone(threads, kinds, monkeypatch):
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: threads)
    problems = []
    for seed, kind in enumerate(kinds):
        a_qv, a_vv = focused(seed, n=80 + 30 * seed, m=20)
        state = cpu.precompute(a_vv.astype(kind), np.arange(len(a_vv)) % 7 > 0)
        targets = 0.9 * np.linspace(0, len(a_vv), 60) ** 0.5
        problems.append(Problem(state, a_qv, targets, Rule.GATED, 2))
    together = cpu.greedy(problems)
    for problem, found in zip(problems, together, strict=True):
        (alone,) = reference.greedy([problem._replace(state=(problem.state.matrix, problem.state.eligible))])
        assert all(np.array_equal(one, other) for one, other in zip(found, alone, strict=True))
        assert set(alone.criterion.tolist()) == {0, 1}


@given(problems(), st.data())
def test_weights_of_candidates_are_factors_of_their_gains(problem, data):
    """Ties, weights of 0 and gains of 0 included."""
    a_vv, n = problem["a_vv"], len(problem["a_vv"])
    k = min(problem["budget"], len(problem["eligible"]))
    weights = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=n, max_size=n)))
    eligible = np.isin(np.arange(n), problem["eligible"])
    expected = naive.weighted_coverage(a_vv, problem["eligible"], k, weights)
    for backend in (reference, cpu):
        state = backend.precompute(a_vv, eligible)
        no_query = np.zeros((0, n), dtype=a_vv.dtype)
        (steps,) = backend.greedy([Problem(state, no_query, np.zeros(k), Rule.COVERAGE, weights=weights)])
        assert steps.order.tolist() == expected
        sums = [naive.total(a_vv, expected[:t]) for t in range(k + 1)]
        assert steps.coverage.tolist() == sums


@pytest.mark.parametrize("rule", list(Rule))
def test_weights_count_under_every_rule(rule):
    a_qv, a_vv = focused(4)
    weights = np.random.default_rng(1).choice([0.25, 1.0, 1.5], size=len(a_vv))
    eligible, targets = np.ones(len(a_vv), dtype=bool), 0.9 * np.linspace(0, len(a_vv), 20) ** 0.5
    runs = [
        backend.greedy([Problem(backend.precompute(a_vv, eligible), a_qv, targets, rule, 2, 0.5, given)])[0]
        for backend, given in ((reference, weights), (cpu, weights), (cpu, None))
    ]
    assert all(np.array_equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not np.array_equal(runs[1].order, runs[2].order)


def test_an_error_in_one_crop_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: 2)
    done = []

    def broken():
        raise KeyError("this one")

    with pytest.raises(KeyError, match="this one"):
        cpu._run_parallel([lambda: done.append(1), broken, lambda: done.append(2)])
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_selects_on_one_thread_and_is_warned_on_more(threads):
    """OpenMP's threads do not survive a fork; a child that limits torch to one thread, as data loaders do, selects."""
    code = f"""
import os, sys, numpy as np, torch, stacktok
from stacktok.core.inputs import as_matrix
x = np.random.default_rng(0).standard_normal((600, 2048)).astype(np.float32)
here = stacktok.select(x, x, x[:3], 9).indices.tolist()
child = os.fork()
if child == 0:
    torch.set_num_threads({threads})
    as_matrix(x, "x")
    # On more threads what follows may never end.
    os._exit(0 if {threads} > 1 or stacktok.select(x, x, x[:3], 9).indices.tolist() == here else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("this process was forked from one that has selected tokens" in done.stderr) == (threads > 1)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
def test_a_depth_may_be_any_kind_of_integer(kind):
    """One that fits, although sizes computed from it would not."""
    pairs = [focused(seed, n=150, m=60) for seed in range(2)]
    runs = [
        stacktok.select_crops_from_affinities([(*pair, None) for pair in pairs], 40, relevance_depth=depth)
        for depth in (100, kind(100))
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("name", "device", "n", "installed", "chosen"),
    [
        ("auto", "cpu", 576, True, "cpu"),
        ("auto", "cuda", 576, True, "triton"),
        ("auto", "cuda", 576, False, "cpu"),
        ("auto", "cuda", 4097, True, "cpu"),
        ("triton", "cuda", 4096, True, "triton"),
        ("triton", "cuda", 4097, True, "cpu"),
        ("reference", "cuda", 576, True, "reference"),
    ],
)
def test_the_backend_follows_device_and_size(name, device, n, installed, chosen, monkeypatch):
    monkeypatch.setattr(greedy, "find_spec", lambda module: module if installed else None)
    assert greedy.choose_backend(name, torch.device(device), n) == chosen


def test_rules_have_one_number_each():
    assert [int(rule) for rule in Rule] == [cpu._GATED, cpu._RELEVANCE, cpu._COVERAGE, cpu._SCALARIZED]


def test_importing_stacktok_is_light():
    """No torch before a name is used, and no compiler or model library before the first selection."""
    code = """
import json, sys, stacktok
alone = sorted(sys.modules)
stacktok.select, stacktok.prepare_crops, stacktok.select_batch, stacktok.Swap
print(json.dumps([alone, sorted(sys.modules)]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    alone, used = (set(modules) for modules in json.loads(run.stdout))
    heavy = {"numba", "transformers", "matplotlib", "PIL", "typer", "rich", "pydantic", "accelerate"}
    assert "stacktok" in alone
    assert not alone & {"torch", "numpy", *heavy}
    assert {"stacktok.core.selection", "torch"} <= used
    assert not used & heavy
