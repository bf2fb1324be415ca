"""The cost of a selection relative to the affinities it needs; one table, all ratios from one run.

    python benchmarks/bench_select.py [--quick]
    python benchmarks/bench_select.py --device cuda     # selection on a GPU: ms, launches, bytes, next to a torch loop
    python benchmarks/bench_select.py --model           # the cost model's prediction

Every time is the median over repeats that take the measured things in turn, so that a slow spell of the machine hits
all of them. "build" is the affinity build alone as this library does it, "plain build" the same in plain torch
(normalise, matrix product, softmax). "cpu" and "reference" are the two backends on given affinities; the reference is
timed on 20 steps and scaled.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import stacktok
from stacktok.bench.selection import prediction, table

QUERY_ROWS, WIDTH = 12, 4096


@dataclass(frozen=True)
class Size:
    """A problem: n tokens per crop, k kept in all, vision width."""

    n: int
    k: int
    crops: int
    vision_width: int
    repeats: int


SIZES = (
    Size(576, 64, 1, 1024, 31),
    Size(576, 192, 1, 1024, 31),
    Size(576, 160, 5, 1024, 31),
    Size(576, 640, 5, 1024, 31),
    Size(4096, 409, 1, 1280, 5),
    Size(16384, 819, 1, 1280, 3),
)


def image_features(n: int, width: int, seed: int) -> torch.Tensor:
    """Features that resemble an image: regions on a square grid, each a direction with noise, over a common mean."""
    rng = np.random.default_rng(seed)
    side = int(np.ceil(np.sqrt(n)))
    regions = max(6, side)
    centres = rng.uniform(0, side, size=(regions, 2))
    points = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)[:n]
    region = np.argmin(((points[:, None] - centres[None]) ** 2).sum(-1), axis=1)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(regions, width, generator=generator)
    features = directions[torch.from_numpy(region)] + 0.7 * torch.randn(n, width, generator=generator)
    return features + 0.8 * torch.randn(1, width, generator=generator)


def problem(size: Size) -> tuple[list[stacktok.Crop], torch.Tensor]:
    """Crops and a query whose rows point at some of the tokens."""
    crops = [
        stacktok.Crop(image_features(size.n, size.vision_width, 2 * c), image_features(size.n, WIDTH, 2 * c + 1))
        for c in range(size.crops)
    ]
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randint(size.n, (QUERY_ROWS,), generator=generator)
    query = crops[0].projected[chosen] + 1.5 * torch.randn(QUERY_ROWS, WIDTH, generator=generator)
    return crops, query


def plain_build(crops: list[stacktok.Crop], query: torch.Tensor) -> None:
    """Normalise, matrix product, softmax, as anyone would write it."""
    normalize = torch.nn.functional.normalize
    for crop in crops:
        x, z = normalize(crop.vision, dim=1), normalize(crop.projected, dim=1)
        torch.softmax(x @ x.T / 0.2, dim=1)
        torch.softmax(normalize(query, dim=1) @ z.T / 0.02, dim=1)


def run(crops: list[stacktok.Crop], query: torch.Tensor, k: int) -> object:
    """The whole of a selection from features."""
    if len(crops) == 1:
        return stacktok.select(crops[0].vision, crops[0].projected, query, k)
    return stacktok.select_crops(crops, query, k)


def medians(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of every job, taken in turn; one round before that is not counted, unless there is but one."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1) if repeats > 1 else (1,):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def conversations(crops: list[stacktok.Crop], query: torch.Tensor, size: Size) -> dict[str, float]:
    """Median seconds of the first question on an image, of the second, right after it, and of six more in a row."""
    generator = torch.Generator().manual_seed(8)
    # Questions that the image has not heard: other tokens, other order.
    others = [query.flip(0) + 0.5 * torch.randn(query.shape, generator=generator) for _ in range(7)]
    times: dict[str, list[float]] = {"first question": [], "second question": [], "further questions": []}
    for repeat in range(size.repeats + 1):
        begin = time.perf_counter()
        image = (
            stacktok.prepare_crops(crops) if size.crops > 1 else stacktok.prepare(crops[0].vision, crops[0].projected)
        )
        image.select(query, size.k)
        ends = [time.perf_counter()]
        for other in others:
            image.select(other, size.k)
            ends.append(time.perf_counter())
        # Or the next first question would pay for letting go of this image.
        del image
        if repeat:
            times["first question"].append(ends[0] - begin)
            times["second question"].append(ends[1] - ends[0])
            times["further questions"] += np.diff(ends[1:]).tolist()
    return {name: statistics.median(values) for name, values in times.items()}


def measure(size: Size) -> dict[str, float]:
    """All times of one size, in seconds."""
    crops, query = problem(size)

    def build() -> list[tuple[np.ndarray, np.ndarray, None]]:
        return [(*stacktok.affinities(crop.vision, crop.projected, query), None) for crop in crops]

    result = medians(
        {
            "plain build": lambda: plain_build(crops, query),
            "build": build,
            "select": lambda: run(crops, query, size.k),
        },
        size.repeats,
    )
    result |= conversations(crops, query, size)
    pairs, steps = build(), 20

    def on_affinities(k: int, backend: str) -> object:
        return stacktok.select_crops_from_affinities(pairs, k, swap_limit=0, backend=backend)

    result |= medians({"cpu": lambda: on_affinities(size.k, "cpu")}, size.repeats)
    result |= medians({"reference": lambda: on_affinities(steps, "reference")}, 1)
    result["reference"] *= size.k / steps
    return result


def peak_bytes(size: Size) -> float:
    """Peak resident bytes of a selection beyond the inputs, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", str(SIZES.index(size))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(size: Size) -> None:
    """Body of the process that `peak_bytes` starts: warm up on a small problem, then watch the high-water mark."""
    small = Size(64, 8, size.crops, size.vision_width, 1)
    run(*problem(small), small.k)
    crops, query = problem(size)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run(crops, query, size.k)
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only sizes of 576 tokens per crop")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help="cuda: the table of a GPU")
    parser.add_argument("--model", action="store_true", help="print what the cost model predicts, and measure nothing")
    arguments = parser.parse_args()
    if arguments.model or arguments.device != "cpu":
        for line in prediction() if arguments.model else table(torch.device(arguments.device)):
            print(line, flush=True)
        return
    if arguments.peak is not None:
        print_peak(SIZES[arguments.peak])
        return
    header = (
        "n", "k", "crops", "plain build ms", "build ms", "select ms", "/ build", "/ plain", "on affinities: cpu ms",
        "reference ms", "ratio", "first question ms", "second ms", "of first", "further ms", "of first", "peak MB",
        "/ matrix",
    )  # fmt: skip
    print(f"m = {QUERY_ROWS}, d = {WIDTH}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header), flush=True)
    for size in SIZES:
        if arguments.quick and size.n > 576:
            continue
        t, peak = measure(size), peak_bytes(size)
        matrix = 4 * size.crops * size.n**2
        cells = (
            size.n, size.k, size.crops, f"{1e3 * t['plain build']:.2f}", f"{1e3 * t['build']:.2f}",
            f"{1e3 * t['select']:.2f}", f"{t['select'] / t['build']:.2f}", f"{t['select'] / t['plain build']:.2f}",
            f"{1e3 * t['cpu']:.2f}", f"{1e3 * t['reference']:.0f}", f"{t['reference'] / t['cpu']:.0f}",
            f"{1e3 * t['first question']:.2f}", f"{1e3 * t['second question']:.2f}",
            f"1/{t['first question'] / t['second question']:.1f}", f"{1e3 * t['further questions']:.2f}",
            f"1/{t['first question'] / t['further questions']:.1f}",
            f"{peak / 1e6:.0f}", f"{peak / matrix:.2f}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
