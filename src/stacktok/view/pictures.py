"""Pictures in and out: uploads decoded within limits, in memory alone, and what the encoder saw of them."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps

from stacktok.core.tokens import EncodedImage

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


def crop_pictures(image: Image.Image, encoded: EncodedImage, pixels: Any, image_processor: Any) -> list[Image.Image]:
    """What the encoder saw: one picture per crop, on which its grid of tokens lies.

    Parameters
    ----------
    image
        The picture that was sent.
    encoded
        Its crops.
    pixels
        The processor's pixel values: views (3, H, W) with any leading dimensions, or patches of a whole picture.
    image_processor
        Whose normalisation is undone.
    """
    if pixels.ndim >= 4:
        views = pixels.reshape(-1, *pixels.shape[-3:]).float().cpu()
        if len(views) >= len(encoded.crops):
            return [_picture(view, image_processor) for view in views[: len(encoded.crops)]]
    # Families that cut a picture into patches themselves scale it as a whole.
    rows, columns = encoded.crops[0].grid
    scale = 28 if max(rows, columns) * 28 <= 2048 else max(1, 2048 // max(rows, columns))
    whole = image.resize((columns * scale, rows * scale), Image.Resampling.BICUBIC)
    return [whole] * len(encoded.crops)


def _picture(view: torch.Tensor, image_processor: Any) -> Image.Image:
    if getattr(image_processor, "do_normalize", False):
        mean, std = (torch.tensor(getattr(image_processor, f"image_{name}")) for name in ("mean", "std"))
        view = view * std[:, None, None] + mean[:, None, None]
    if getattr(image_processor, "do_rescale", False):
        view = view / image_processor.rescale_factor
    array = view.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array)
