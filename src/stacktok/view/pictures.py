"""PNG files of pictures, and requests that are turned down."""

from __future__ import annotations

import io

from PIL import Image


class Refused(ValueError):  # noqa: N818 - an answer to a person
    """A request that is turned down, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


STATUS = {"size": 413, "shape": 422, "format": 415, "broken": 422}
"""HTTP status by `PictureError.reason`."""


def png(image: Image.Image) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
