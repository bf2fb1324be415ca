"""Fetch the scene pictures: ``python -m training.fetch_assets``.

Takes the Noto emoji that scenes use from the npm package ``emoji-datasource-google`` and rasterises the two DejaVu
fonts that come with matplotlib into glyph sheets. The results are committed; this program documents their origin.
Glyphs are rasterised here, once, because the font engine's version would otherwise decide the pixels of a scene.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from stacktok.scenes.vocabulary import KINDS

PACKAGE = "emoji-datasource-google@16.0.0"
ASSETS = Path(__file__).resolve().parents[1] / "src" / "stacktok" / "scenes" / "assets"
GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CELL = 64
FONT_FILES = {"sans": "DejaVuSans-Bold.ttf", "serif": "DejaVuSerif-Bold.ttf"}


def fetch_emoji(target: Path) -> None:
    """Download the npm package and keep the pictures that scenes use."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
        archive = next(Path(folder).glob("*.tgz"))
        with tarfile.open(archive) as tar:
            for kinds in KINDS.values():
                for kind, code in kinds.items():
                    stream = tar.extractfile(f"package/img/google/64/{code}.png")
                    if stream is None:
                        raise ValueError(
                            f"{PACKAGE} has no picture {code!r} for kind {kind!r}; choose another code point"
                        )
                    picture = Image.open(stream).convert("RGBA")
                    picture.crop(picture.getbbox()).save(target / f"{kind}.png", optimize=True)


def draw_glyphs(target: Path) -> None:
    """Rasterise digits and capitals of both fonts, one cell per glyph, left to right."""
    target.mkdir(parents=True, exist_ok=True)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name, file in FONT_FILES.items():
        font = ImageFont.truetype(str(fonts / file), 56)
        sheet = Image.new("L", (CELL * len(GLYPHS), CELL))
        pen = ImageDraw.Draw(sheet)
        for index, glyph in enumerate(GLYPHS):
            pen.text((index * CELL + CELL // 2, 54), glyph, fill=255, font=font, anchor="ms")
        sheet.save(target / f"{name}.png", optimize=True)
    shutil.copy(fonts / "LICENSE_DEJAVU", target / "LICENSE_DEJAVU")


if __name__ == "__main__":
    fetch_emoji(ASSETS / "emoji")
    draw_glyphs(ASSETS / "fonts")
