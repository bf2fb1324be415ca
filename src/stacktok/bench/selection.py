"""Selection alone on one device: milliseconds, launches and bytes over image sizes, budgets and batches.

Next to it stands a loop of whole-matrix tensor operations, as MMTok is defined and usually written, and the prediction
of a cost model for two GPUs. The model is a model: its constants are data sheets' and two guesses, and it is printed so
that a measurement can contradict it.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.affinity import query_affinities
from stacktok.core.greedy import CoverageReference, GreedyRun, choose_backend
from stacktok.core.parameters import Parameters
from stacktok.core.selection import PreparedImage

QUERY_ROWS = 12


@dataclass(frozen=True)
class Size:
    """Tokens per image, kept tokens, images."""

    n: int
    k: int
    batch: int


SIZES = tuple(
    Size(n, k, batch)
    for n in (576, 1296, 2880, 4096, 16384)
    for k in (64, 160, 320, 640)
    if k < n
    for batch in (1, 8, 32)
)


@dataclass(frozen=True)
class Gpu:
    """A GPU in the cost model.

    Attributes
    ----------
    name
        Of the product.
    processors
        Streaming multiprocessors: programs that run at the same time.
    bandwidth
        Of the memory, bytes per second (data sheet).
    clock
        Cycles per second (data sheet, boost).
    doubles
        float64 additions per cycle and multiprocessor (data sheet).
    """

    name: str
    processors: int
    bandwidth: float
    clock: float
    doubles: int


GPUS = (Gpu("A100 80GB", 108, 2.04e12, 1.41e9, 32), Gpu("H100 SXM", 132, 3.35e12, 1.83e9, 64))

STEP_SECONDS = 6e-6
"""Guess: barriers and dependent loads of one step."""

BYTES_PER_CYCLE = 64
"""Guess: what one multiprocessor draws from the second-level cache per cycle."""

CHANGED_ROWS = 5
"""Rows that a whole run updates, in units of n: measured on clustered features (4.3 to 5.1)."""


def moved_bytes(size: Size, query_rows: int = QUERY_ROWS) -> int:
    """Bytes that the reference chain and the gated run of all images read and write, by count.

    Per run: rows that picks changed, a column per pick in sectors of 32 bytes, and the gains at every step; once, the
    column sums.
    """
    n, k = size.n, size.k
    run = 4 * CHANGED_ROWS * n * n + 32 * k * n + 2 * 8 * k * n
    return size.batch * (2 * run + 4 * n * n + 4 * n * query_rows * CHANGED_ROWS)


def predicted_seconds(size: Size, gpu: Gpu) -> float | None:
    """The cost model's time of one batch; None for images that one program does not run."""
    if size.n > 4096:
        return None
    waves = math.ceil(size.batch / gpu.processors)
    alone = moved_bytes(Size(size.n, size.k, 1)) / (BYTES_PER_CYCLE * gpu.clock)
    together = moved_bytes(size) / gpu.bandwidth
    sums = 2 * 2 * CHANGED_ROWS * size.n**2 / (gpu.doubles * gpu.clock)
    return waves * (2 * size.k * STEP_SECONDS + max(alone, sums)) + max(0.0, together - waves * alone)


def torch_loop(query_affinity: torch.Tensor, vision_affinity: torch.Tensor, k: int, alpha: float) -> torch.Tensor:
    """MMTok by its definition, one pick at a time on the whole matrix: argmax of Delta_R + alpha Delta_C, (k,)."""
    scaled = (query_affinity / len(query_affinity), alpha * vision_affinity / len(vision_affinity))
    rows = torch.cat(scaled)
    covered, picks = torch.zeros_like(rows[:, 0]), []
    taken = torch.zeros_like(rows[0])
    for _ in range(k):
        gains = (rows - covered[:, None]).clamp_(min=0).sum(0)
        token = (gains + taken).argmax()
        picks.append(token)
        taken[token] = -torch.inf
        covered = torch.maximum(covered, rows[:, token])
    return torch.stack(picks)


