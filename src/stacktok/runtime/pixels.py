"""Leaving cells of a picture out before the vision tower.

What is encoded is decided when the encoder function is called, on the pixels that it is given. A pre-hook on the tower
drops the patches that are left out and tells the tower the positions and boundaries of the others; a hook after it
fills the gaps of its output, so that everything behind finds the lengths that it expects. The language model's input
then loses the tokens that were never encoded: they are not eligible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stacktok.methods.pixel_method import PixelMethod
from stacktok.models.base import ModelAdapter, TowerReading
from stacktok.models.partial import PartialTower


class PixelTap:
    """A method before the vision tower of one model.

    Parameters
    ----------
    method
        The method.
    adapter, model, processor
        The family, and the user's model and processor.
    """

    def __init__(self, method: PixelMethod, adapter: ModelAdapter, model: Any, processor: Any) -> None:
        self.method, self.adapter, self.model = method, adapter, model
        self.tower: nn.Module = adapter.partial_encoder(model)
        self.levels = _levels(processor) if method.needs_levels else None
        self._local = threading.local()

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set the hooks; ``undo`` receives the functions that remove them."""
        uncompiled: Any = torch.compiler.disable
        before, after = uncompiled(self._enter), uncompiled(self._leave)
        undo.append(self.tower.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.append(self.tower.register_forward_hook(after).remove)

    @torch.no_grad()
    def decide(self, modality: str, arguments: Mapping[str, Any]) -> None:
        """Look at the pixels of an encoder call that is about to run."""
        self._local.part = None
        kept, sources, first = [], [], 0
        for image in self.adapter.cells(arguments, self.model, modality):
            if self.levels is not None:
                image = image.float() * self.levels.to(image.device)[:, None]
            for frame in image.flatten(3):
                own, source = self.method.keep(frame)
                kept.append(torch.from_numpy(own))
                sources.append(torch.from_numpy(source) + first)
                first += len(own)
        whole = torch.cat(kept)
        if not bool(whole.all()):
            grid = arguments[f"{modality}_grid_thw"]
            self._local.part = self.adapter.partial_tower(self.model, grid, whole, torch.cat(sources))

    def take(self) -> PartialTower | None:
        """The part that the last encoder call of this thread encoded; None for the whole."""
        part: PartialTower | None = self._local.__dict__.pop("part", None)
        return part

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part: PartialTower | None = getattr(self._local, "part", None)
        if part is None:
            return None
        patches = args[0] if args else kwargs["hidden_states"]
        fewer = patches[part.patches.to(patches.device)]
        return (fewer, *args[1:]), {**{k: v for k, v in kwargs.items() if k != "hidden_states"}, **part.arguments}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        part: PartialTower | None = getattr(self._local, "part", None)
        if part is None:
            return None
        output.pooler_output = part.tokens(output.pooler_output)
        output.last_hidden_state = part.tower_patches(output.last_hidden_state)
        if getattr(output, "deepstack_features", None) is not None:
            output.deepstack_features = [part.tokens(features) for features in output.deepstack_features]
        return output


def whole_reading(reading: TowerReading, part: PartialTower) -> TowerReading:
    """The tower's attention during a call on a part of the cells, as that of all of them."""
    scores, keys = (part.tower_patches(torch.cat(own)) for own in (reading.scores, reading.keys))
    return TowerReading([scores], [keys], reading.has_cls)


def _levels(processor: Any) -> torch.Tensor:
    """The factor that brings every channel of the processor's pixels to a scale on which black to white is 1, (C,)."""
    worker = getattr(processor, "image_processor", None)
    std = getattr(worker, "image_std", None)
    if std is None:
        raise ValueError(
            "tau above 0 is on the scale of pixels, which a processor without image_std does not tell; give the "
            "model's processor, or tau=0"
        )
    return torch.tensor([float(value) for value in std])
