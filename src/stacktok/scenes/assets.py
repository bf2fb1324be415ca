"""The pictures and glyphs that ship with the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from PIL import Image

_GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CELL = 64


@cache
def emoji(kind: str) -> Image.Image:
    """RGBA picture of a kind, cropped to what is visible."""
    return _open("emoji", f"{kind}.png", "RGBA")


@cache
def glyph(font: str, character: str) -> Image.Image:
    """Mask of a digit or capital letter, cropped in width, cell height 64."""
    left = _GLYPHS.index(character) * _CELL
    cell = _open("fonts", f"{font}.png", "L").crop((left, 0, left + _CELL, _CELL))
    box = cell.getbbox()
    if box is None:
        raise ValueError(
            f"character {character!r} has no glyph in font {font!r}; signs carry digits and letters A to Z"
        )
    return cell.crop((box[0], box[1], box[2], box[3]))


def _open(folder: str, name: str, mode: str) -> Image.Image:
    with (files("stacktok.scenes") / "assets" / folder / name).open("rb") as stream:
        return Image.open(stream).convert(mode)
