"""Pictures in: one way to read a file, and bounds that hold before anything is decoded or encoded."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read; Pillow's other decoders stay closed."""


class PictureError(ValueError):
    """A picture that is not accepted.

    Attributes
    ----------
    reason
        "size" (file, pixels or tokens), "shape" (too long for its width), "format" or "broken".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class PictureLimits:
    """How large a picture may be.

    Attributes
    ----------
    megabytes
        Size of the file.
    megapixels
        Size of the picture, read from its header before anything is decoded.
    aspect
        Longer side over the shorter one. Processors scale the shorter side up to the encoder's: a strip of 1 x 6,000
        pixels becomes a picture of 336 x 2,016,000.
    tokens
        Visual tokens of the picture, counted before the encoder runs.
    """

    megabytes: float = 100
    megapixels: float = 100
    aspect: float = 50
    tokens: int = 16_384

    def __post_init__(self) -> None:
        for name in ("megabytes", "megapixels", "aspect", "tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not greater than 0; give a limit such as 100")

    def check_bytes(self, size: int) -> None:
        """Refuse a file that is too large."""
        if size > self.megabytes * 1e6:
            raise PictureError("size", f"the file is larger than {self.megabytes:g} MB; give a smaller one")


DEFAULT_LIMITS = PictureLimits()


def check_picture(
    width: int, height: int, *, tokens: int | None = None, limits: PictureLimits = DEFAULT_LIMITS
) -> None:
    """Refuse a picture that would cost too much, before it is processed and again before it is encoded.

    Parameters
    ----------
    width, height
        In pixels.
    tokens
        Visual tokens that it will have, where they are known.
    limits
        What is accepted.
    """
    if width < 1 or height < 1:
        raise PictureError("shape", f"the picture has {width} x {height} pixels; give one with at least 1 x 1")
    if width * height > limits.megapixels * 1e6:
        raise PictureError(
            "size",
            f"the picture has {width} x {height} = {width * height / 1e6:.0f} megapixels; "
            f"give one of at most {limits.megapixels:g}",
        )
    if max(width, height) > limits.aspect * min(width, height):
        raise PictureError(
            "shape",
            f"the picture has {width} x {height} pixels, one side more than {limits.aspect:g} times the other; crop it",
        )
    if tokens is not None and tokens > limits.tokens:
        raise PictureError(
            "size", f"the picture has {tokens} visual tokens; give a smaller one, of at most {limits.tokens} tokens"
        )


def read_picture(source: bytes | str | os.PathLike[str], limits: PictureLimits = DEFAULT_LIMITS) -> Image.Image:
    """A picture file in RGB: upright by its EXIF data, on white where it is transparent, 16 bits scaled to 8.

    The first frame where it has several.

    Parameters
    ----------
    source
        The file's bytes, or its path.
    limits
        What is refused before it is decoded.
    """
    from PIL import Image

    if isinstance(source, bytes):
        data = source
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"image {path} does not exist; give a picture file")
        limits.check_bytes(path.stat().st_size)
        data = path.read_bytes()
    limits.check_bytes(len(data))
    try:
        with warnings.catch_warnings():
            # What Pillow would warn about is refused below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        message = f"the picture has more than {limits.megapixels:g} megapixels; give a smaller one"
        raise PictureError("size", message) from None
    # A decoder may fail in any way on a file that someone broke.
    except Exception:
        message = f"this is not a picture in one of the formats {', '.join(FORMATS)}; give one of those"
        raise PictureError("format", message) from None
    check_picture(*image.size, limits=limits)
    try:
        image.load()
        return rgb(image)
    except Exception:
        raise PictureError("broken", "the picture is broken and cannot be decoded; give another") from None


def rgb(image: Any) -> Image.Image:
    """A decoded picture in RGB: upright by its EXIF data, on white where it is transparent, 16 bits scaled to 8."""
    import numpy as np
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # Pillow's own conversion clips at 255. A file of 16 bits has mode I;16, or I in older releases.
        values = np.asarray(upright).astype(np.float64)
        if values.max(initial=0) > 65535 or values.min(initial=0) < 0:
            raise ValueError("a picture of 32-bit integers has no scale that is known; convert it to 16 bits")
        upright = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    if upright.has_transparency_data:
        white = Image.new("RGBA", upright.size, "white")
        return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")
