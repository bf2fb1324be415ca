"""Cells over the workers of a Ray cluster; needs the extra ``ray``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stacktok.evaluation.cells import Cell, Outcome
from stacktok.evaluation.plan import Plan
from stacktok.evaluation.run import RETRIES, LocalRunner, find_cell


def run_on_worker(plan: dict[str, Any], key: str, device: str | None) -> dict[str, Any]:
    """Run one cell in a Ray worker; its files are its own."""
    cell = find_cell(plan, key)
    with tempfile.TemporaryDirectory() as folder:
        ((_, result, error),) = LocalRunner(Path(folder), device)([cell])
    if result is None:
        raise error or ValueError("a cell on Ray gave no result; start it outside torchrun")
    return result


def over_ray(
    plan: Plan,
    cells: Sequence[Cell],
    *,
    address: str,
    device: str | None = None,
    gpus: float = 0,
    work: Callable[[dict[str, Any], str, str | None], dict[str, Any]] = run_on_worker,
) -> Iterator[Outcome]:
    """Yield cells with their results as workers finish them.

    A worker that dies has its cell done again elsewhere; a cell's error is not retried. The driver alone writes
    results, one file per cell, so nothing can be counted twice.

    Parameters
    ----------
    plan, cells
        The plan, and those of its cells that are to be run.
    address
        Of the cluster; "local" starts one on this machine.
    device, gpus
        Where models run, and how many GPUs a cell takes.
    work
        What a worker does with a cell: plan, key and device to result.
    """
    with cluster(address) as ray:
        # A worker ends with its cell, so that no memory of a GPU outlives it.
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, max_calls=1)(work)
        values = plan.model_dump(mode="json")
        waiting = {task.remote(values, cell.key, device): cell for cell in cells}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                cell = waiting.pop(reference)
                try:
                    yield cell, ray.get(reference), None
                except ray.exceptions.RayTaskError as error:
                    yield cell, None, error.cause if isinstance(error.cause, Exception) else error
                except ray.exceptions.RayError as error:
                    yield cell, None, error


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster while the block lasts; a connection that is there already is left alone.

    Parameters
    ----------
    address
        Of the cluster; "local" starts one on this machine.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--ray needs the package ray: pip install 'stacktok[ray]'") from None

    started = not ray.is_initialized()
    if started:
        # Without an address Ray joins any cluster that runs on this machine; by the name "local" it starts one.
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address == "local" else None)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()
