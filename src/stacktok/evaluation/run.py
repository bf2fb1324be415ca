"""Running a plan: cell after cell here, over processes of torchrun, or over the workers of a Ray cluster."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from stacktok import embedded
from stacktok.evaluation.cells import Cell, Outcome, Results, cells_of, installed_version
from stacktok.evaluation.plan import Plan, parse_plan

WORKER = "stacktok.evaluation.worker"
"""Module that torchrun starts."""

RETRIES = 2
"""How often a cell whose worker died without a word is tried again."""


class CellError(ValueError):
    """A cell that failed; what is finished stays."""


@dataclass
class Progress:
    """How far a plan is.

    Attributes
    ----------
    total, done, skipped
        Cells of the plan; those finished now; those that were there before.
    part
        What has been measured of cells that are not finished, in cells.
    """

    total: int
    done: int = 0
    skipped: int = 0
    part: float = 0.0
    _begin: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float | None:
        """Time left, by the work done so far; None before any."""
        work = self.done + self.part
        return None if not work else (time.monotonic() - self._begin) / work * (self.total - self.skipped - work)

    @property
    def share(self) -> float:
        """Share of the plan that is done, from 0 to 1."""
        return min(1.0, (self.done + self.skipped + self.part) / max(1, self.total))

    def __str__(self) -> str:
        left = self.seconds_left()
        eta = "" if left is None else f", about {duration(left)} left"
        return f"{self.done + self.skipped} of {self.total} cells{eta}"


Report = Callable[[Progress, str], None]
Tick = Callable[[float, str], None]


def run_plan(
    plan: Plan,
    out: str | Path,
    *,
    device: str | None = None,
    processes: int = 1,
    ray: str | None = None,
    gpus: float = 0,
    keep_going: bool = False,
    report: Report = lambda progress, text: None,
) -> Results:
    """Run the cells of a plan that have no result yet.

    Parameters
    ----------
    plan
        The plan.
    out
        Folder under which the plan's own folder is made.
    device
        Where models run; None is the GPU if there is one.
    processes
        Data-parallel processes inside a cell, started with torchrun.
    ray
        Address of a Ray cluster over whose workers the cells are spread ("local" starts one here); None runs here.
    gpus
        GPUs that a cell takes on Ray.
    keep_going
        Go on with the other cells when one fails.
    report
        Callback, called on every change.
    """
    if processes < 1:
        raise ValueError(f"processes={processes} must be at least 1")
    if ray is not None and processes > 1:
        raise ValueError("processes cannot be combined with ray; give a cell one worker, or leave ray out")
    from stacktok.evaluation.lmms import check_plan

    check_plan(plan)
    cells = cells_of(plan)
    results = Results(Path(out) / plan.name)
    results.start(plan, cells)
    todo = [cell for cell in cells if not results.finished(cell)]
    progress = Progress(len(cells), skipped=len(cells) - len(todo))
    report(progress, "")
    data, journal = results.folder / "data", results.folder / "journal.jsonl"

    def tick(part: float, text: str) -> None:
        progress.part += part
        if text:
            report(progress, text)

    if ray is not None:
        from stacktok.evaluation.scale import over_ray

        finished = over_ray(plan, todo, address=ray, device=device, gpus=gpus)
    elif processes > 1:
        finished = each(todo, lambda cell: _over_torchrun(plan, cell, data, device, processes), tick)
    else:
        finished = LocalRunner(data, device, journal)(todo, tick)
    failed: list[str] = []
    for cell, result, error in finished:
        if result is None:
            if not keep_going:
                raise CellError(f"{cell}: {error}") from error
            failed.append(f"{cell}: {error}")
            continue
        results.write(cell, result)
        progress.done += 1
        progress.part = max(0.0, progress.part - 1)
        report(progress, f"{cell}: {result['score']:.2f}")
    if failed:
        raise CellError(f"{len(failed)} of {len(cells)} cells failed; the first: {failed[0]}")
    journal.unlink(missing_ok=True)
    return results


def each(cells: Sequence[Cell], run: Callable[[Cell], dict[str, Any] | None], tick: Tick) -> Iterator[Outcome]:
    """Run cells one by one."""
    for cell in cells:
        tick(0, f"{cell} ...")
        try:
            yield cell, run(cell), None
        except Exception as error:  # one cell's failure is that cell's, whatever it is
            yield cell, None, error


class LocalRunner:
    """Runs cells in this process and keeps the model while cells of the same one follow each other.

    Parameters
    ----------
    data
        Folder for the files of tasks on scenes.
    device
        Where models run.
    journal
        File for what the engine loop has measured of unfinished cells; None keeps nothing.
    """

    def __init__(self, data: Path, device: str | None = None, journal: Path | None = None) -> None:
        self.data, self.device, self.journal = data, device, journal
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, cells: Sequence[Cell], tick: Tick = lambda part, text: None) -> Iterator[Outcome]:
        """The results of cells: metrics, score, columns of items, replicates, and how they were obtained.

        A result is None on all processes of torchrun but the first.
        """
        for (_, name), alike in groupby(cells, key=lambda cell: (cell.model.name, cell.settings["engine"]["name"])):
            batch = list(alike)
            if name == "lmms-eval":
                yield from each(batch, self._run_cell, tick)
                continue
            try:
                from stacktok.evaluation.scenes_loop import Journal, run_cells

                answerer = self._answerer(batch[0])
                for cell, result, error in run_cells(batch, answerer, Journal(self.journal), tick):
                    yield cell, None if result is None else {**result, **_provenance(answerer)}, error
            except Exception as error:  # such as a checkpoint that cannot be loaded
                for cell in batch:
                    yield cell, None, error

    def _run_cell(self, cell: Cell) -> dict[str, Any] | None:
        from stacktok.evaluation import lmms

        answerer = self._answerer(cell)
        begin = time.perf_counter()
        result = lmms.run_cell(cell, answerer, self.data, self.device)
        if result is None:
            return None
        return {**result, "seconds": time.perf_counter() - begin, **_provenance(answerer)}

    def _answerer(self, cell: Cell) -> Any:
        settings = cell.settings
        which = (settings["pretrained"], settings["checkpoint"], settings["dtype"])
        if self._loaded is None or self._loaded[0] != which:
            from stacktok.evaluation.answering import Answerer

            # The old model goes before the new one comes.
            self._loaded = None
            path, device = embedded.resolve(settings["pretrained"]), self.device
            if "LOCAL_RANK" in os.environ:
                from stacktok.evaluation.lmms_model import own_device

                device = own_device(self.device)
            self._loaded = which, Answerer(path, dtype=settings["dtype"], device=device)
        return self._loaded[1]


def _provenance(answerer: Any) -> dict[str, Any]:
    names = ("torch", "transformers", "lmms-eval", "stacktok")
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": str(next(answerer.model.parameters()).device),
        "machine": platform.machine(),
        "versions": {name: installed_version(name) for name in names},
    }


def _over_torchrun(plan: Plan, cell: Cell, data: Path, device: str | None, processes: int) -> dict[str, Any]:
    """A cell in several processes that share its items; tried again if they die without a word."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    for attempt in range(RETRIES + 1):
        with tempfile.TemporaryDirectory() as folder:
            order, answer = Path(folder) / "order.json", Path(folder) / "answer.json"
            values = {"plan": plan.model_dump(mode="json"), "key": cell.key, "data": str(data), "device": device}
            order.write_text(json.dumps(values), encoding="utf-8")
            worker = ["-m", WORKER, str(order), str(answer)]
            ended = subprocess.run([*command, *worker], capture_output=True, text=True, check=False)
            if answer.is_file():
                result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
                if "error" in result:
                    raise CellError(result["error"])
                return result
        if attempt == RETRIES:
            last = " ".join(ended.stderr.strip().splitlines()[-1:])
            raise CellError(f"its processes died {attempt + 1} times without a result; last line: {last}")
    raise AssertionError("unreachable")


def find_cell(plan_values: dict[str, Any], key: str) -> Cell:
    """The cell of a key, made again from its plan, as a worker on another machine does."""
    for cell in cells_of(parse_plan(plan_values)):
        if cell.key == key:
            return cell
    raise ValueError(
        f"no cell of the plan has the key {key} here; use the same versions and checkpoints on all machines"
    )


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Refuse a second run into a folder at the same time."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder} is being written by another run; wait for it, or give another --out") from None
        yield


def duration(seconds: float) -> str:
    """A time for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
