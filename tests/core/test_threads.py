"""Tasks beside each other on torch's threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch

from stacktok.kernels import threads
from stacktok.kernels.threads import beside, over_ranges


@pytest.fixture(params=["torch's threads", "threads of our own"])
def runtime(request, monkeypatch):
    if request.param == "threads of our own":
        monkeypatch.setattr(threads, "_parallel", lambda: None)
    elif threads._parallel() is None:
        pytest.skip("this build of torch has no OpenMP runtime that can be called")


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_runs_once(workers, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    done = []
    for count in (0, 1, 2, 7):
        done.clear()
        beside([lambda number=number: done.append(number) for number in range(count)])
        assert sorted(done) == list(range(count))


@pytest.mark.usefixtures("runtime")
def test_two_tasks_are_under_way_at_once(monkeypatch):
    """Each waits for the other: in turn they would wait for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    meeting = threading.Barrier(2, timeout=60)
    beside([meeting.wait, meeting.wait])


@pytest.mark.usefixtures("runtime")
def test_an_error_in_a_task_reaches_the_caller_after_the_others_have_ended(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    done = []

    def broken():
        raise KeyError("this one")

    with pytest.raises(KeyError, match="this one"):
        beside([lambda: done.append(1), broken, lambda: done.append(2), lambda: done.append(3)])
    assert sorted(done) == [1, 2, 3]


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 8, 37])
def test_ranges_cover_everything_once_and_begin_at_multiples_of_four(workers, count, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    seen = []
    over_ranges(count, lambda name, first, last: seen.append((name, first, last)), "a")
    assert {name for name, _, _ in seen} == {"a"}
    assert sorted(i for _, first, last in seen for i in range(first, last)) == list(range(count))
    assert all(first % 4 == 0 for _, first, _ in seen)


@pytest.mark.usefixtures("runtime")
def test_tasks_may_have_tasks_and_use_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    a = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    found = np.zeros((3, 200, 200), dtype=np.float32)

    def inner(i, first, last):
        found[i, first:last] = (a[first:last] @ a.T).numpy()

    beside([lambda i=i: over_ranges(200, inner, i) for i in range(3)])
    np.testing.assert_allclose(found, np.broadcast_to((a @ a.T).numpy(), found.shape), atol=1e-3)


def test_callers_in_several_threads_do_not_disturb_each_other():
    results = [[] for _ in range(4)]

    def call(mine):
        for number in range(50):
            beside([partial(mine.append, number), partial(mine.append, -number)])

    callers = [threading.Thread(target=call, args=(mine,)) for mine in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for mine in results:
        assert sorted(mine) == sorted([*range(50), *(-number for number in range(50))])


def test_a_forked_child_can_select():
    """OpenMP's threads do not survive a fork; a child that limits torch to one thread, as data loaders do, selects."""
    code = """
import os, sys, numpy as np, torch, stacktok
x = np.random.default_rng(0).standard_normal((600, 2048)).astype(np.float32)
here = stacktok.select(x, x, x[:3], 9).indices.tolist()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if stacktok.select(x, x, x[:3], 9).indices.tolist() == here else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
