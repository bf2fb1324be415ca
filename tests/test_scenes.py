"""Scenes are reproducible, their questions balanced and their answers right."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from stacktok.scenes import (
    DETAIL,
    FAMILIES,
    RANGES,
    STANDARD,
    Style,
    make_scene,
    questions,
    render,
    require_split,
    seed_for,
    split_of,
)
from stacktok.scenes.render import render_with_owners
from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY
from tests.scene_answers import derive_answer


def fingerprint(seeds: range, style: Style) -> str:
    """Hash of descriptions, questions and pixels."""
    digest = hashlib.sha256()
    for seed in seeds:
        scene = make_scene(seed, style)
        digest.update(repr(scene).encode())
        digest.update(repr(questions(scene, 2)).encode())
        digest.update(render(scene).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (STANDARD, "2f27efbca7d16432be08cfedd21238ef82006a279bb56d3d0230273bc16d935d"),
        (DETAIL, "48d920a52dbb8410edbd21adb3a2dde9f60150d99277561f05c4d02f08f32e3e"),
    ],
    ids=["standard", "detail"],
)
def test_scenes_are_the_same_bytes_everywhere(style: Style, expected: str) -> None:
    start = seed_for("test", 0)
    assert fingerprint(range(start, start + 40), style) == expected


def test_every_background_is_among_the_hashed_scenes() -> None:
    assert {make_scene(seed_for("test", k)).background for k in range(40)} == set(BACKGROUNDS)


def test_splits_share_no_seed() -> None:
    ranges = list(RANGES.values())
    assert all(a.stop <= b.start for a, b in pairwise(ranges))
    for split in RANGES:
        assert split_of(seed_for(split, 0)) == split
        assert split_of(seed_for(split, len(RANGES[split]) - 1)) == split


def test_a_seed_of_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to split 'test', not 'train'"):
        require_split(seed_for("test", 3), "train")
    with pytest.raises(ValueError, match="index is -1"):
        seed_for("dev", -1)
    with pytest.raises(ValueError, match="split is 'validation'"):
        seed_for("validation", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed is -5"):
        make_scene(-5)


@pytest.mark.parametrize("style", [STANDARD, DETAIL], ids=["standard", "detail"])
def test_answers_follow_from_the_description(style: Style) -> None:
    for index in range(600):
        scene = make_scene(seed_for("dev", index), style)
        for question in questions(scene, 3):
            assert derive_answer(scene, question.text) == question.answer, (scene, question)


@pytest.mark.parametrize("style", [STANDARD, DETAIL], ids=["standard", "detail"])
def test_objects_lie_apart_and_inside(style: Style) -> None:
    for index in range(200):
        scene = make_scene(seed_for("dev", index), style)
        taken = np.zeros((scene.size, scene.size), dtype=int)
        for item in (*scene.things, *scene.signs):
            left, top, right, bottom = item.box
            assert 0 <= left < right <= scene.size
            assert 0 <= top < bottom <= scene.size
            taken[top:bottom, left:right] += 1
        assert taken.max() == 1


def test_owners_name_the_object_under_each_pixel() -> None:
    scene = make_scene(seed_for("dev", 1))
    _, owners = render_with_owners(scene)
    for index, item in enumerate((*scene.things, *scene.signs)):
        rows, columns = np.nonzero(owners == index)
        assert rows.size > 100
        assert item.box[0] <= columns.min() <= columns.max() < item.box[2]
        assert item.box[1] <= rows.min() <= rows.max() < item.box[3]


def test_a_blind_guess_stays_at_chance() -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for index in range(2500):
        for question in questions(make_scene(seed_for("dev", index))):
            answers[question.family][question.answer] += 1
            forms[question.text.split()[0] + question.family][question.answer] += 1
    chance = {
        "existence": 1 / 2,
        "reading": 1 / 40,
        "position": 1 / 4,
        "what-is-where": 1 / 64,
        "counting": 1 / 5,
    }
    for family, expected in chance.items():
        top = answers[family].most_common(1)[0][1] / answers[family].total()
        assert top < expected + 0.035, (family, answers[family].most_common(3))
    for form, counter in forms.items():
        if {"yes", "no"} <= counter.keys():
            assert abs(counter["yes"] - counter["no"]) < 0.07 * counter.total(), (form, counter)
    assert set(answers) == set(FAMILIES)


def test_no_kind_answers_itself() -> None:
    """The kind in an existence question tells nothing about the answer."""
    tally: dict[str, Counter[str]] = defaultdict(Counter)
    for index in range(4000):
        for question in questions(make_scene(seed_for("dev", index))):
            if question.family == "existence":
                tally[question.text][question.answer] += 1
    guess = sum(counter.most_common(1)[0][1] for counter in tally.values())
    assert guess / sum(counter.total() for counter in tally.values()) < 0.58
    assert len(tally) > len(CATEGORY)


def test_local_and_holistic_families_are_marked() -> None:
    asked = questions(make_scene(seed_for("test", 0)), 2)
    assert {question.family for question in asked if not question.local} <= {"counting", "comparison", "background"}
    assert sum(FAMILIES.values()) == 5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="per_family is 0"):
        questions(make_scene(0), 0)
    with pytest.raises(ValueError, match="thing_edge is"):
        Style(size=64)
    with pytest.raises(ValueError, match="it must be worded"):
        derive_answer(make_scene(0), "Who is there?")
