"""Unpruned encoder outputs and what a method prepared of them.

A second question on a held image runs neither the vision tower nor the query-independent half of the selection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from stacktok.core.tokens import EncodedImage
from stacktok.methods.base import Prepared


@dataclass(eq=False)
class Entry:
    """A held image, its prepared state, and the bytes of both."""

    image: EncodedImage
    size: int
    prepared: Prepared | None = None


class FeatureCache:
    """The images encoded last, bounded in bytes; the longest unused go first.

    Features are kept in host memory, which vLLM does not count on; on an accelerator they are copied back on a hit.
    Prepared state counts towards the bound.

    Parameters
    ----------
    capacity
        Bytes; 0 keeps nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._images: OrderedDict[Hashable, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def get(self, key: Hashable, device: torch.device) -> EncodedImage | None:
        """The image of a key with its features on a device, or None."""
        found = self._images.get(key)
        if found is None:
            return None
        self._images.move_to_end(key)
        return moved(found.image, device)

    def put(self, key: Hashable, image: EncodedImage) -> EncodedImage | None:
        """Keep a copy of an image in host memory, and return it; one that is larger than the cache is not kept."""
        self._drop(key)
        size = image_bytes(image)
        if not self._make_room(size):
            return None
        self._images[key] = Entry(detached(image), size)
        self.bytes += size
        return self._images[key].image

    def prepared(self, key: Hashable) -> Prepared | None:
        """The prepared state of a held image, or None."""
        found = self._images.get(key)
        return None if found is None else found.prepared

    def hold(self, key: Hashable, prepared: Prepared) -> None:
        """Keep the prepared state of a held image, unless both are larger than the cache."""
        entry = self._images.get(key)
        if entry is None or entry.size + prepared.nbytes > self.capacity:
            return
        self._images.move_to_end(key)
        self._make_room(prepared.nbytes)
        entry.prepared = prepared
        entry.size += prepared.nbytes
        self.bytes += prepared.nbytes

    def _make_room(self, size: int) -> bool:
        """Drop the longest unused until there is room."""
        if size > self.capacity:
            return False
        while self.bytes + size > self.capacity:
            self._drop(next(iter(self._images)))
        return True

    def _drop(self, key: Hashable) -> None:
        found = self._images.pop(key, None)
        if found is not None:
            self.bytes -= found.size


def image_bytes(image: EncodedImage) -> int:
    """Bytes of an image's features."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(image))


def moved(image: EncodedImage, device: torch.device) -> EncodedImage:
    """The image with its features on a device."""
    if all(tensor.device == device for tensor in _tensors(image)):
        return image
    return _mapped(image, lambda tensor: tensor.to(device, non_blocking=True))


def detached(image: EncodedImage) -> EncodedImage:
    """The image in host memory, its features copied out of the batch that they were computed in.

    A GPU copies them by itself into pinned memory, and back from there, in the order of its stream.
    """
    return _mapped(image, _copied)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def _tensors(image: EncodedImage) -> list[torch.Tensor]:
    found = [] if image.further is None else [image.further]
    for crop in image.crops:
        found.extend([crop.vision, crop.projected])
        if crop.attention is not None:
            found.extend([crop.attention.scores, crop.attention.keys])
            found.extend(own for own in (crop.attention.cls, crop.attention.early) if own is not None)
    return found


def _mapped(image: EncodedImage, function: Callable[[torch.Tensor], torch.Tensor]) -> EncodedImage:
    crops = []
    for crop in image.crops:
        attention = crop.attention
        if attention is not None:
            cls, early = (None if own is None else function(own) for own in (attention.cls, attention.early))
            scores, keys = function(attention.scores), function(attention.keys)
            attention = replace(attention, scores=scores, keys=keys, cls=cls, early=early)
        crops.append(
            replace(crop, vision=function(crop.vision), projected=function(crop.projected), attention=attention)
        )
    further = None if image.further is None else function(image.further)
    return replace(image, crops=tuple(crops), further=further)
