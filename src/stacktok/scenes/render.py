"""From a scene's description to pixels, byte-identical on every machine.

Only integer arithmetic, Pillow's fixed-point resampling and numpy's frozen `RandomState` stream are used: a sine or a
font engine may differ in the last bit between machines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from stacktok.scenes.assets import emoji, glyph
from stacktok.scenes.scene import Box, Scene, Sign
from stacktok.scenes.vocabulary import COLOURS

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


def render(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB image."""
    return render_with_owners(scene)[0]


def render_with_owners(scene: Scene) -> tuple[Image.Image, npt.NDArray[np.int16]]:
    """Draw a scene and say which object owns each pixel.

    Returns
    -------
    tuple
        The RGB image, and an array (size, size) that holds -1 for background, i for thing i, and
        ``len(scene.things) + j`` for sign j.
    """
    canvas = Image.fromarray(texture(scene.background, scene.size, scene.seed))
    owners = np.full((scene.size, scene.size), -1, dtype=np.int16)
    for index, thing in enumerate(scene.things):
        picture, box = _fit(emoji(thing.kind), thing.box)
        canvas.paste(picture, box[:2], picture)
        region = owners[box[1] : box[3], box[0] : box[2]]
        region[np.asarray(picture)[..., 3] > 127] = index
    for index, sign in enumerate(scene.signs):
        canvas.paste(plate(sign), sign.box[:2])
        left, top, right, bottom = sign.box
        owners[top:bottom, left:right] = len(scene.things) + index
    return canvas, owners


def _fit(picture: Image.Image, box: Box) -> tuple[Image.Image, Box]:
    """Scale a picture into a box, keeping its proportions, centred."""
    width, height = box[2] - box[0], box[3] - box[1]
    longest = max(picture.size)
    w = max(1, picture.width * width // longest)
    h = max(1, picture.height * height // longest)
    x, y = box[0] + (width - w) // 2, box[1] + (height - h) // 2
    return picture.resize((w, h), Image.Resampling.BILINEAR), (x, y, x + w, y + h)


def plate(sign: Sign) -> Image.Image:
    """Draw a sign: plate, rim, text."""
    colour = COLOURS[sign.colour]
    light = 299 * colour[0] + 587 * colour[1] + 114 * colour[2] > 140_000
    ink = (16, 16, 16) if light else (250, 250, 250)
    width, height = sign.box[2] - sign.box[0], sign.box[3] - sign.box[1]
    image = Image.new("RGB", (width, height), ink)
    rim = max(1, height // 28)
    image.paste(colour, (rim, rim, width - rim, height - rim))
    room = (width - 6 * rim) // len(sign.text)
    for index, character in enumerate(sign.text.upper()):
        mask = glyph(sign.font, character)
        h = height * 5 // 7
        w = min(mask.width * h // mask.height, room - 2)
        if len(sign.text) > 2:
            # Four letters share the width, so capitals are lower than the digits of a number.
            h = height * 4 // 7
            w = min(mask.width * h // mask.height, room - 1)
        mask = mask.resize((max(w, 1), h), Image.Resampling.BILINEAR)
        x = 3 * rim + index * room + (room - mask.width) // 2
        image.paste(ink, (x, (height - h) // 2), mask)
    return image


def texture(name: str, size: int, seed: int) -> Bytes:
    """Background pixels (size, size, 3)."""
    source = np.random.RandomState(seed % 2**32)
    tint = source.randint(-14, 15, 3).astype(np.int32)
    pixels = _TEXTURES[name](source, size) + tint
    clipped: Bytes = np.clip(pixels, 0, 255).astype(np.uint8)
    return clipped


def _noise(source: np.random.RandomState, size: int, columns: int, rows: int, amplitude: int) -> Ints:
    """Smooth noise (size, size, 1) in [-amplitude, amplitude] with the given number of grid cells."""
    small = Image.fromarray(source.randint(0, 256, (rows, columns)).astype(np.uint8))
    smooth = np.asarray(small.resize((size, size), Image.Resampling.BILINEAR)).astype(np.int32)
    scaled: Ints = ((smooth - 128) * amplitude // 128)[..., None]
    return scaled


def _flat(size: int, colour: tuple[int, int, int]) -> Ints:
    return np.full((size, size, 3), colour, dtype=np.int32)


def _brick(source: np.random.RandomState, size: int) -> Ints:
    height = int(source.randint(14, 24))
    width = height * 5 // 2
    y, x = np.arange(size)[:, None], np.arange(size)[None, :]
    row = y // height
    shifted = x + (row % 2) * (width // 2)
    mortar = (y % height < 2) | (shifted % width < 2)
    shade = source.randint(-22, 23, (size // height + 2, size // width + 3))[row, shifted // width]
    pixels: Ints = _flat(size, (168, 78, 58)) + shade[..., None]
    pixels[mortar] = (206, 198, 186)
    return pixels


def _grass(source: np.random.RandomState, size: int) -> Ints:
    return _flat(size, (84, 158, 58)) + _noise(source, size, size // 3, size // 14, 44) + _noise(source, size, 5, 5, 18)


def _sand(source: np.random.RandomState, size: int) -> Ints:
    return (
        _flat(size, (222, 196, 142)) + _noise(source, size, size // 2, size // 2, 26) + _noise(source, size, 4, 9, 16)
    )


def _water(source: np.random.RandomState, size: int) -> Ints:
    return _flat(size, (44, 124, 176)) + _noise(source, size, 9, size // 6, 52)


def _night(source: np.random.RandomState, size: int) -> Ints:
    pixels = _flat(size, (22, 24, 58)) + _noise(source, size, 3, 3, 12)
    stars = size * size // 900
    y, x = source.randint(0, size - 1, stars), source.randint(0, size - 1, stars)
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        pixels[y + dy, x + dx] = (236, 232, 208)
    return pixels


def _snow(source: np.random.RandomState, size: int) -> Ints:
    return _flat(size, (234, 240, 246)) + _noise(source, size, size // 20, size // 20, 16)


def _wood(source: np.random.RandomState, size: int) -> Ints:
    plank = int(source.randint(30, 60))
    pixels = _flat(size, (156, 108, 66)) + _noise(source, size, 5, size // 3, 30)
    pixels += source.randint(-16, 17, size // plank + 1)[np.arange(size) // plank][:, None, None]
    pixels[np.arange(size) % plank < 2] = (84, 56, 34)
    return pixels


def _sky(source: np.random.RandomState, size: int) -> Ints:
    clouds = np.maximum(_noise(source, size, 8, 11, 256) - 40, 0)
    fade = (np.arange(size) * 50 // size)[:, None, None]
    base = _flat(size, (122, 184, 240)) + fade * np.array((1, 1, 0), dtype=np.int32)
    lit: Ints = base + (255 - base) * np.minimum(clouds * 2, 256) // 256
    return lit


_TEXTURES = {
    "brick": _brick,
    "grass": _grass,
    "sand": _sand,
    "water": _water,
    "night": _night,
    "snow": _snow,
    "wood": _wood,
    "sky": _sky,
}
