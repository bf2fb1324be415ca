"""What a server counts, and how it is written for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


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
    encoder_cache_bytes
        Size of that cache now.
    """

    images: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    selection_seconds: float = 0.0
    encoder_runs: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_bytes: int = 0

    def snapshot(self) -> dict[str, float]:
        """The counters by name."""
        return asdict(self)


_HELP = {
    "images": "Images that were given to the language model.",
    "tokens_before": "Tokens that those images have without pruning.",
    "tokens_after": "Tokens that those images filled in prompts.",
    "selection_seconds": "Seconds spent selecting tokens.",
    "encoder_runs": "Images that the vision tower encoded.",
    "encoder_cache_hits": "Images whose unpruned encoder output was cached.",
    "encoder_cache_bytes": "Bytes of cached unpruned encoder outputs.",
}


def exposition(engines: Sequence[Mapping[str, float]]) -> str:
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
        value = sum(engine.get(name, 0) for engine in engines)
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
