"""The queue before the model: bounded, and a page's newer request cancels its older ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from stacktok.view.jobs import Busy, Job, Jobs, Late, Superseded
from tests import coroutines


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs(waiting=2)
    yield made
    made.close()


class Blocker:
    """A job that holds the worker until it is let go, or until its page wants something newer."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, job: Job) -> str:
        self.started.set()
        while not self.go.wait(0.005):
            job.check()
        return "done"


def hold(jobs: Jobs, page: str = "holder", serial: int = 0) -> tuple[Blocker, object]:
    blocker = Blocker()
    future = jobs.submit(page, serial, blocker)
    assert blocker.started.wait(30)
    return blocker, future


def test_results_come_back_and_errors_belong_to_the_one_who_asked(jobs: Jobs) -> None:
    def wrong(job: Job) -> None:
        raise ValueError("no such picture")

    failed = jobs.submit("a", 0, wrong)
    assert jobs.submit("a", 0, lambda job: 7).result(30) == 7
    with pytest.raises(ValueError, match="no such picture"):
        failed.result(30)


def test_a_newer_request_cancels_what_the_same_page_has_waiting_and_running(jobs: Jobs) -> None:
    _, running = hold(jobs, "page", 1)
    waiting = jobs.submit("page", 1, lambda job: "old")
    newer = jobs.submit("page", 2, lambda job: "new")
    for old in (running, waiting):
        with pytest.raises(Superseded):
            old.result(30)  # type: ignore[attr-defined]
    assert newer.result(30) == "new"


def test_other_pages_and_requests_of_the_same_state_are_left_alone(jobs: Jobs) -> None:
    blocker, running = hold(jobs, "page", 1)
    same = jobs.submit("page", 1, lambda job: "same")
    other = jobs.submit("other", 9, lambda job: "other")
    blocker.go.set()
    assert [running.result(30), same.result(30), other.result(30)] == ["done", "same", "other"]  # type: ignore[attr-defined]


def test_a_request_that_comes_late_is_refused(jobs: Jobs) -> None:
    assert jobs.submit("page", 5, lambda job: 1).result(30) == 1
    with pytest.raises(Superseded):
        jobs.submit("page", 4, lambda job: 1)


def test_the_queue_is_bounded(jobs: Jobs) -> None:
    blocker, _ = hold(jobs)
    for page in "ab":
        jobs.submit(page, 0, lambda job: None)
    with pytest.raises(Busy):
        jobs.submit("c", 0, lambda job: None)
    blocker.go.set()


def test_closing_drops_what_waits() -> None:
    jobs = Jobs()
    _, running = hold(jobs)
    waiting = jobs.submit("a", 0, lambda job: None)
    jobs.close()
    for future in (running, waiting):
        with pytest.raises(Superseded):
            future.result(30)  # type: ignore[attr-defined]
    with pytest.raises(Busy):
        jobs.submit("a", 1, lambda job: None)


@pytest.mark.parametrize("error", [StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_that_a_waiting_coroutine_cannot_take_become_ones_that_it_can(
    jobs: Jobs, error: type[BaseException]
) -> None:
    def wrong(job: Job) -> None:
        raise error

    async def ask() -> None:
        await asyncio.wait_for(asyncio.wrap_future(jobs.submit("a", 0, wrong)), 30)

    with pytest.raises(RuntimeError, match=error.__name__):
        coroutines.run(ask())
    assert jobs.submit("a", 0, lambda job: 7).result(30) == 7


def test_a_job_that_is_not_done_in_time_ends_and_so_does_one_behind_it() -> None:
    jobs = Jobs(deadline=0.1)
    go = threading.Event()
    running = jobs.submit("a", 0, lambda job: go.wait(30))
    waiting = jobs.submit("b", 0, lambda job: None)
    with pytest.raises(Late, match=r"worked on this for 0\.1 s"):
        running.result(30)
    with pytest.raises(Late, match=r"busy with other requests for 0\.1 s"):
        waiting.result(30)
    go.set()
    jobs.close()


def test_closing_does_not_wait_for_a_job_that_never_stops() -> None:
    jobs = Jobs()
    go = threading.Event()
    started = threading.Event()

    def stuck(job: Job) -> None:
        started.set()
        go.wait(60)

    running = jobs.submit("a", 0, stuck)
    assert started.wait(30)
    jobs.close(patience=0.05)
    with pytest.raises(Superseded):
        running.result(0)
    go.set()


def test_an_answer_that_nobody_waits_for_any_more_does_not_end_the_worker(jobs: Jobs) -> None:
    blocker, running = hold(jobs)
    assert running.cancel()  # type: ignore[attr-defined]
    blocker.go.set()
    assert jobs.submit("a", 0, lambda job: 7).result(30) == 7
