"""The views of a picture that the encoder saw, from the pixels that the processor made."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from stacktok.core.tokens import EncodedImage

_LARGEST = 2048


def encoder_views(image: Image.Image, encoded: EncodedImage, pixels: torch.Tensor, worker: Any) -> list[Image.Image]:
    """One picture per crop, on which its grid of tokens lies.

    Parameters
    ----------
    image
        The picture that was sent.
    encoded
        Its crops.
    pixels
        The processor's pixel values: views (3, H, W) with any leading dimensions, or the patches of a whole picture,
        (patches, values), in groups that become one token.
    worker
        The image processor, whose normalisation is undone.
    """
    views: torch.Tensor | None = None
    if pixels.ndim >= 4:
        views = pixels.reshape(-1, *pixels.shape[-3:])
    elif pixels.ndim == 2:
        views = _joined(pixels, encoded, worker)
    if views is None or len(views) < len(encoded.crops):
        known = 0
    else:
        # Views of zeros fill a batch up. Of more views than crops all but the first became one canvas.
        used = int((views.flatten(1).abs().amax(1) > 0).sum())
        known = len(encoded.crops) if used <= len(encoded.crops) else 1
    seen = [_shrunk(_picture(view.float().cpu(), worker)) for view in (() if views is None else views[:known])]
    # The grid of a canvas, or of a picture whose cutting is not known, lies on the whole picture.
    return seen + [_whole(image, crop.grid) for crop in encoded.crops[known:]]


def _whole(image: Image.Image, grid: tuple[int, int]) -> Image.Image:
    """The whole picture, as large as a grid of tokens wants it."""
    rows, columns = grid
    scale = max(1, min(28, _LARGEST // max(rows, columns)))
    return image.resize((columns * scale, rows * scale), Image.Resampling.BICUBIC)


def _joined(patches: torch.Tensor, encoded: EncodedImage, worker: Any) -> torch.Tensor | None:
    """The picture of every temporal patch, (T, 3, H, W); None where the patches are cut in a way not known here.

    Patches stand token by token, the patches of a token together; each holds colours, frames, rows and columns.
    """
    size, merge, frames = (getattr(worker, name, None) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    rows, columns = encoded.crops[0].grid
    if not (isinstance(size, int) and isinstance(merge, int) and isinstance(frames, int)):
        return None
    shape = (len(encoded.crops), rows, columns, merge, merge, 3, frames, size, size)
    if patches.numel() != torch.Size(shape).numel():
        return None
    first = patches.reshape(shape)[:, :, :, :, :, :, 0]
    return first.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(encoded.crops), 3, rows * merge * size, -1)


def _picture(view: torch.Tensor, worker: Any) -> Image.Image:
    if getattr(worker, "do_normalize", False):
        mean, std = (torch.tensor(getattr(worker, f"image_{name}")) for name in ("mean", "std"))
        view = view * std[:, None, None] + mean[:, None, None]
    if getattr(worker, "do_rescale", False):
        view = view / worker.rescale_factor
    array = view.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array)


def _shrunk(image: Image.Image) -> Image.Image:
    image.thumbnail((_LARGEST, _LARGEST))
    return image
