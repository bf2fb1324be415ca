"""Answers derived a second time, from a question's words and the scene's description alone.

Nothing here is shared with the code that asks: a mistake there shows as a difference.
"""

from __future__ import annotations

import re
from collections import Counter

from stacktok.scenes.scene import Box, Scene
from stacktok.scenes.vocabulary import KINDS


def derive_answer(scene: Scene, text: str) -> str:
    """Read a question and answer it from the scene's description.

    Parameters
    ----------
    scene : Scene
        What is asked about.
    text : str
        A question as `questions` words it.
    """
    tally = Counter(thing.kind for thing in scene.things)
    if match := re.fullmatch(r"Is there an? (\w+) sign\?", text):
        return _truth(any(sign.colour == match[1] for sign in scene.signs))
    if match := re.fullmatch(r"Is there an? (\w+)\?", text):
        return _truth(tally[match[1]] > 0)
    if match := re.fullmatch(r"What (number|word) is on the (\w+) sign\?", text):
        (found,) = (sign.text for sign in scene.signs if sign.colour == match[2])
        if found.isnumeric() != (match[1] == "number"):
            raise ValueError(f"question {text!r} asks for a {match[1]}, but the {match[2]} sign carries {found!r}")
        return found
    if match := re.fullmatch(r"Where is the (.+)\?", text):
        return _corner(_only(scene, match[1]), scene.size)
    if match := re.fullmatch(r"Which (\w+) is in the (\w+ \w+)\?", text):
        wanted = {kind for category, kinds in KINDS.items() if match[1] in (category, "object") for kind in kinds}
        (found,) = (t.kind for t in scene.things if t.kind in wanted and _corner(t.box, scene.size) == match[2])
        return found
    if match := re.fullmatch(r"How many (\w+)s are there\?", text):
        return ("zero", "one", "two", "three", "four")[tally[match[1]]]
    if match := re.fullmatch(r"Are there more (\w+)s (than|or) (\w+)s\?", text):
        first, second = tally[match[1]], tally[match[3]]
        if first == second:
            raise ValueError(f"question {text!r} has no answer: both occur {first} times")
        if match[2] == "than":
            return _truth(first > second)
        return f"{match[1] if first > second else match[3]}s"
    if text == "What is the background?":
        return scene.background
    if match := re.fullmatch(r"Is the background (\w+)\?", text):
        return _truth(scene.background == match[1])
    if match := re.fullmatch(r"Is the (.+?) (left or right of|above or below) the (.+)\?", text):
        across, down = _offset(scene, match[1], match[3])
        if match[2].startswith("left"):
            return "left" if across < 0 else "right"
        return "above" if down < 0 else "below"
    if match := re.fullmatch(r"Is the (.+?) (left of|right of|above|below) the (.+)\?", text):
        across, down = _offset(scene, match[1], match[3])
        measure = {"left of": -across, "right of": across, "above": -down, "below": down}[match[2]]
        return _truth(measure > 0)
    raise ValueError(f"text is {text!r}; it must be worded as one of the scene questions")


def _only(scene: Scene, name: str) -> Box:
    """Box of the one object that bears a name."""
    boxes = [thing.box for thing in scene.things if thing.kind == name]
    boxes += [sign.box for sign in scene.signs if f"{sign.colour} sign" == name]
    if len(boxes) != 1:
        raise ValueError(f"name {name!r} fits {len(boxes)} objects of scene {scene.seed}; it must fit exactly one")
    return boxes[0]


def _offset(scene: Scene, first: str, second: str) -> tuple[int, int]:
    """Twice the way from the second object's centre to the first's, right and down."""
    a, b = _only(scene, first), _only(scene, second)
    return a[0] + a[2] - b[0] - b[2], a[1] + a[3] - b[1] - b[3]


def _corner(box: Box, size: int) -> str:
    down, across = box[1] + box[3] > size, box[0] + box[2] > size
    return " ".join((("top", "bottom")[down], ("left", "right")[across]))


def _truth(value: bool) -> str:
    return "yes" if value else "no"
