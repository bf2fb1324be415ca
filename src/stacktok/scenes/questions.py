"""Questions about a scene, with answers drawn first so that no family can be answered without looking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stacktok.scenes.draw import Draw
from stacktok.scenes.scene import Box, Scene
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY, COLOURS, COUNTS, KINDS

FAMILIES: Final[dict[str, bool]] = {
    "existence": True,
    "reading": True,
    "position": True,
    "relation": True,
    "what-is-where": True,
    "counting": False,
    "comparison": False,
    "background": False,
}
"""Family -> whether its questions are local (a few places of the picture decide) or holistic."""

SIDE_MARGIN: Final = 14 / 336
"""A thing nearer than this to a middle line (share of the canvas edge) has no side that could be asked for."""

RELATION_MARGIN: Final = 36 / 336
"""Two things whose centres differ by less than this on an axis are in no order on it."""


@dataclass(frozen=True)
class Question:
    """A question about one scene."""

    text: str
    answer: str
    family: str

    @property
    def local(self) -> bool:
        """Whether a few places of the picture decide the answer."""
        return FAMILIES[self.family]


def questions(scene: Scene, per_family: int = 1) -> list[Question]:
    """Ask about a scene, in every family that it allows.

    Parameters
    ----------
    scene : Scene
        What is asked about.
    per_family : int
        Up to how many different questions per family.

    Returns
    -------
    list of Question
        The same list for the same scene on every machine.
    """
    if per_family < 1:
        raise ValueError(f"per_family is {per_family}; it must be at least 1")
    result: list[Question] = []
    for index, (family, ask) in enumerate(_ASK.items()):
        draw = Draw(scene.seed * 16 + index)
        asked: dict[str, Question] = {}
        for _ in range(4 * per_family):
            if len(asked) == per_family:
                break
            pair = ask(scene, draw)
            if pair is not None:
                asked.setdefault(pair[0], Question(pair[0], pair[1], family))
        result += asked.values()
    return result


Pair = tuple[str, str]


def _existence(scene: Scene, draw: Draw) -> Pair | None:
    answer = draw.chance(0.5)
    if scene.signs and draw.chance(0.2):
        shown = [sign.colour for sign in scene.signs]
        colour = draw.choice([c for c in COLOURS if (c in shown) == answer])
        return f"Is there {_article(colour)} {colour} sign?", _yes(answer)
    present = [kind for kind in CATEGORY if scene.count(kind)]
    if answer:
        kind = draw.choice(present)
    else:
        absent = [kind for kind in CATEGORY if kind not in present]
        # Half of the absent kinds resemble something that is there.
        near = [kind for kind in absent if CATEGORY[kind] in {CATEGORY[p] for p in present}]
        kind = draw.choice(near if draw.chance(0.5) else absent)
    return f"Is there {_article(kind)} {kind}?", _yes(answer)


def _reading(scene: Scene, draw: Draw) -> Pair | None:
    if not scene.signs:
        return None
    sign = draw.choice(scene.signs)
    return f"What {'number' if sign.is_number else 'word'} is on the {sign.colour} sign?", sign.text


def _position(scene: Scene, draw: Draw) -> Pair | None:
    placed = [(name, side) for name, box in _named(scene) if (side := _side(box, scene.size)) is not None]
    if not placed:
        return None
    name, side = draw.choice(placed)
    return f"Where is the {name}?", side


def _relation(scene: Scene, draw: Draw) -> Pair | None:
    named = _named(scene)
    pairs = []
    for first, a in named:
        for second, b in named:
            if first == second:
                continue
            (ax, ay), (bx, by) = _centre(a), _centre(b)
            margin = RELATION_MARGIN * scene.size
            if abs(ax - bx) >= margin:
                pairs.append((first, second, "left" if ax < bx else "right"))
            if abs(ay - by) >= margin:
                pairs.append((first, second, "above" if ay < by else "below"))
    if not pairs:
        return None
    first, second, truth = draw.choice(pairs)
    one, other = ("left", "right") if truth in ("left", "right") else ("above", "below")
    if draw.chance(0.3):
        if one == "left":
            return f"Is the {first} left or right of the {second}?", truth
        return f"Is the {first} above or below the {second}?", truth
    answer = draw.chance(0.5)
    asked = truth if answer else (other if truth == one else one)
    return f"Is the {first} {asked}{' of' if one == 'left' else ''} the {second}?", _yes(answer)


def _what_is_where(scene: Scene, draw: Draw) -> Pair | None:
    found: list[Pair] = []
    for category in (*KINDS, "object"):
        members = [thing for thing in scene.things if category in ("object", CATEGORY[thing.kind])]
        sides = [_side(thing.box, scene.size) for thing in members]
        if None in sides:
            continue
        found += [
            (f"Which {category} is in the {side}?", thing.kind)
            for thing, side in zip(members, sides, strict=True)
            if sides.count(side) == 1
        ]
    return draw.choice(found) if found else None


def _counting(scene: Scene, draw: Draw) -> Pair | None:
    target = draw.integer(0, 4)
    group = scene.things[0].kind if scene.things else ""
    if target > 1 and scene.count(group) > 1:
        # The first group's size is drawn evenly from two to four, so asking for it in three cases of five is balanced.
        kind = group
    else:
        kinds = [kind for kind in CATEGORY if scene.count(kind) == min(target, 1)]
        if not kinds:
            return None
        kind = draw.choice(kinds)
    return f"How many {kind}s are there?", COUNTS[scene.count(kind)]


def _comparison(scene: Scene, draw: Draw) -> Pair | None:
    counts = {kind: scene.count(kind) for kind in CATEGORY if scene.count(kind)}
    pairs = [(a, b) for a in counts for b in counts if counts[a] > counts[b]]
    if not pairs:
        return None
    more, fewer = draw.choice(pairs)
    answer = draw.chance(0.5)
    first, second = (more, fewer) if answer else (fewer, more)
    if draw.chance(0.3):
        return f"Are there more {first}s or {second}s?", f"{more}s"
    return f"Are there more {first}s than {second}s?", _yes(answer)


def _background(scene: Scene, draw: Draw) -> Pair | None:
    if draw.chance(0.5):
        return "What is the background?", scene.background
    answer = draw.chance(0.5)
    name = scene.background if answer else draw.choice([b for b in BACKGROUNDS if b != scene.background])
    return f"Is the background {name}?", _yes(answer)


_ASK: Final[dict[str, Callable[[Scene, Draw], Pair | None]]] = {
    "existence": _existence,
    "reading": _reading,
    "position": _position,
    "relation": _relation,
    "what-is-where": _what_is_where,
    "counting": _counting,
    "comparison": _comparison,
    "background": _background,
}


def _named(scene: Scene) -> list[tuple[str, Box]]:
    """Things and signs that a name points to without doubt."""
    things = [(thing.kind, thing.box) for thing in scene.things if scene.count(thing.kind) == 1]
    return things + [(f"{sign.colour} sign", sign.box) for sign in scene.signs]


def _centre(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _side(box: Box, size: int) -> str | None:
    x, y = _centre(box)
    if min(abs(x - size / 2), abs(y - size / 2)) < SIDE_MARGIN * size:
        return None
    return f"{'top' if y < size / 2 else 'bottom'} {'left' if x < size / 2 else 'right'}"


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
