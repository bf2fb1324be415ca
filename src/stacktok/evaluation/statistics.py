"""Error bars: bootstrap intervals and paired tests on items that several methods answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 5_000

SMALLEST_BOOTSTRAP = 20
"""Fewest independent items, or clusters of items, that are resampled: below, replicates say little of the spread."""

SMALLEST_TEST = 6
"""Fewest items or clusters in a sign-flip test: five that all agree have p = 2 / 2**5, which is above 0.05."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; low and high are NaN where the items allow none."""

    estimate: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def __str__(self) -> str:
        return self.text("")

    def text(self, sign: str) -> str:
        """The estimate, and the interval in brackets where it is known; ``sign`` is "+" or empty."""
        numbers = [f"{value:{sign}.2f}" for value in (self.estimate, self.low, self.high)]
        return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]" if self.known else numbers[0]


@dataclass(frozen=True)
class Comparison:
    """A paired difference and its test.

    Attributes
    ----------
    difference
        With its interval.
    p_value
        Chance of a difference as large if the two were alike; NaN where the items allow no test.
    units
        Number of independent items, or clusters of items.
    smallest
        Fewest units from which the test may decide.
    """

    difference: Interval
    p_value: float
    units: int
    smallest: int

    @property
    def decidable(self) -> bool:
        """Whether there are enough items for a verdict."""
        return self.units >= self.smallest


def mean_interval(
    items: ArrayLike, *, confidence: float = 0.95, seed: int = 0, groups: ArrayLike | None = None
) -> Interval:
    """Mean of item scores with a percentile bootstrap interval, see `percentile_interval`.

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
    sums, sizes = _clusters(values, groups)
    return percentile_interval(float(values.mean()), resampled_means(sums, sizes, seed), len(sums), confidence)


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
        As in `mean_interval`; the test flips the sign of whole clusters. Few clusters are flipped in every way there
        is, which makes the p-value exact.
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
        return Comparison(interval, 1.0, len(sums), SMALLEST_TEST)
    if 2 ** len(moved) <= RESAMPLES:
        codes = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))
        signs = 1.0 - 2.0 * (codes & 1)
        p_value = float((np.abs(signs @ moved) >= observed - 1e-9).mean())
        return Comparison(interval, p_value, len(sums), SMALLEST_TEST)
    hits = 0
    for signs in _random_blocks(_signs, len(sums), seed, RESAMPLES):
        hits += int((np.abs(signs @ sums) >= observed - 1e-9).sum())
    # Counting the observed labelling itself keeps the p-value above zero and the test valid.
    return Comparison(interval, (hits + 1) / (RESAMPLES + 1), len(sums), SMALLEST_TEST)


def percentile_interval(
    estimate: float, replicates: NDArray[np.float64], units: int, confidence: float = 0.95
) -> Interval:
    """Percentile interval of bootstrap replicates, widened for few units as Student's interval is.

    Plain percentiles are those of the normal law with the spread of the sample, too narrow by sqrt((n - 1) / n) and by
    the ratio of the normal to Student's quantile; the expanded percentiles of Hesterberg (2015, section 6.2) make up
    for both. There is no interval below `SMALLEST_BOOTSTRAP` units, nor where all replicates are equal: items of which
    none differs do not show their spread.

    Parameters
    ----------
    estimate
        On all items.
    replicates
        The estimate on resampled items, (R,).
    units
        Number of items or clusters that were resampled.
    confidence
        Coverage of the interval, in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must lie in (0, 1)")
    if units < SMALLEST_BOOTSTRAP or np.ptp(replicates) == 0:
        return Interval(estimate)
    normal = NormalDist()
    z, freedom = normal.inv_cdf((1 + confidence) / 2), units - 1
    # Student's quantile by its expansion about the normal one; off by less than 1e-4 from 19 degrees of freedom.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    tail = normal.cdf(-math.sqrt(units / freedom) * t)
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))


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


