"""Work beside other work, on the threads that torch keeps.

The threads of torch's OpenMP wait for the next operation by spinning, for milliseconds: threads of our own would have
to share their cores. So tasks are handed to those very threads, by the entry point that a compiled parallel region
calls (`GOMP_parallel` in "The libgomp ABI" of GCC's manual; LLVM's and Intel's runtimes have it too). Where torch's
runtime lacks it, threads are started.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _parallel() -> Callable[..., None] | None:
    """Runs a region once in every thread of a team, if the runtime that torch has loaded can."""
    try:
        region: Any = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    region.restype = None
    region.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run: Callable[..., None] = region
    return run


@cache
def parallel_address() -> int:
    """Where `GOMP_parallel` is, for compiled code; 0 if there is none."""
    parallel = _parallel()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def beside(tasks: Iterable[Callable[[], object]]) -> None:
    """Run tasks beside each other on as many threads as torch uses; an error in one is raised when all have ended.

    Tasks gain by it as far as they run without the interpreter's lock.
    """
    waiting, failed = list(tasks)[::-1], []
    workers = min(torch.get_num_threads(), len(waiting))

    def work(_: object = None) -> None:
        while waiting:
            try:
                task = waiting.pop()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:
                failed.append(error)

    parallel = _parallel()
    if workers < 2:
        work()
    elif parallel is not None:
        parallel(_Region(work), None, workers, 0)
    else:
        with ThreadPoolExecutor(workers - 1) as pool:
            for _ in range(workers - 1):
                pool.submit(work)
            work()
    if failed:
        raise failed[0]


def over_ranges(count: int, function: Callable[..., object], *arguments: object) -> None:
    """Run ``function(*arguments, first, last)`` on `ranges` of 0 to ``count`` beside each other, one per thread."""
    beside(partial(function, *arguments, *ends) for ends in ranges(count, torch.get_num_threads()))


def ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """0 to ``count`` in parts that begin at multiples of four."""
    ends = [*(count * part // parts // 4 * 4 for part in range(parts)), count]
    return list(pairwise(ends))
