"""Compiled functions, kept on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba

_log = logging.getLogger("stacktok")
_said_why = threading.Event()
_said_uncached = threading.Event()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile, with the result kept on disk where there is a place for it; ``options`` are numba's."""
    return _cached(partial(numba.njit, nogil=True, **options), function)


def _cached(compiler: Callable[..., Any], function: Callable[..., Any]) -> Any:
    try:
        return compiler(cache=True)(function)
    except RuntimeError:
        if not _said_uncached.is_set():
            _said_uncached.set()
            _log.warning("no folder can be written to keep compiled code in; every process compiles the selector anew")
        return compiler()(function)


class Kernel:
    """A compiled function whose first call, if it takes noticeably long, says why; one such word per process."""

    patience = 0.5

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function: Any = function if hasattr(function, "py_func") else compiled(function, **options)
        self._warm = False

    def __call__(self, *arguments: Any) -> Any:
        if self._warm:
            return self._function(*arguments)
        # What was found on disk is not compiled, however slowly a busy machine loads it.
        with _patience(self.patience, lambda: bool(sum(self._function.stats.cache_misses.values()))):
            result = self._function(*arguments)
        self._warm = True
        return result


class Region:
    """A function of an address, compiled to be called from any thread; see `stacktok.kernels.team`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiling = threading.Lock()
        self._compiled: Any = None
        self._address = 0

    def address(self) -> int:
        """Where the compiled function is."""
        if not self._address:
            with self._compiling, _patience(Kernel.patience, lambda: True):
                if not self._address:
                    signature = numba.types.void(numba.types.voidptr)
                    self._compiled = _cached(partial(numba.cfunc, signature, nopython=True), self._function)
                    self._address = self._compiled.address
        return self._address


@contextmanager
def _patience(seconds: float, compiles: Callable[[], bool]) -> Iterator[None]:
    """Say why it takes so long if it does, once per process, provided that it is compiling."""

    def say_why() -> None:
        if not _said_why.is_set() and compiles():
            _log.warning("compiling the selector for this machine; this happens once, later runs load it from disk")
            _said_why.set()

    notice = threading.Timer(seconds, say_why)
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
