"""Picture files: one way to read them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from stacktok.models.pictures import PictureError, PictureLimits, read_picture


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_pictures_stand_upright(orientation: int, tmp_path) -> None:
    # A photograph that is stored turned: what a viewer shows is the gradient with its dark corner at the upper left.
    upright = np.add.outer(np.arange(8), 4 * np.arange(16)).astype(np.uint8)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    np.testing.assert_array_equal(np.asarray(read_picture(path))[:, :, 0], upright)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_lie_on_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (200, 200, 200, 255))
    options = {}
    if mode == "P":
        image = image.quantize(4)
        options = {"transparency": image.getpixel((0, 0))}
    found = read_picture(file_of(image.convert(mode), **options))
    assert found.mode == "RGB"
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((1, 1)) == (200, 200, 200)


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(read_picture(file_of(Image.fromarray(values))))
    np.testing.assert_array_equal(found[:, :, 0].ravel(), np.arange(256))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_named_formats_are_read(kind: str) -> None:
    assert read_picture(file_of(Image.new("RGB", (5, 3), "red"), kind)).size == (5, 3)


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "PPM", "ICO", "PDF"])
def test_other_formats_are_not(kind: str) -> None:
    with pytest.raises(PictureError, match="not a picture in one of the formats PNG, JPEG, WEBP, GIF, BMP") as raised:
        read_picture(file_of(Image.new("RGB", (16, 16), "red"), kind))
    assert raised.value.reason == "format"


def test_what_is_wrong_with_a_file_is_said(tmp_path) -> None:
    whole = file_of(Image.effect_noise((300, 300), 90))
    for data, limits, reason in (
        (whole[:4000], PictureLimits(), "broken"),
        (whole, PictureLimits(megabytes=0.001), "size"),
        (whole, PictureLimits(megapixels=0.01), "size"),
        (file_of(Image.new("1", (1, 6000))), PictureLimits(), "shape"),
    ):
        with pytest.raises(PictureError) as raised:
            read_picture(data, limits)
        assert raised.value.reason == reason
    with pytest.raises(ValueError, match="does not exist; give a picture file"):
        read_picture(tmp_path / "none.png")
