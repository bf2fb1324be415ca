"""Compiled functions, cached on disk per numba version.

numba names its cache files by function and Python version alone, so that environments with different numba versions
overwrite each other's. Here every version has a folder of its own; inside it numba tells processors apart.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, config

_log = logging.getLogger("stacktok")


def compiled(function: Callable[..., Any]) -> Any:
    """Compile to run without the GIL; the result is kept on disk where that is possible."""
    dispatcher = numba.njit(nogil=True)(function)
    if config.DISABLE_JIT:
        return dispatcher
    try:
        dispatcher._cache = _Cache(function)
    except (RuntimeError, OSError):
        _warn("no folder can be written to cache compiled code; every process compiles the selector again")
    return dispatcher


@cache
def _warn(message: str) -> None:
    """Log a message, once per process."""
    _log.warning(message)


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """The first folder that holds code of this file or that can be written to."""

    def __init__(self, function: Callable[..., Any], source: Path, folder: Path) -> None:
        self._py_file, self._folder = source, folder
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> _Locator | None:
        file = Path(source)
        shared = config.CACHE_DIR or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "stacktok"
        )
        folders = [file.parent / "__pycache__", Path(shared) / cls.get_suitable_cache_subpath(source)]
        for folder in reversed(folders) if config.CACHE_DIR else folders:
            locator = cls(function, file, folder / f"numba-{numba.__version__}")
            try:
                if not any(locator._folder.glob("*.nbi")):
                    locator.ensure_cache_path()
                return locator
            except OSError:
                continue
        return None

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return hashlib.sha256(self._py_file.read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Impl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """numba's cache, except that neither damaged files nor a full disk can break a run."""

    _impl_class = _Impl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            _warn(f"compiled code in {self.cache_path} is damaged ({type(error).__name__}) and ignored")
            with suppress(OSError):
                self.flush()
        if found is None:
            _warn("compiling the selector for this machine, which takes some seconds; later runs load it from disk")
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(f"compiled code cannot be saved in {self.cache_path} ({error}); the next process compiles it again")
