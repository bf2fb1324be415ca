"""Intervals cover what they say they cover; the paired test has the level it says it has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stacktok.evaluation import statistics
from stacktok.evaluation.statistics import mean_interval, paired_comparison


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        interval = mean_interval(rng.random(120) < 0.7, seed=trial, confidence=0.9)
        hits += interval.low <= 0.7 <= interval.high
    assert 165 <= hits <= 195


def test_items_that_share_an_image_widen_the_interval():
    images = np.repeat(np.random.default_rng(0).random(40) < 0.5, 10)
    alone = mean_interval(images)
    clustered = mean_interval(images, groups=np.repeat(np.arange(40), 10))
    assert clustered.estimate == alone.estimate
    assert clustered.high - clustered.low > 2.5 * (alone.high - alone.low)


def test_no_difference_is_rarely_called_one():
    rng = np.random.default_rng(1)
    calls = 0
    for trial in range(200):
        a, b = rng.random((2, 80)) < 0.6
        calls += paired_comparison(a, b, seed=trial).p_value < 0.05
    assert 2 <= calls <= 22


def test_a_clear_difference_is_found_and_signed():
    rng = np.random.default_rng(2)
    easy, hard = rng.random(400) < 0.8, rng.random(400) < 0.6
    found = paired_comparison(easy, hard)
    assert found.p_value < 0.002
    assert found.difference.low > 0
    assert paired_comparison(hard, easy).difference.estimate == -found.difference.estimate


def test_identical_answers_are_no_evidence():
    same = paired_comparison([1, 0, 1], [1, 0, 1])
    assert same.p_value == 1
    assert same.difference.estimate == 0
    assert not same.difference.known


def test_few_items_get_an_interval_that_covers_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(1000):
        interval = mean_interval(rng.standard_normal(20), seed=trial)
        hits += interval.low <= 0 <= interval.high
    # 950 expected with a spread of 7; plain percentiles reach 924.
    assert 932 <= hits <= 971


def test_fewer_items_than_can_be_resampled_get_no_interval():
    scores = np.random.default_rng(4).random(20)
    assert mean_interval(scores).known
    assert not mean_interval(scores[:19]).known
    assert not mean_interval(np.repeat(scores[:19], 10), groups=np.repeat(np.arange(19), 10)).known
    assert not mean_interval(np.ones(500)).known
    assert str(mean_interval(np.ones(500))) == "1.00"


@pytest.mark.parametrize("size", [1, 2, 5, 6, 9])
def test_few_clusters_are_tested_exactly(size):
    rng = np.random.default_rng(size)
    first, second = rng.integers(0, 5, (2, size)).astype(float)
    difference = first - second
    flipped = [abs(np.dot(signs, difference)) for signs in itertools.product((-1, 1), repeat=size)]
    expected = np.mean([value >= abs(difference.sum()) - 1e-9 for value in flipped])
    assert paired_comparison(first, second).p_value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "items has shape"),
        (lambda: mean_interval([1, float("nan")]), "items holds NaN"),
        (lambda: mean_interval([1, 0], confidence=1.5), r"confidence=1.5 must lie in \(0, 1\)"),
        (lambda: mean_interval([1, 0], groups=[1]), "give one label per item"),
        (lambda: paired_comparison([1, 0], [1]), "first has 2 items and second 1"),
    ],
)
def test_bad_items_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_holms_rule_on_a_worked_example():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1; the last may not fall below the one before.
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.5, float("nan"), 0.6])[0::2] == pytest.approx([1, 1])
