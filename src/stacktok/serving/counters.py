"""The server's counters, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)

Snapshot = Mapping[str, "float | Sequence[float]"]
"""Counters by name; of a histogram the count of every bucket, the open one last, and then the sum."""


class Histogram:
    """How often values fell between bounds.

    Parameters
    ----------
    bounds
        Upper bounds of buckets, ascending; values above the last fall into one more.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts, self.sum = [0] * (len(self.bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class Counters:
    """Totals since the start of one engine process.

    Attributes
    ----------
    images
        Images that went through the selector or past it.
    tokens_before, tokens_after
        Tokens that they would have filled, and did fill.
    selection_seconds
        Time spent selecting.
    encoder_runs
        Images that the vision tower encoded.
    encoder_cache_hits
        Images whose encoder output was found in our cache.
    preparations
        Images whose query-independent state was computed.
    encoder_cache_bytes
        Size of that cache now, prepared state included.
    image_selection_seconds, image_kept_share
        Time to select from one image, and the share of its tokens that were kept, of images that were selected from.
    """

    images: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    selection_seconds: float = 0.0
    encoder_runs: int = 0
    encoder_cache_hits: int = 0
    preparations: int = 0
    encoder_cache_bytes: int = 0
    image_selection_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    image_kept_share: Histogram = field(default_factory=lambda: Histogram(SHARES))

    def snapshot(self) -> dict[str, float | list[float]]:
        """The counters by name."""
        found: dict[str, float | list[float]] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            found[one.name] = [*value.counts, value.sum] if isinstance(value, Histogram) else value
        return found


_HELP = {
    "images": "Images that were given to the language model.",
    "tokens_before": "Tokens that those images have without pruning.",
    "tokens_after": "Tokens that those images filled in prompts.",
    "selection_seconds": "Seconds spent selecting tokens.",
    "encoder_runs": "Images that the vision tower encoded.",
    "encoder_cache_hits": "Images whose unpruned encoder output was cached.",
    "preparations": "Images whose query-independent state was computed.",
    "encoder_cache_bytes": "Bytes of cached unpruned encoder outputs and prepared state.",
}


_HISTOGRAMS = {
    "image_selection_seconds": ("Seconds to select the tokens of one image.", SECONDS),
    "image_kept_share": ("Share of its tokens that one image kept.", SHARES),
}


def exposition(engines: Sequence[Snapshot]) -> str:
    """Counters of all data-parallel engines in Prometheus' text format, their sums.

    Parameters
    ----------
    engines
        A snapshot per engine; ranks of one tensor-parallel engine count the same images and give one.
    """
    lines = []
    for name, text in _HELP.items():
        kind = "gauge" if name == "encoder_cache_bytes" else "counter"
        full = f"stacktok_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {_sum(engines, name)}"]
    for name, (text, bounds) in _HISTOGRAMS.items():
        lines += [f"# HELP stacktok_{name} {text}", f"# TYPE stacktok_{name} histogram"]
        below: float = 0
        for index, bound in enumerate((*map(str, bounds), "+Inf")):
            below += _sum(engines, name, index)
            lines.append(f'stacktok_{name}_bucket{{le="{bound}"}} {below}')
        total = _sum(engines, name, len(bounds) + 1)
        lines += [f"stacktok_{name}_sum {total}", f"stacktok_{name}_count {below}"]
    return "\n".join(lines) + "\n"


def _sum(engines: Sequence[Snapshot], name: str, index: int | None = None) -> float:
    values = [engine[name] for engine in engines if name in engine]
    return sum(value if isinstance(value, (int, float)) else value[index or 0] for value in values)
