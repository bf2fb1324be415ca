"""Identical results from every backend, and a light import."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stacktok
from stacktok.kernels import Rule, compiled, cpu
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


def test_an_update_that_is_split_over_cores_changes_nothing(monkeypatch):
    """Large images hand their updates to threads; a small one is made to do so after every step."""
    a_qv, a_vv = focused(0, n=200, m=40)
    expected = stacktok.select_from_affinities(a_qv, a_vv, 80, strictness=0.95)
    large = np.random.default_rng(0).random((2100, 2100)).astype(np.float32)
    assert large.size >= cpu._WORTH_SPLITTING
    runs = [
        stacktok.select_from_affinities(large[:3], large, 3, swap_limit=0, backend=backend)
        for backend in ("reference", "cpu")
    ]
    assert runs[0] == runs[1]
    extend, over_ranges, splits = cpu._extend, cpu.over_ranges, []

    def one_step(*arguments):
        *fixed, start, _ = arguments
        return extend(*fixed, start, start + 1)

    def counted(*arguments):
        splits.append(arguments)
        over_ranges(*arguments)

    monkeypatch.setattr(cpu, "_extend", one_step)
    monkeypatch.setattr(cpu, "over_ranges", counted)
    assert stacktok.select_from_affinities(a_qv, a_vv, 80, strictness=0.95) == expected
    assert len(splits) == 2 * 79


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtypes", [(np.float32,) * 3, (np.float32, np.float64, np.float32)])
def test_walks_that_are_extended_together_go_where_each_goes_alone(threads, dtypes, monkeypatch):
    """Again and again, to lengths of their own, from lengths of their own; one of another type goes by itself."""
    monkeypatch.setattr(cpu.torch, "get_num_threads", lambda: threads)
    inputs = [focused(seed, n=80 + 30 * seed, m=20) for seed in range(3)]

    def begin():
        return [
            cpu.CPU.walk(
                cpu.CPU.ground(a_vv.astype(dtype), np.arange(len(a_vv)) % 7 > 0), a_qv.astype(dtype), Rule.GATED, 2, 0.0
            )
            for (a_qv, a_vv), dtype in zip(inputs, dtypes, strict=True)
        ]

    targets = [0.9 * np.linspace(0, len(a_vv), 61) ** 0.5 for _, a_vv in inputs]
    alone, together = begin(), begin()
    for lengths in ([0, 1, 0], [1, 2, 3], [20, 2, 10], [7, 30, 10], [60, 60, 60]):
        for walk, length, aims in zip(alone, lengths, targets, strict=True):
            walk.extend(length, aims)
        cpu.CPU.extend(together, lengths, targets)
        for one, other in zip(alone, together, strict=True):
            assert other.length == one.length
            assert np.array_equal(one.picks[:, : one.length], other.picks[:, : one.length])
            assert np.array_equal(one.sums[:, : one.length + 1], other.sums[:, : one.length + 1])
    assert {len(set(walk.picks[1, :60].tolist())) for walk in alone} == {2}


def test_a_walk_that_needs_all_threads_leaves_the_team():
    a_vv = np.random.default_rng(0).random((2, 1100, 1100)).astype(np.float32)
    assert a_vv[0].size >= cpu._WORTH_SPLITTING
    runs = [
        stacktok.select_crops_from_affinities([(a[:3], a, None) for a in a_vv], 24, swap_limit=0, backend=backend)
        for backend in ("reference", "cpu")
    ]
    assert runs[0] == runs[1]
    assert {"relevance", "coverage"} == {name for crop in runs[0].crops for name in crop.criterion}


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
def test_a_depth_may_be_any_kind_of_integer(kind):
    """One that fits, although sizes computed from it would not."""
    pairs = [focused(seed, n=150, m=60) for seed in range(2)]
    runs = [
        stacktok.select_crops_from_affinities([(*pair, None) for pair in pairs], 40, relevance_depth=depth)
        for depth in (100, kind(100))
    ]
    assert runs[0] == runs[1]


def test_rules_have_one_number_each():
    assert [int(rule) for rule in Rule] == [cpu._GATED, cpu._RELEVANCE, cpu._COVERAGE, cpu._SCALARIZED]


def test_importing_stacktok_is_light():
    """No compiler, no model library; numba comes with the first selection."""
    code = "import sys, json, stacktok; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "stacktok.core.selection" in modules
    heavy = {"numba", "transformers", "matplotlib", "PIL", "typer", "rich", "pydantic", "accelerate"}
    assert heavy.isdisjoint(modules)


def test_the_first_call_that_compiles_says_why_once(caplog, monkeypatch):
    class Slow:
        """A function that is still compiling when patience ends."""

        def __init__(self, misses):
            self.stats = SimpleNamespace(cache_misses={"signature": misses})

        def __call__(self):
            compiled._said_why.wait(5 if self.stats.cache_misses["signature"] else 0.05)

    monkeypatch.setattr(compiled.Kernel, "patience", 0.0)
    monkeypatch.setattr(compiled, "_said_why", threading.Event())
    for misses, expected in ((0, 0), (1, 1), (1, 1)):
        kernel = compiled.Kernel(lambda: None)
        kernel._function = Slow(misses)
        kernel()
        kernel()
        assert len(caplog.records) == expected
    assert caplog.records[0].getMessage().startswith("compiling the selector")


def test_compiled_code_without_a_place_to_keep_it(monkeypatch, caplog):
    """A read-only installation compiles in every process, and says so once."""
    compile_now = compiled.numba.njit

    def no_place(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_now(**options)

    monkeypatch.setattr(compiled.numba, "njit", no_place)
    monkeypatch.setattr(compiled, "_said_uncached", threading.Event())
    assert compiled.compiled(lambda: 3)() == 3
    assert compiled.compiled(lambda: 4)() == 4
    assert [record.getMessage()[:22] for record in caplog.records] == ["no folder can be writt"]
