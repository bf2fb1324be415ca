"""Compiled functions, kept on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba

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
