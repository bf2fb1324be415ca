"""Pictures in and out: uploads decoded within limits, in memory alone; PNG files."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Decoders that an upload may reach; Pillow's others stay closed."""


class Refused(ValueError):  # noqa: N818 - an answer to a person
    """An upload that is not taken, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """How large an upload may be.

    Attributes
    ----------
    megabytes
        Size of the file.
    megapixels
        Size of the picture, read from its header before anything is decoded.
    """

    megabytes: float = 20
    megapixels: float = 40

    def __post_init__(self) -> None:
        for name in ("megabytes", "megapixels"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""
        return int(self.megabytes * 1e6)

    def check_bytes(self, size: int) -> None:
        """Refuse a file that is too large."""
        if size > self.bytes:
            raise Refused(413, f"The file is larger than {self.megabytes:g} MB; send a smaller one.")


def decode(data: bytes, limits: Limits) -> Image.Image:
    """An uploaded picture in RGB, upright; the first frame where it has several.

    Parameters
    ----------
    data
        The file.
    limits
        What is refused before it is decoded.
    """
    limits.check_bytes(len(data))
    kinds = ", ".join(FORMATS)
    try:
        with warnings.catch_warnings():
            # Pillow's own limit is above ours; what it would warn about is refused below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise Refused(413, f"The picture has more than {limits.megapixels:g} megapixels; send a smaller one.") from None
    except Exception:
        raise Refused(415, f"This is not a picture in one of the formats {kinds}; send one of those.") from None
    width, height = image.size
    if width * height > limits.megapixels * 1e6:
        raise Refused(
            413,
            f"The picture has {width} x {height} = {width * height / 1e6:.0f} megapixels; "
            f"send one of at most {limits.megapixels:g}.",
        )
    # A decoder may fail in any way on a file that someone broke.
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            opaque = Image.new("RGBA", upright.size, "white")
            return Image.alpha_composite(opaque, upright.convert("RGBA")).convert("RGB")
        return upright.convert("RGB")
    except Exception:
        raise Refused(422, "The picture is broken and cannot be decoded; send it again or send another.") from None


def png(image: Image.Image) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
