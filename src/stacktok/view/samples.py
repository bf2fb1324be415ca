"""Pictures to begin with: scenes that were never trained on, with questions that fit them."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

COUNT = 6


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture with questions.

    Attributes
    ----------
    name
        Its name in links.
    source
        A Python expression that makes the picture.
    imports
        What that expression needs.
    """

    name: str
    picture: Image.Image
    questions: tuple[str, ...]
    source: str = ""
    imports: str = ""


def scene_samples(count: int = COUNT) -> tuple[Sample, ...]:
    """The first scenes of the test split."""
    from stacktok.scenes import make_scene, questions, render, seed_for

    samples = []
    for index in range(count):
        scene = make_scene(seed_for("test", index))
        samples.append(
            Sample(
                name=f"scene-{index}",
                picture=render(scene),
                questions=tuple(question.text for question in questions(scene)),
                source=f'render(make_scene(seed_for("test", {index})))',
                imports="from stacktok.scenes import make_scene, render, seed_for",
            )
        )
    return tuple(samples)
