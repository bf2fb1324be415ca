"""Error bars: bootstrap intervals and paired tests on items that several methods answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Comparison:
    """A paired difference: its interval, and the chance of one as large if the two were alike."""

    difference: Interval
    p_value: float


def mean_interval(
    items: ArrayLike, *, confidence: float = 0.95, seed: int = 0, groups: ArrayLike | None = None
) -> Interval:
    """Mean of item scores with a percentile bootstrap interval.

    Parameters
    ----------
    items
        Score of every item, (N,).
    confidence
        Coverage of the interval, in (0, 1).
    seed
        Of the resampling.
    groups
        Which cluster every item belongs to (questions on one image are not independent), (N,); clusters are resampled
        as wholes. None resamples items.
    """
    values = _values(items, "items")
    means = _bootstrap_means(values, groups, seed)
    return _interval(float(values.mean()), means, confidence)


def paired_comparison(
    first: ArrayLike,
    second: ArrayLike,
    *,
    confidence: float = 0.95,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> Comparison:
    """Mean of first - second over the same items: bootstrap interval and sign-flip permutation test.

    Parameters
    ----------
    first, second
        Score of every item under the two methods, (N,), in the same order.
    confidence, seed, groups
        As in `mean_interval`; the test flips the sign of whole clusters.
    """
    a, b = _values(first, "first"), _values(second, "second")
    if len(a) != len(b):
        raise ValueError(f"first has {len(a)} items and second {len(b)}; a paired comparison needs the same items")
    difference = a - b
    interval = mean_interval(difference, confidence=confidence, seed=seed, groups=groups)
    sums, _ = _clusters(difference, groups)
    observed = abs(float(sums.sum()))
    moved = sums[sums != 0]
    if len(moved) == 0:
        return Comparison(interval, 1.0)
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(RESAMPLES // 100):
        signs = rng.choice((-1.0, 1.0), size=(100, len(moved)))
        hits += int((np.abs(signs @ moved) >= observed - 1e-9).sum())
    # Counting the observed labelling itself keeps the p-value above zero and the test valid.
    return Comparison(interval, (hits + 1) / (RESAMPLES + 1))


def _values(items: ArrayLike, name: str) -> NDArray[np.float64]:
    values = np.asarray(items, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} has shape {values.shape}; give a list of at least one score")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds NaN or infinity; every item needs a score")
    return values


def _clusters(values: NDArray[np.float64], groups: ArrayLike | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and size of every cluster."""
    if groups is None:
        return values, np.ones(len(values))
    labels = np.asarray(groups)
    if labels.shape != values.shape:
        raise ValueError(f"groups has shape {labels.shape} for {len(values)} items; give one label per item")
    _, inverse = np.unique(labels, return_inverse=True)
    sums = np.bincount(inverse, weights=values).astype(np.float64)
    return sums, np.bincount(inverse).astype(np.float64)


def _bootstrap_means(values: NDArray[np.float64], groups: ArrayLike | None, seed: int) -> NDArray[np.float64]:
    sums, sizes = _clusters(values, groups)
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 100):
        drawn = rng.integers(len(sums), size=(100, len(sums)))
        means[start : start + 100] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return means


def _interval(estimate: float, means: NDArray[np.float64], confidence: float) -> Interval:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must lie in (0, 1)")
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(estimate, float(low), float(high))
