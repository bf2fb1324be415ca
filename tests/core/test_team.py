"""Compiled functions in a team of torch's threads."""

from __future__ import annotations

import numpy as np
import pytest
from numba import carray, types

from stacktok.kernels import compiled
from stacktok.kernels.compiled import Kernel, Region
from stacktok.kernels.team import count_of, count_up, memory, run_in_team
from stacktok.kernels.threads import parallel_address


@Region
def share(address):
    """Take numbers until all are taken; note how often each was, and that the other thread has been here."""
    job = carray(address, (2,), np.int64)
    numbers = carray(memory(job[0]), (job[1] + 2,), np.int64)
    count_up(numbers, job[1] + 1)
    while True:
        taken = count_up(numbers, job[1])
        if taken >= job[1]:
            return
        count_up(numbers, taken)


@Region
def meet(address):
    """Wait until as many threads as the second number says have come."""
    job = carray(address, (2,), np.int64)
    count_up(job, 0)
    while count_of(job, 0) < job[1]:
        pass


@Kernel
def run(job, parallel, region, workers):
    run_in_team(parallel, region, job, workers, ())


@Kernel
def run_on(numbers, job, parallel, region, workers):
    job[0] = numbers.ctypes.data
    job[1] = len(numbers) - 2
    run_in_team(parallel, region, job, workers, (numbers,))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_every_number_is_taken_once(workers, alone):
    for count in (0, 1, 1000):
        numbers = np.zeros(count + 2, dtype=np.int64)
        run_on(numbers, np.empty(2, np.int64), 0 if alone else parallel_address(), share.address(), workers)
        assert (numbers[:count] == 1).all()
        threads = 1 if alone or not parallel_address() else workers
        assert numbers[count + 1] == threads
        assert numbers[count] == count + threads


def test_two_threads_are_under_way_at_once():
    if not parallel_address():
        pytest.skip("this build of torch has no OpenMP runtime that can be called")
    job = np.array([0, 2])
    run(job, parallel_address(), meet.address(), 2)
    assert job[0] == 2


def test_a_region_is_compiled_once(monkeypatch):
    calls = []

    def cfunc(signature, **options):
        assert signature == types.void(types.voidptr)
        calls.append(options)
        return lambda function: type("Compiled", (), {"address": 7})

    monkeypatch.setattr(compiled.numba, "cfunc", cfunc)
    region = Region(lambda address: None)
    assert calls == []
    assert region.address() == region.address() == 7
    assert calls == [{"nopython": True, "cache": True}]
