"""The vision tower's attention, read in one layer or two while the tower runs as it always does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stacktok.core.attention import TowerSignal
from stacktok.models.base import ModelAdapter, TowerReading
from stacktok.runtime.tap import Tap


class TowerTap:
    """Collects attention scores and keys of one layer of the vision tower, or of two.

    Parameters
    ----------
    adapter, model
        The family, and the model whose tower is read.
    signal
        Layers and rows that are read.
    """

    def __init__(self, adapter: ModelAdapter, model: Any, signal: TowerSignal) -> None:
        self.tower, module, has_cls = adapter.tower_attention(model)
        if signal.rows == "cls" and not has_cls:
            raise ValueError(
                f"signal='cls' needs a CLS token, which the vision tower of {adapter.family} does not have; "
                "use 'received' or None"
            )
        self.has_cls, self.by_cls, self.joined = has_cls, has_cls and signal.rows != "received", signal.joined
        layers = attention_layers(self.tower, module)
        early = signal.early_layer(len(layers))
        last = layers[adapter.tower_layer(model.config, len(layers) - 1)]
        read = {last if signal.joined else module: [False]}
        if early is not None:
            # In a shallow tower both may be one.
            read.setdefault(layers[adapter.tower_layer(model.config, early)], []).append(True)
        self._early = early is not None
        self._taps = [Tap(own, functools.partial(self._read, which)) for own, which in read.items()]
        self._local = threading.local()

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set the hooks; ``undo`` receives what takes each away."""
        undo.append(self.tower.register_forward_pre_hook(self._begin).remove)
        for tap in self._taps:
            tap.attach(undo)

    def take(self) -> TowerReading | None:
        """The tower's attention in its last run in this thread; None if it has not run."""
        reading: TowerReading | None = self._local.__dict__.pop("reading", None)
        return reading

    def _begin(self, module: nn.Module, args: Any) -> None:
        early = TowerReading([], [], self.has_cls) if self._early else None
        self._local.reading = TowerReading([], [], self.has_cls, early)

    def _read(self, which: Sequence[bool], query: torch.Tensor, key: torch.Tensor, scaling: float, mask: Any) -> None:
        reading: TowerReading | None = getattr(self._local, "reading", None)
        for early in which:
            own = reading.early if early and reading is not None else reading
            if own is None:
                return
            for row, (q, k) in enumerate(zip(query, key, strict=True)):
                own.add(q, k, scaling, _allowed(mask, row, q.shape[1]), by_cls=self.by_cls, joined=self.joined)


def attention_layers(tower: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The attention modules of all layers of a tower, in order, given that of one."""
    path = next(name for name, own in tower.named_modules() if own is module).split(".")
    at = max(place for place, part in enumerate(path) if part.isdigit())
    layers: Any = tower.get_submodule(".".join(path[:at]))
    return [layer.get_submodule(".".join(path[at + 1 :])) for layer in layers]


def _allowed(mask: Any, row: int, length: int) -> torch.Tensor | None:
    """Which tokens each token of a row of the batch sees, (s, s); None where all see all.

    Parameters
    ----------
    mask
        The backend's, boolean or additive, (B or 1, 1, s or 1, s); any other kind tells nothing.
    row
        Row of the batch.
    length
        Tokens, s.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    own = mask[row if len(mask) > 1 else 0, 0].expand(length, length)
    allowed = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return None if bool(allowed.all()) else allowed


@contextmanager
def tapped_tower(adapter: ModelAdapter, model: Any, signal: TowerSignal) -> Iterator[TowerTap]:
    """A `TowerTap` on a model's tower while the block lasts, for encoding outside an attachment."""
    undo: list[Callable[[], object]] = []
    tap = TowerTap(adapter, model, signal)
    tap.attach(undo)
    try:
        yield tap
    finally:
        for step in reversed(undo):
            step()
