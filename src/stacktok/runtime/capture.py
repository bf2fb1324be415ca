"""Capture of the encoder's output while a model runs, and the images in it.

Generation encodes by calling ``get_image_features`` of the base model, not a module, and drops the arguments before the
model runs: no module hook sees the image sizes. A stand-in for that function, an attribute of this one model object,
notes output and arguments. The images are read when the prompt is known.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, Ints, Reduction
from stacktok.models.base import EncoderCall, ModelAdapter, TowerReading
from stacktok.models.partial import PartialTower
from stacktok.runtime.pixels import PixelTap, whole_reading
from stacktok.runtime.tower import TowerTap

if TYPE_CHECKING:
    from stacktok.methods.base import Prepared
    from stacktok.runtime.question import Question

_ATTRIBUTE = "_stacktok_captured"
_SHARED = "_stacktok_shared"


def share(output: Any, images: Sequence[int]) -> Any:
    """An encoder output whose images stand in several prompts, for ``generate(mm_encoder_outputs={"image": ...})``.

    Encoded once, prepared once for all of their questions.

    Parameters
    ----------
    output
        Of an encoder function that is tapped; every image is one unit of it.
    images
        Per prompt, in order, the image that it shows.
    """
    units = output.pooler_output
    picked = units[list(images)] if isinstance(units, torch.Tensor) else [units[index] for index in images]
    changed: dict[str, Any] = {"pooler_output": picked}
    if getattr(output, "deepstack_features", None) is not None:
        changed["deepstack_features"] = [[layer[index] for index in images] for layer in output.deepstack_features]
    shared = type(output)(**{**output, **changed})
    setattr(shared, _ATTRIBUTE, getattr(output, _ATTRIBUTE))
    setattr(shared, _SHARED, tuple(images))
    return shared


def preparations(output: Any) -> int:
    """Images of an encoder output that were prepared for a method."""
    return len(getattr(output, _ATTRIBUTE).prepared)


class EncoderTap:
    """Stands in for an encoder function on one model object, and notes its calls.

    Parameters
    ----------
    function
        The encoder function.
    note
        Told an output and its arguments by name.
    begin
        Given the arguments before the function runs; returns those to note.
    running
        Shared by the taps of one model: one encoder function may call another (videos are encoded as images), and only
        the outer call is what the model asked for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        note: Callable[[Any, dict[str, Any]], None],
        running: threading.local,
        begin: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._function, self._note, self._running, self._begin = function, note, running, begin
        self._signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode, and note the output with its arguments by name."""
        if getattr(self._running, "encoder", False):
            return self._function(*args, **kwargs)
        arguments = self._begin(dict(self._signature.bind(*args, **kwargs).arguments))
        self._running.encoder = True
        try:
            output = self._function(*args, **kwargs)
        finally:
            self._running.encoder = False
        self._note(output, arguments)
        return output


@dataclass(eq=False)
class Captured:
    """One output of an encoder function; lives on that output.

    Attributes
    ----------
    call, reading, part
        The encoder call, the tower's attention during it, and the part of the pictures that was encoded.
    images
        The images, once read.
    groups
        Units of every image.
    seconds
        Time that reading them took.
    prepared
        Images prepared for a method, by method and index.
    decided
        Reductions by method, images, query and budget, so that beams and steps without a cache decide once. The query
        is held with them, so that its key stays its own.
    """

    call: EncoderCall
    reading: TowerReading | None
    part: PartialTower | None = None
    images: list[EncodedImage] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prepared: dict[Hashable, Prepared] = field(default_factory=dict)
    decided: dict[Hashable, tuple[Question, list[Reduction]]] = field(default_factory=dict)

    def read(self, adapter: ModelAdapter, groups: Sequence[int] | None) -> None:
        """Read the images, unless that is done."""
        if self.images or not self.call.units:
            return
        begin = time.perf_counter()
        self.images = adapter.encode(self.call, self.reading, groups)
        if self.part is not None:
            kept = np.split(self.part.kept.numpy(), np.cumsum([image.n for image in self.images])[:-1])
            self.images = [image.with_eligible(own) for image, own in zip(self.images, kept, strict=True)]
        self.groups = [1] * len(self.images) if groups is None else list(groups)
        self.seconds = time.perf_counter() - begin

    def image(self, units: Sequence[torch.Tensor]) -> int:
        """The image that consists of these units.

        A device map may have copied the output between encoder and model; images with equal features are alike.
        """
        for same in (_same_memory, _equal):
            first = 0
            for index, count in enumerate(self.groups):
                own = self.call.units[first : first + count]
                if count == len(units) and all(map(same, own, units)):
                    return index
                first += count
        raise ValueError("the image features were changed after encoding; pass the encoder's output as it was")


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image in a batch of prompts.

    Attributes
    ----------
    row
        Row of the batch.
    modality, index
        Which image of which encoder output.
    image
        The image.
    indices
        Its placeholders in the prompt, ascending, (image.length,).
    """

    row: int
    modality: str
    index: int
    image: EncodedImage
    indices: Ints


@dataclass(frozen=True, eq=False)
class Placement:
    """The images of a batch of prompts.

    Attributes
    ----------
    rows
        The images of every row, in order.
    text
        Which tokens are neither padding nor placeholders, (B, S).
    times
        How often every prompt is repeated, as beams do.
    seconds
        Time that reading the images took.
    """

    rows: list[list[PlacedImage]]
    text: Mask
    times: int
    seconds: float


