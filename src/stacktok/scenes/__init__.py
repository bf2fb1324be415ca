"""Procedural scenes and questions about them.

A seed gives a scene, a scene gives a picture and questions, and all three are the same on every machine:

>>> from stacktok.scenes import make_scene, questions, render, seed_for
>>> scene = make_scene(seed_for("test", 0))
>>> picture = render(scene)
>>> asked = questions(scene)
"""

from stacktok.scenes.parquet import write_parquet
from stacktok.scenes.questions import FAMILIES, Question, questions
from stacktok.scenes.render import render
from stacktok.scenes.scene import DETAIL, STANDARD, Scene, Sign, Style, Thing, make_scene
from stacktok.scenes.splits import RANGES, Split, require_split, seed_for, split_of

__all__ = [
    "DETAIL",
    "FAMILIES",
    "RANGES",
    "STANDARD",
    "Question",
    "Scene",
    "Sign",
    "Split",
    "Style",
    "Thing",
    "make_scene",
    "questions",
    "render",
    "require_split",
    "seed_for",
    "split_of",
    "write_parquet",
]
