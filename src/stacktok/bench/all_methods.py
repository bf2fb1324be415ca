"""Selection time of every method on the same made-up features: no model runs.

Times are processor time, which other programs on the machine change little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stacktok.core.tokens import EncodedImage, ImageLayout, TowerAttention
from stacktok.methods.base import FeatureMethod, Method
from stacktok.methods.layer_method import LayerMethod, LayerView
from stacktok.methods.video_method import VideoMethod

SIZES = ((576, 64), (2880, 160), (4096, 409))
"""Tokens and budget: LLaVA-1.5, LLaVA-NeXT's five crops, and one large picture."""

VISION, WIDTH, HEADS, DEPTH, QUERY, TEXT = 1024, 4096, 32, 32, 12, 48
"""Widths of features and of the language model, its heads and layers, rows of a question, text tokens of a prompt."""

_CROP = 576


@dataclass(frozen=True)
class SelectionTimes:
    """Milliseconds of processor time of one method, medians.

    Attributes
    ----------
    first
        A first question, from the encoder's features on, by size.
    further
        A further question on the same image, by size; inside the language model nothing is held from the first.
    refused
        Why it cannot run, in place of times.
    """

    first: Mapping[tuple[int, int], float]
    further: Mapping[tuple[int, int], float]
    refused: str = ""


def selection_times(
    methods: Mapping[str, Method],
    sizes: Sequence[tuple[int, int]] = SIZES,
    repeats: int = 5,
    progress: Callable[[str], None] | None = None,
) -> dict[str, SelectionTimes]:
    """Time the selection of methods.

    Repeats take the methods in turn, so that a slow spell of the machine hits all of them. A method inside the language
    model is timed on the choices of all its cuts; queries and keys, which the model computes anyway, are given.

    Parameters
    ----------
    methods
        By name; their budgets do not matter.
    sizes
        Tokens and budget.
    repeats
        Of each figure, after one that is not counted.
    progress
        Called with what is being measured.
    """
    first: dict[str, dict[tuple[int, int], list[float]]] = {name: {} for name in methods}
    further: dict[str, dict[tuple[int, int], list[float]]] = {name: {} for name in methods}
    refused: dict[str, str] = {}
    for n, k in sizes:
        image, video, query = _image(n), _image(n, frames=4), _rows(QUERY, WIDTH, 7)
        for turn in range(repeats + 1):
            for name, method in methods.items():
                if name in refused:
                    continue
                if progress is not None:
                    progress(f"{name} at ({n}, {k}), {turn} of {repeats}")
                try:
                    taken = _time(method, video if isinstance(method, VideoMethod) else image, query, k)
                except ValueError as error:
                    refused[name] = str(error)
                    continue
                if turn:
                    for times, seconds in zip((first[name], further[name]), taken, strict=True):
                        times.setdefault((n, k), []).append(1e3 * seconds)
    return {
        name: SelectionTimes({}, {}, refused[name])
        if name in refused
        else SelectionTimes(_medians(first[name]), _medians(further[name]))
        for name in methods
    }


def _medians(times: Mapping[tuple[int, int], Sequence[float]]) -> dict[tuple[int, int], float]:
    return {size: statistics.median(own) for size, own in times.items()}


@torch.no_grad()
def _time(method: Method, image: EncodedImage, query: torch.Tensor, k: int) -> tuple[float, float]:
    """Seconds of a first and of a further question."""
    if isinstance(method, FeatureMethod):
        begin = time.process_time()
        prepared = method.prepare(image)
        prepared.reduce(query, k)
        middle = time.process_time()
        prepared.reduce(query, k)
        return middle - begin, time.process_time() - middle
    if not isinstance(method, LayerMethod):
        raise ValueError(f"{type(method).__name__} works where features and layers do not tell its time")
    before, left = (0.0, 0.0), image.n
    if method.entry is not None:
        before, left = _time(method.entry, image, query, k), len(method.entry.reduce(image, query, k))
    views = []
    for count in method.keeps(DEPTH, left, k):
        views.append((_view(image.n, left), count))
        left = count
    begin = time.process_time()
    for view, count in views:
        method.choose(view, count)
    seconds = time.process_time() - begin
    return before[0] + seconds, before[1] + seconds


def _rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def _image(n: int, frames: int = 0) -> EncodedImage:
    """An image of one or several crops, or a video: features around some centres, attention of few strong tokens."""
    sizes = [n // frames] * frames if frames else [_CROP] * (n // _CROP) if n % _CROP == 0 else [n]
    sides = [round(size**0.5) for size in sizes]
    grids = [(side, side) if side * side == size else (1, size) for side, size in zip(sides, sizes, strict=True)]
    kinds = torch.randint(24, (n,), generator=torch.Generator().manual_seed(0))
    vision = _rows(24, VISION, 1)[kinds] + 0.7 * _rows(n, VISION, 2)
    projected = _rows(24, WIDTH, 3)[kinds] + 0.7 * _rows(n, WIDTH, 4)
    image = EncodedImage.of(ImageLayout.raster(*grids), vision, projected)
    if frames:
        return EncodedImage(image.layout, image.crops, modality="video")
    projector = _rows(VISION, WIDTH, 5) / VISION**0.5
    scores = _rows(2, n, 6).mul(1.5).softmax(1)
    parts = zip(*(torch.split(own, sizes) for own in (*scores, vision)), strict=True)
    return image.with_attention(
        [
            TowerAttention(late, keys[:, :64], keys[0], lambda rows: rows @ projector, early)
            for late, early, keys in parts
        ]
    )


def _view(tokens: int, left: int) -> LayerView:
    """An image of ``tokens`` tokens between two layers, ``left`` of which are left, and text behind it."""
    inputs, states = _rows(tokens + TEXT, WIDTH, 8), _rows(left + TEXT, WIDTH, 9)
    head = WIDTH // HEADS
    query, key = (_rows(HEADS * (left + TEXT), head, seed).view(HEADS, left + TEXT, head) for seed in (10, 11))
    ones = torch.ones(left + TEXT, head)
    return LayerView(
        inputs=inputs,
        input_image=torch.arange(tokens),
        input_text=torch.arange(tokens, tokens + TEXT),
        entered=states,
        left=states,
        valid=torch.ones(left + TEXT, dtype=torch.bool),
        image=torch.arange(left),
        text=torch.arange(left, left + TEXT),
        read=lambda: (query, key, head**-0.5),
        read_next=lambda: (query, key, head**-0.5),
        rotated_ones=lambda: ones,
        norm=lambda rows: rows,
    )