def resampled_means(sums: ArrayLike, sizes: ArrayLike, seed: int = 0) -> NDArray[np.float64]:
    """Means over resampled clusters, (R,) or (R, P); NaN where a resample has no items.

    The draws depend on the number of clusters alone, so that means of two methods on the same clusters are paired, and
    those of two parts of the same clusters are drawn together.

    Parameters
    ----------
    sums, sizes
        Sum of the scores and number of the items of every cluster, (C,), or of every cluster and part, (C, P); where
        all parts have the same items, their numbers may be (C,).
    seed
        Of the resampling.
    """
    values, counts = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    parts = values.reshape(len(values), -1)
    totals = np.concatenate([parts, counts.reshape(len(values), -1)], axis=1)
    drawn = np.concatenate([block @ totals for block in _random_blocks(_draws, len(totals), seed, RESAMPLES)])
    above, below = drawn[:, : parts.shape[1]], drawn[:, parts.shape[1] :]
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = (above / below).reshape(-1, *values.shape[1:])
    return means


def lower_bounds(parts: ArrayLike, whole: ArrayLike, confidence: float = 0.95, seed: int = 0) -> NDArray[np.float64]:
    """One-sided lower confidence bounds of shares: of sums over clusters in another sum over the same clusters, (P,).

    Clusters get random weights of a flat Dirichlet law, and so does one more cluster with as large a whole as the
    largest, of which nothing is left; the bound is the quantile of the shares. That is Gaffke's bound of a mean (2005):
    it needs no law of the outcomes, and for one outcome of 0 or 1 per cluster it is the exact bound of Clopper and
    Pearson (1934), the quantile of a beta law with one miss more than was seen.

    Parameters
    ----------
    parts
        Sum of every cluster, for each share, (C, P).
    whole
        What the sums are a share of, (C,).
    confidence
        Chance that a bound is below its share, in (0, 1).
    seed
        Of the weights.
    """
    totals = np.column_stack([np.asarray(parts, np.float64), np.asarray(whole, np.float64)])
    lost = np.zeros(totals.shape[1])
    lost[-1] = totals[:, -1].max()
    totals = np.concatenate([totals, lost[None]])
    drawn = np.concatenate([block @ totals for block in _random_blocks(_weights, len(totals), seed, RESAMPLES)])
    found: NDArray[np.float64] = np.quantile(drawn[:, :-1] / drawn[:, -1:], 1 - confidence, axis=0)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down rule; NaN stays, and counts for nothing."""
    known = sorted((p, number) for number, p in enumerate(p_values) if not math.isnan(p))
    corrected, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, number) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[number] = highest
    return corrected


Block = NDArray[np.float64]
MakeBlock = Callable[[np.random.Generator, int, int], Block]


def _random_blocks(make: MakeBlock, clusters: int, seed: int, resamples: int) -> Iterable[Block]:
    """Random numbers of every resample and cluster, in blocks of resamples; kept for the next use where few."""
    return (_kept_blocks if clusters <= 1000 else _blocks)(make, clusters, seed, resamples)


@lru_cache(maxsize=4)
def _kept_blocks(make: MakeBlock, clusters: int, seed: int, resamples: int) -> tuple[Block, ...]:
    return tuple(_blocks(make, clusters, seed, resamples))


def _blocks(make: MakeBlock, clusters: int, seed: int, resamples: int) -> Iterator[Block]:
    rng = np.random.default_rng(seed)
    for first in range(0, resamples, 500):
        yield make(rng, min(500, resamples - first), clusters)


def _draws(rng: np.random.Generator, rows: int, clusters: int) -> Block:
    """How often every cluster is drawn."""
    drawn = rng.integers(clusters, size=(rows, clusters)) + clusters * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * clusters).reshape(rows, clusters).astype(np.float64)


def _weights(rng: np.random.Generator, rows: int, clusters: int) -> Block:
    """Weights of a flat Dirichlet law, up to their sum."""
    return rng.standard_exponential((rows, clusters))


def _signs(rng: np.random.Generator, rows: int, clusters: int) -> Block:
    return (1 - 2 * rng.integers(2, size=(rows, clusters))).astype(np.float64)