class Capture:
    """The encoder outputs of one model.

    Parameters
    ----------
    model, processor, adapter
        The user's model and processor, and the family's adapter.
    tower
        Reads the vision tower's attention, for methods that need it.
    pixels
        A method before the vision tower.
    bypassed
        Whether calls to come are left alone by it.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        adapter: ModelAdapter,
        tower: TowerTap | None,
        pixels: PixelTap | None = None,
        bypassed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.processor, self.adapter, self.tower = model, processor, adapter, tower
        self.pixels, self.bypassed = pixels, bypassed
        self._local = threading.local()

    def attach(self, undo: list[Callable[[], object]], noted: Callable[[str, Any], None]) -> None:
        """Set the taps.

        Parameters
        ----------
        undo
            Receives the functions that remove them.
        noted
            Called with the modality and the output of every encoder call.
        """
        base = self.adapter.base(self.model)
        # A compiled model runs this between its graphs, not inside them.
        uncompiled: Any = torch.compiler.disable
        running = threading.local()
        for modality in self.adapter.modalities:

            def note(output: Any, arguments: dict[str, Any], modality: str = modality) -> None:
                self._note(modality, output, arguments)
                noted(modality, output)

            def begin(arguments: dict[str, Any], modality: str = modality) -> dict[str, Any]:
                if self.pixels is not None:
                    # A call that failed may have left its decision.
                    self.pixels.take()
                    if not self.bypassed():
                        self.pixels.decide(modality, arguments)
                return self.adapter.host_arguments(arguments, self.processor)

            name = f"get_{modality}_features"
            undo.append(functools.partial(put_back, base, name, vars(base).get(name)))
            vars(base)[name] = EncoderTap(getattr(base, name), uncompiled(note), running, uncompiled(begin))
        if self.tower is not None:
            self.tower.attach(undo)
        if self.pixels is not None:
            self.pixels.attach(undo)

    def _note(self, modality: str, output: Any, arguments: Mapping[str, Any]) -> Captured | None:
        part = None if self.pixels is None else self.pixels.take()
        if getattr(output, "pooler_output", None) is None:
            return None
        reading = None if self.tower is None else self.tower.take()
        if reading is not None and part is not None:
            reading = whole_reading(reading, part)
        units = tuple(self.adapter.units(output, self.model.config))
        call = EncoderCall(modality, output, units, arguments, self.model, self.processor)
        captured = Captured(call, reading, part)
        setattr(output, _ATTRIBUTE, captured)
        self._local.__dict__.setdefault("latest", {})[modality] = weakref.ref(captured)
        return captured

    def captured(self, modality: str, output: Any) -> Captured:
        """The call behind an encoder output, which may be a copy that a device map made of the noted one."""
        found: Captured | None = getattr(output, _ATTRIBUTE, None)
        if found is None:
            latest: dict[str, weakref.ref[Captured]] = getattr(self._local, "latest", {})
            found = latest[modality]() if modality in latest else None
            units = self.adapter.units(output, self.model.config)
            if found is None or len(units) % len(found.call.units) or not _equal(found.call.units[0], units[0]):
                found = self._note(modality, output, {})
        if found is None:
            raise ValueError(f"the encoder's output has no {modality} features; pass it as it was returned")
        return found

    def not_encoded(self, placed: PlacedImage, output: Any) -> int:
        """Tokens of an image that never entered the vision tower."""
        captured = self.captured(placed.modality, output)
        if captured.part is None:
            return 0
        first = sum(image.n for image in captured.images[: placed.index])
        return int((~captured.part.kept[first : first + placed.image.n]).sum())

    def place(self, outputs: Mapping[str, Any], ids: Ints, valid: Mask) -> Placement:
        """Find the images of a batch of prompts.

        Parameters
        ----------
        outputs
            Encoder outputs by modality.
        ids
            The prompts, (B, S).
        valid
            Tokens that are not padding, (B, S).
        """
        rows: list[list[PlacedImage]] = [[] for _ in ids]
        text, times, seconds = valid.copy(), 1, 0.0
        for modality, output in outputs.items():
            captured = self.captured(modality, output)
            units = self.adapter.units(output, self.model.config)
            shared: tuple[int, ...] | None = getattr(output, _SHARED, None)
            times = max(times, len(units) // max(1, len(captured.call.units if shared is None else shared)))
            groups = [self.adapter.group(self.model.config, row.tolist(), self.processor) for row in ids[::times]]
            captured.read(self.adapter, None if None in groups else [g for own in groups if own for g in own])
            seconds += captured.seconds
            placeholders = ids == getattr(self.model.config, self.adapter.modalities[modality])
            text &= ~placeholders
            at = 0
            for row, mask in enumerate(placeholders):
                indices, counts = np.flatnonzero(mask), iter(groups[row // times] or ())
                while len(indices):
                    count = next(counts, 1)
                    index = captured.image(units[at : at + count]) if shared is None else shared[at // times]
                    image = captured.images[index]
                    own, indices = np.split(indices, [image.length - self.adapter.text_tokens(image.layout)])
                    if self.adapter.text_separators:
                        own = np.arange(own[0], own[0] + image.length)
                        text[row, own] = False
                    rows[row].append(PlacedImage(row, modality, index, image, own))
                    at += count
        for row_images in rows:
            row_images.sort(key=lambda placed: int(placed.indices[0]))
        return Placement(rows, text, times, seconds)


def put_back(module: nn.Module, name: str, value: Any) -> None:
    """Restore an attribute of one object; None removes it, so that the class's own shows again."""
    if value is None:
        del vars(module)[name]
    else:
        vars(module)[name] = value


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.data_ptr() == b.data_ptr() != 0)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device)))
