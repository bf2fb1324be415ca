"""One worker for one model: a bounded queue in which a page's newer request takes the place of its older ones."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

# Pages whose latest serial is remembered; an older page than these starts over.
_PAGES = 256


class Superseded(Exception):  # noqa: N818 - not an error: the page itself asked for something newer
    """The page that asked has asked for something newer."""


class Late(Exception):  # noqa: N818 - an answer to a person
    """The job was not done within the deadline."""


class Busy(Exception):  # noqa: N818 - a state of the server, which passes
    """The queue is full."""


@dataclass(eq=False)
class Job:
    """One piece of work for the model, and whether its page still wants it."""

    page: str
    serial: int
    work: Callable[[Job], Any]
    future: Future[Any] = field(default_factory=Future)
    started: bool = False
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        """Whether the page has asked for something newer."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Stop here if nobody wants the result any more."""
        if self.cancelled:
            raise Superseded

    def cancel(self) -> None:
        """Say that nobody wants the result any more."""
        self._cancelled.set()

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless there is an answer already."""
        # A future of asyncio never ends with StopIteration, and its loop does not survive what ends a program.
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            cause, error = error, RuntimeError(f"the model's code raised {type(error).__name__}: {error}")
            error.__cause__ = cause
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def succeed(self, result: Any) -> None:
        """Answer with a result, unless there is an answer already."""
        with suppress(InvalidStateError):
            self.future.set_result(result)


class Jobs:
    """Runs jobs one after the other on a thread of its own.

    Parameters
    ----------
    waiting
        Jobs that may wait; one more is refused.
    deadline
        Seconds after which a job that is not done, waiting included, ends with `Late`. One that runs is told to stop;
        until it does, those behind it wait, each no longer than its own deadline.
    """

    def __init__(self, waiting: int = 16, deadline: float = 120) -> None:
        if waiting < 1:
            raise ValueError(f"waiting={waiting!r} must be at least 1")
        if not 0 < deadline <= threading.TIMEOUT_MAX:
            raise ValueError(f"deadline={deadline!r} is not a time; give seconds greater than 0")
        self.waiting, self.deadline = waiting, deadline
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._change = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="stacktok-view", daemon=True)
        self._thread.start()

    def submit(self, page: str, serial: int, work: Callable[[Job], T]) -> Future[T]:
        """Queue a job.

        Parameters
        ----------
        page
            Which page asks.
        serial
            The page's count of its states: jobs of a lower serial of the same page are cancelled, and refused when
            they come late. Jobs of one serial belong together.
        work
            Called with the job, which it may ask whether it is still wanted.
        """
        job = Job(page, serial, work)
        with self._change:
            if not self._open:
                raise Busy
            if serial < self._latest.get(page, serial):
                raise Superseded
            self._latest[page] = serial
            self._latest.move_to_end(page)
            while len(self._latest) > _PAGES:
                self._latest.popitem(last=False)
            for old in [old for old in self._queue if old.page == page and old.serial < serial]:
                self._queue.remove(old)
                old.cancel()
                old.fail(Superseded())
            running = self._running
            if running is not None and running.page == page and running.serial < serial:
                running.cancel()
            if len(self._queue) >= self.waiting:
                raise Busy
            self._queue.append(job)
            self._change.notify()
        timer = threading.Timer(self.deadline, self._expire, [job])
        timer.daemon = True
        timer.start()
        job.future.add_done_callback(lambda _: timer.cancel())
        return job.future

    def _expire(self, job: Job) -> None:
        job.cancel()
        with self._change:
            if job in self._queue:
                self._queue.remove(job)
        doing = "worked on this" if job.started else "been busy with other requests"
        job.fail(Late(f"The model has {doing} for {self.deadline:g} s without an answer."))

    def close(self, patience: float = 2) -> None:
        """Stop the running job, drop the others, end the thread.

        Parameters
        ----------
        patience
            Seconds to wait for the running job; one that does not stop is left to end with the process.
        """
        with self._change:
            self._open = False
            for job in self._queue:
                job.cancel()
                job.fail(Superseded())
            self._queue.clear()
            if self._running is not None:
                self._running.cancel()
                self._running.fail(Superseded())
            self._change.notify()
        self._thread.join(patience)

    def _work(self) -> None:
        while True:
            with self._change:
                while self._open and not self._queue:
                    self._change.wait()
                if not self._queue:
                    return
                job = self._running = self._queue.popleft()
                job.started = True
            try:
                job.check()
                result = job.work(job)
                job.check()
            # Whatever went wrong belongs to the one who asked; the worker goes on.
            except BaseException as error:
                job.fail(error)
            else:
                job.succeed(result)
            with self._change:
                self._running = None
