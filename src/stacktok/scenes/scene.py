"""Scenes, and how one is laid out from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stacktok.scenes.draw import Draw
from stacktok.scenes.splits import split_of
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY, COLOURS, FONTS, WORDS

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; right and bottom are outside."""


@dataclass(frozen=True)
class Thing:
    """One picture in a scene."""

    kind: str
    box: Box


@dataclass(frozen=True)
class Sign:
    """A coloured plate that carries a number or a word."""

    text: str
    colour: str
    font: str
    box: Box

    @property
    def is_number(self) -> bool:
        """Whether the text is a number (else a word)."""
        return self.text.isdigit()


@dataclass(frozen=True)
class Scene:
    """The full description of a picture; everything a question can ask for follows from it."""

    seed: int
    size: int
    background: str
    things: tuple[Thing, ...]
    signs: tuple[Sign, ...]

    def count(self, kind: str) -> int:
        """How many pictures of a kind the scene has."""
        return sum(thing.kind == kind for thing in self.things)


@dataclass(frozen=True)
class Style:
    """The look of one sort of scenes.

    Parameters
    ----------
    size : int
        Edge of the square canvas in pixels.
    thing_edge : tuple of int
        Smallest and largest long edge of a picture.
    groups : bool
        Whether a scene holds a kind two to four times and a second kind up to three times (needed for counting).
    singles : tuple of int
        Smallest and largest number of further kinds, each once.
    sign_chances : tuple of float
        Probability of 0, 1, 2, ... signs.
    sign_edge : tuple of int
        Width and height of a sign.
    snap : int
        Signs lie on a grid of this pitch, to within one pixel; 0 places them freely. A vision tower this small reads
        digits only when they fall on its patches in a regular way.
    snap_things : bool
        Whether pictures lie on the same grid.
    max_things : int
        Upper limit of the number of pictures.
    """

    size: int = 336
    thing_edge: tuple[int, int] = (50, 98)
    groups: bool = True
    singles: tuple[int, int] = (1, 3)
    sign_chances: tuple[float, ...] = (0.15, 0.45, 0.4)
    sign_edge: tuple[int, int] = (84, 56)
    snap: int = 14
    snap_things: bool = False
    max_things: int = 9

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out."""
        if not 8 <= self.thing_edge[0] <= self.thing_edge[1] <= self.size:
            raise ValueError(
                f"thing_edge is {self.thing_edge}; it must rise from at least 8 to at most size {self.size}"
            )
        if len(self.sign_chances) > 1 and max(self.sign_edge) > self.size:
            raise ValueError(f"sign_edge is {self.sign_edge}; signs must fit into size {self.size}")


STANDARD: Final = Style()
"""Scenes for one 336-pixel view."""

DETAIL: Final = Style(thing_edge=(34, 84), sign_chances=(0.0, 0.4, 0.6))
"""Scenes with small pictures and always a sign: in a base view of half size a letter is seven pixels wide."""


def make_scene(seed: int, style: Style = STANDARD) -> Scene:
    """Lay out the scene of a seed.

    Parameters
    ----------
    seed : int
        A seed of one of the splits (`splits.seed_for`).
    style : Style
        What the scene may hold.
    """
    split_of(seed)
    draw = Draw(seed)
    background = draw.choice(BACKGROUNDS)
    chosen = _choose_kinds(draw, style)
    wording = _choose_signs(draw, style)
    shrink = 1.0
    while True:
        boxes = _place(draw, style, len(wording), len(chosen), shrink)
        if boxes is not None:
            break
        shrink *= 0.96
    signs = tuple(Sign(*words, box) for words, box in zip(wording, boxes[: len(wording)], strict=True))
    things = tuple(Thing(kind, box) for kind, box in zip(chosen, boxes[len(wording) :], strict=True))
    return Scene(seed, style.size, background, things, signs)


def _choose_kinds(draw: Draw, style: Style) -> list[str]:
    kinds = draw.shuffled(tuple(CATEGORY))
    singles = draw.integer(*style.singles)
    chosen: list[str] = []
    if style.groups:
        # Uniform over two to four: with "zero" and "one" drawn as often, the counting answers are balanced.
        chosen += [kinds.pop()] * draw.integer(2, 4)
        chosen += [kinds.pop()] * draw.integer(1, 3)
    chosen += [kinds.pop() for _ in range(singles)]
    return chosen[: style.max_things]


def _choose_signs(draw: Draw, style: Style) -> list[tuple[str, str, str]]:
    level = draw.uniform(0.0, 1.0)
    count = 0
    for chance in style.sign_chances[:-1]:
        level -= chance
        if level < 0:
            break
        count += 1
    colours = draw.sample(tuple(COLOURS), count)
    texts = [str(draw.integer(10, 99)) if draw.chance(0.5) else draw.choice(WORDS) for _ in colours]
    return [(text, colour, draw.choice(FONTS)) for text, colour in zip(texts, colours, strict=True)]


def _place(draw: Draw, style: Style, signs: int, things: int, shrink: float) -> list[Box] | None:
    boxes: list[Box] = []
    for index in range(signs + things):
        for _ in range(60):
            box = _sign_box(draw, style) if index < signs else _thing_box(draw, style, shrink)
            if all(_apart(box, other) for other in boxes):
                boxes.append(box)
                break
        else:
            return None
    return boxes


def _sign_box(draw: Draw, style: Style) -> Box:
    width, height = style.sign_edge
    if style.snap:
        x = style.snap * draw.integer(0, (style.size - width) // style.snap) + draw.integer(-1, 1)
        y = style.snap * draw.integer(0, (style.size - height) // style.snap) + draw.integer(-1, 1)
        x, y = (min(max(v, 0), style.size - edge) for v, edge in ((x, width), (y, height)))
    else:
        x, y = draw.integer(0, style.size - width), draw.integer(0, style.size - height)
    return x, y, x + width, y + height


def _thing_box(draw: Draw, style: Style, shrink: float) -> Box:
    edge = max(int(draw.integer(*style.thing_edge) * shrink), 8)
    if style.snap_things:
        edge = max(edge // style.snap, 1) * style.snap
        x = style.snap * draw.integer(0, (style.size - edge) // style.snap)
        y = style.snap * draw.integer(0, (style.size - edge) // style.snap)
    else:
        x, y = draw.integer(0, style.size - edge), draw.integer(0, style.size - edge)
    return x, y, x + edge, y + edge


def _apart(a: Box, b: Box) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
