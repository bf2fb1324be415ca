"""Compiled functions, kept on disk, and threads to run them beside each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import torch

_log = logging.getLogger("stacktok")
_said_why = threading.Event()
_said_uncached = threading.Event()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile, with the result kept on disk where there is a place for it; ``options`` are numba's."""
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        if not _said_uncached.is_set():
            _said_uncached.set()
            _log.warning("no folder can be written to keep compiled code in; every process compiles the selector anew")
        return numba.njit(nogil=True, **options)(function)


class Kernel:
    """A compiled function whose first call, if it takes noticeably long, says why; one such word per process."""

    patience = 0.5

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function = compiled(function, **options)
        self._warm = False

    def __call__(self, *arguments: Any) -> Any:
        if self._warm:
            return self._function(*arguments)
        notice = threading.Timer(self.patience, self._say_why)
        notice.daemon = True
        notice.start()
        try:
            return self._function(*arguments)
        finally:
            notice.cancel()
            self._warm = True

    def _say_why(self) -> None:
        # What was found on disk is not compiled, however slowly a busy machine loads it.
        if not _said_why.is_set() and sum(self._function.stats.cache_misses.values()):
            _log.warning("compiling the selector for this machine; this happens once, later runs load it from disk")
            _said_why.set()


def helpers() -> ThreadPoolExecutor:
    """Threads beside the calling one; none is started before it has something to do."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))


def over_ranges(pool: ThreadPoolExecutor, count: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Run ``function(*arguments, first, last)`` on ranges of 0 to ``count`` beside each other, one range per core.

    Ranges begin at multiples of four.
    """
    workers = torch.get_num_threads()
    ends = [*(count * w // workers // 4 * 4 for w in range(workers)), count]
    parts = [pool.submit(function, *arguments, *ends[w : w + 2]) for w in range(1, workers)]
    function(*arguments, *ends[:2])
    for part in parts:
        part.result()
