"""Pictures that are named by their uuid alone."""

from __future__ import annotations

import numpy as np
from PIL import Image

from stacktok.serving.pictures import Pictures, picture_bytes


def picture(side: int = 10) -> Image.Image:
    return Image.new("RGB", (side, side))


def test_a_known_picture_is_put_in_and_an_unknown_one_is_not() -> None:
    pictures, first, second = Pictures(), picture(), picture()
    assert pictures.resolve(["a", None], [first, second]) == [first, second]
    found = pictures.resolve(["b", "a", "a"], [None, None, second])
    assert found[0] is None
    assert found[1] is first
    assert found[2] is second
    assert pictures.resolve(["a"], [None])[0] is second
    assert len(pictures) == 1


def test_the_longest_unused_go_first_and_bytes_are_bounded() -> None:
    pictures = Pictures(700)
    pictures.resolve(["a", "b"], [picture(), picture()])
    pictures.resolve(["a"], [None])
    pictures.resolve(["c"], [picture()])
    assert [one is None for one in pictures.resolve(["a", "b", "c"], [None] * 3)] == [False, True, False]
    assert pictures.bytes == 600
    pictures.resolve(["large"], [picture(20)])
    assert len(pictures) == 2
    pictures.resolve(["c"], [picture(11)])
    assert pictures.bytes == 300 + 363


def test_sizes_of_pictures() -> None:
    assert picture_bytes(picture()) == 300
    assert picture_bytes(Image.new("L", (10, 10))) == 100
    assert picture_bytes(np.zeros((4, 5, 3), dtype=np.uint8)) == 60