@dataclass(frozen=True)
class Cell:
    """One size, measured; times in seconds.

    Attributes
    ----------
    size
        The size.
    backend
        The backend that ran.
    seconds, loop_seconds
        The selection of the batch, and the loop of tensor operations on it.
    launches
        Kernels that the selection launched, 0 where the device has none.
    """

    size: Size
    backend: str
    seconds: float
    loop_seconds: float
    launches: int


def measure(size: Size, device: torch.device, repeats: int = 5) -> Cell:
    """Time one size on a device, from affinities: the reference chain and the gated run of every image."""
    parameters = Parameters(swap_limit=0)
    backend = choose_backend("auto", device, size.n)
    units = []
    for image in range(size.batch):
        generator = torch.Generator().manual_seed(image)
        centres = torch.randn(16, 64, generator=generator)
        rows = centres[torch.randint(16, (size.n,), generator=generator)]
        features = (rows + 0.7 * torch.randn(size.n, 64, generator=generator)).to(device)
        prepared = PreparedImage(features, features, None, parameters)
        (query,) = query_affinities(features[:QUERY_ROWS], [prepared.embeddings], parameters)
        units.append((prepared.reference.vision_affinity, query))
    eligible = np.ones(size.n, dtype=np.bool_)

    def select() -> object:
        fresh = [(CoverageReference(vision, eligible, backend), query) for vision, query in units]
        lengths = [size.k] * size.batch
        return GreedyRun.run(fresh, parameters, lengths, lengths, lengths)

    def loop() -> object:
        tensors = [(torch.as_tensor(query).to(device), torch.as_tensor(vision).to(device)) for vision, query in units]
        return [torch_loop(query, vision, size.k, 0.5) for query, vision in tensors]

    return Cell(size, backend, _seconds(select, device, repeats), _seconds(loop, device, 2), _launches(select, device))


def _seconds(job: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time, the device's work included; the first run, which compiles, is not counted."""
    times = []
    for repeat in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        job()
        _wait(device)
        if repeat:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _launches(job: Callable[[], object], device: torch.device) -> int:
    """Kernels that a job launches on a GPU, copies and fills not counted."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        job()
        _wait(device)
    kernels = [event for event in profile.events() or [] if event.device_type.name == "CUDA"]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)


def table(device: torch.device, sizes: tuple[Size, ...] = SIZES, repeats: int = 5) -> Iterator[str]:
    """The lines of a Markdown table, as they are measured; sizes that do not fit the device's memory are left out."""
    bandwidth = _bandwidth(device)
    yield f"{_name(device)}, torch {torch.__version__}, {platform.system()}; {QUERY_ROWS} query rows\n"
    columns = ("n", "k", "batch", "backend", "ms", "launches", "MB by count", "of bandwidth", "torch loop ms", "ratio")
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for size in sizes:
        if device.type == "cuda" and 12 * size.batch * size.n**2 > torch.cuda.mem_get_info(device)[0]:
            continue
        cell = measure(size, device, repeats)
        moved = moved_bytes(size)
        share = f"{moved / cell.seconds / bandwidth:.1%}" if bandwidth else "-"
        figures = (
            size.n, size.k, size.batch, cell.backend, f"{1e3 * cell.seconds:.3f}", cell.launches or "-",
            f"{moved / 1e6:.1f}", share, f"{1e3 * cell.loop_seconds:.1f}", f"{cell.loop_seconds / cell.seconds:.1f}",
        )  # fmt: skip
        yield "| " + " | ".join(map(str, figures)) + " |"


def prediction() -> Iterator[str]:
    """The cost model as a Markdown table with an empty column for what is measured."""
    columns = ("n", "k", "batch", "MB by count", *(f"{gpu.name}, predicted ms" for gpu in GPUS), "measured ms")
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for size in SIZES:
        times = [predicted_seconds(size, gpu) for gpu in GPUS]
        shown = ["host" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times]
        cells = (size.n, size.k, size.batch, f"{moved_bytes(size) / 1e6:.1f}", *shown, "")
        yield "| " + " | ".join(map(str, cells)) + " |"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})"


def _bandwidth(device: torch.device) -> float | None:
    """Bytes per second of a GPU's memory, where the driver tells clock and width."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    # Kilohertz, twice per cycle; bits.
    return 2e3 * clock * width / 8 if clock and width else None
