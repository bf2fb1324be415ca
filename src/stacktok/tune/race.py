"""The search and the recommendation, on outcomes alone: nothing here knows a model.

Settings race over the samples of the search by successive halving. After every rung those go that cannot meet the
promise any more, those that a setting of no higher cost beats in a paired comparison, and then the least promising
until half are left. The recommendation is made on samples that the search never saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stacktok.evaluation.statistics import (
    Interval,
    lower_bounds,
    mean_interval,
    percentile_interval,
    resampled_means,
)

Floats = NDArray[np.float64]
Key = TypeVar("Key")

FINALISTS = 4
"""Settings that are measured on held-out samples, at most."""

SEARCH = 0.5
"""Share of the pictures on which settings race."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One setting on some samples.

    Attributes
    ----------
    quality
        Of every sample, in [0, 1], (N,).
    log_prob
        Log-probability of the full model's answer, (N,).
    cost
        Tokens per layer of every sample, (N,).
    """

    quality: Floats
    log_prob: Floats
    cost: Floats


Measure = Callable[[Sequence[Key], Sequence[int]], Mapping[Key, Measured]]
"""Measures settings on samples, given by number."""


@dataclass(frozen=True)
class Verdict(Generic[Key]):
    """One finalist on the held-out samples.

    Attributes
    ----------
    setting
        Which.
    kept
        Quality over that of the full model, with a 95 % interval.
    at_least
        Its one-sided lower bound, 95 %.
    log_prob
        Mean log-probability of the full model's answer.
    cost
        Mean tokens per layer.
    tested, passed
        Whether it came to be tested, and whether its lower bound meets the promise.
    """

    setting: Key
    kept: Interval
    at_least: float
    log_prob: Interval
    cost: float
    tested: bool
    passed: bool


def split_pictures(groups: Sequence[str], seed: int = 0, share: float = SEARCH) -> tuple[list[int], list[int]]:
    """Samples of the search in random order of pictures, and held-out ones; no picture has samples in both."""
    names = list(dict.fromkeys(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    place = {names[number]: rank for rank, number in enumerate(order.tolist())}
    cut = round(share * len(names))
    numbers = sorted(range(len(groups)), key=lambda number: (place[groups[number]], number))
    return [n for n in numbers if place[groups[n]] < cut], [n for n in numbers if place[groups[n]] >= cut]


@dataclass(frozen=True, eq=False)
class Kept(Generic[Key]):
    """The share of the full model's quality that settings keep on the same samples.

    Attributes
    ----------
    share
        Quality over that of the full model, with a 95 % interval from resampling pictures.
    at_least
        One-sided lower bound of the share, 95 %: a promise rests on it.
    replicates
        Mean quality on resampled pictures, the same ones for all settings, (R,).
    """

    share: dict[Key, Interval]
    at_least: dict[Key, float]
    replicates: dict[Key, Floats]


def kept(quality: Mapping[Key, Floats], full: Floats, groups: Sequence[str]) -> Kept[Key]:
    """Compare settings with the full model.

    Parameters
    ----------
    quality
        Of every sample, by setting, (N,).
    full
        Of the full model, (N,).
    groups
        Picture of every sample.
    """
    if full.sum() <= 0:
        raise ValueError(
            "the full model has no right answer, so that nothing can be kept of its quality; check the data"
        )
    _, labels, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    sums = np.stack([np.bincount(labels, weights=own) for own in (*quality.values(), full)], axis=1)
    means = resampled_means(sums, counts)
    ratios = (means / means[:, -1:])[means[:, -1] > 0]
    bounds = lower_bounds(sums[:, :-1], sums[:, -1])
    shares = {
        key: percentile_interval(float(own.sum() / full.sum()), ratios[:, column], len(sums))
        for column, (key, own) in enumerate(quality.items())
    }
    return Kept(
        shares,
        dict(zip(quality, bounds.tolist(), strict=True)),
        {key: means[:, column] for column, key in enumerate(quality)},
    )


def rungs(count: int, first: int) -> list[int]:
    """Sizes of the rungs: doubled from the first to all samples."""
    sizes = [min(first, count)]
    while sizes[-1] < count:
        sizes.append(min(2 * sizes[-1], count))
    return sizes


def race(
    settings: Sequence[Key],
    measure: Measure[Key],
    full: Floats,
    groups: Sequence[str],
    search: Sequence[int],
    keep: float,
    *,
    first: int = 32,
    finalists: int = FINALISTS,
    rung_done: Callable[[int, Sequence[Key]], None] = lambda size, left: None,
) -> list[Key]:
    """Settings that are worth the held-out samples, the most trustworthy first.

    Parameters
    ----------
    settings
        All settings.
    measure
        Measures settings on samples.
    full
        Quality of the full model on every sample, (N,).
    groups
        Picture of every sample.
    search
        Samples of the search, in order.
    keep
        Share of the full model's quality that is promised.
    first
        Samples of the first rung.
    finalists
        How many settings are left in the end, at most.
    rung_done
        Called after every rung with its size and the settings that are left.
    """
    left = list(settings)
    sizes = rungs(len(search), first)
    for number, size in enumerate(sizes):
        part = list(search[:size])
        found = measure(left, part)
        own, reference = [groups[n] for n in part], full[part]
        all_kept = kept({key: found[key].quality for key in left}, reference, own)
        left = [key for key in left if not all_kept.share[key].high < keep] or left
        left = _unbeaten(left, found, all_kept, len(set(own)))
        wanted = finalists if number == len(sizes) - 1 else max(finalists, math.ceil(len(left) / 2))
        left = _promising(left, found, all_kept, keep)[:wanted]
        rung_done(size, left)
    return sorted(left, key=lambda key: (-all_kept.at_least[key], float(found[key].cost.mean())))


def _promising(left: Sequence[Key], found: Mapping[Key, Measured], all_kept: Kept[Key], keep: float) -> list[Key]:
    """Settings that seem to keep enough, front by front, and then the others by quality.

    A front holds the safest setting, the safest of those that cost less, and so on to the cheapest. Of it the safest
    comes first, then those that are sure enough already, the cheapest first, and then the others by their bounds. Of
    equal bounds, which few samples give, the log-probability of the full model's answers decides, and then the higher
    cost.
    """
    shares, bounds = all_kept.share, all_kept.at_least
    costs = {key: float(found[key].cost.mean()) for key in left}
    scores = {key: float(found[key].log_prob.mean()) for key in left}
    waiting = sorted(
        (key for key in left if shares[key].estimate >= keep),
        key=lambda key: (-bounds[key], -scores[key], -costs[key]),
    )
    ordered: list[Key] = []
    while waiting:
        front: list[Key] = []
        for key in waiting:
            if not front or costs[key] < costs[front[-1]]:
                front.append(key)
        waiting = [key for key in waiting if key not in front]
        ordered += [front[0], *sorted(front[1:], key=lambda key: _rank(bounds[key], costs[key], keep))]
    rest = sorted(
        (key for key in left if shares[key].estimate < keep),
        key=lambda key: (-shares[key].estimate, costs[key], -scores[key]),
    )
    return [*ordered, *rest]


def _rank(bound: float, cost: float, keep: float) -> tuple[float, float]:
    """Of a setting in its front: sure ones by cost, then the others by bound."""
    return (0.0, cost) if bound >= keep else (1.0, -bound)


def _unbeaten(left: Sequence[Key], found: Mapping[Key, Measured], all_kept: Kept[Key], pictures: int) -> list[Key]:
    """Settings that no other of at most the same cost beats beyond chance, in quality."""
    costs = {key: float(found[key].cost.mean()) for key in left}
    stays = []
    for key in left:
        rivals = [
            other
            for other in left
            if other is not key
            and costs[other] <= costs[key]
            and found[other].quality.mean() > found[key].quality.mean()
        ]
        rivals.sort(key=lambda other: -float(found[other].quality.mean()))
        beaten = False
        for other in rivals[:3]:
            difference = percentile_interval(
                float((found[other].quality - found[key].quality).mean()),
                all_kept.replicates[other] - all_kept.replicates[key],
                pictures,
            )
            beaten |= difference.known and difference.low > 0
        if not beaten:
            stays.append(key)
    return stays


def verdicts(
    finalists: Sequence[Key], found: Mapping[Key, Measured], full: Floats, groups: Sequence[str], keep: float
) -> list[Verdict[Key]]:
    """Test finalists on held-out samples in their given order, and stop at the first that fails.

    The order was fixed by the search alone, so that all tests together are wrong no more often than one (a fixed
    sequence of tests); the cheapest that passed may be recommended.

    Parameters
    ----------
    finalists
        Settings, the most trustworthy first.
    found
        Their outcomes on the held-out samples.
    full
        Quality of the full model on these samples, (N,).
    groups
        Picture of every sample.
    keep
        Share of the full model's quality that is promised.
    """
    rows: list[Verdict[Key]] = []
    open_ = True
    all_kept = kept({key: found[key].quality for key in finalists}, full, groups)
    for key in finalists:
        bound = all_kept.at_least[key]
        passed = open_ and bound >= keep
        likelihood = mean_interval(found[key].log_prob, groups=list(groups))
        rows.append(Verdict(key, all_kept.share[key], bound, likelihood, float(found[key].cost.mean()), open_, passed))
        open_ = passed
    return rows


def cheapest(rows: Sequence[Verdict[Key]]) -> Verdict[Key] | None:
    """The recommendation: the cheapest setting that passed; None where none did."""
    return min((row for row in rows if row.passed), key=lambda row: (row.cost, -row.at_least), default=None)
