"""Pictures that clients gave a name, so that a further question need not bring them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

CAPACITY = 256 << 20
"""Bytes of decoded pictures that a server's process keeps."""


class Pictures:
    """Pictures by the uuid that came with them, bounded in bytes; the longest unused go first.

    Parameters
    ----------
    capacity
        Bytes; 0 keeps nothing.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.bytes = capacity, 0
        self._pictures: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pictures)

    def resolve(self, uuids: Sequence[str | None], pictures: Sequence[Any]) -> list[Any]:
        """The pictures of a request, those that were left out put in where their uuid is known, else None.

        Parameters
        ----------
        uuids
            Of each picture, None where it has none.
        pictures
            What the request brought, None where it named a picture by its uuid alone.
        """
        found = []
        for uuid, picture in zip(uuids, pictures, strict=True):
            if uuid is None:
                found.append(picture)
            elif picture is None:
                found.append(self._get(uuid))
            else:
                self._put(uuid, picture)
                found.append(picture)
        return found

    def _get(self, uuid: str) -> Any:
        if uuid not in self._pictures:
            return None
        self._pictures.move_to_end(uuid)
        return self._pictures[uuid][0]

    def _put(self, uuid: str, picture: Any) -> None:
        if uuid in self._pictures:
            self.bytes -= self._pictures.pop(uuid)[1]
        size = picture_bytes(picture)
        if size > self.capacity:
            return
        while self.bytes + size > self.capacity:
            self.bytes -= self._pictures.popitem(last=False)[1][1]
        self._pictures[uuid] = (picture, size)
        self.bytes += size


def picture_bytes(picture: Any) -> int:
    """Bytes of a decoded picture: of Pillow, an array, or vLLM's pair of a picture and its file."""
    media = getattr(picture, "media", picture)
    file = len(getattr(picture, "original_bytes", None) or b"")
    if hasattr(media, "getbands"):
        return file + int(np.prod(media.size)) * len(media.getbands())
    return file + int(media.nbytes)
