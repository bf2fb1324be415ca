"""Exact incremental greedy, compiled for processors.

Adding token s changes only the rows with A_is > c_i, so a gain is kept up to date by what those rows lose; on grid
affinities the update is exact. Rows that picks raise are noted, and coverage gains are updated only when coverage next
scores a step: the first picks raise nearly all rows, and one update then serves many picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from stacktok.kernels import CRITERIA, Floats, Ints, Mask, Matrix, Problem, Rule, Steps, Swap
from stacktok.kernels.compiled import compiled

_T = TypeVar("_T")

_GATED, _RELEVANCE, _COVERAGE, _SCALARIZED = (int(rule) for rule in Rule)
_BY_RELEVANCE, _BY_COVERAGE, _BY_SUM, _BY_INDEX = range(len(CRITERIA))
_UNLIMITED = 0
# Entries whose update takes much longer than handing it to other threads.
_WORTH_SPLITTING = 1 << 20


class State(NamedTuple):
    """Query-independent state of an image or crop.

    Attributes
    ----------
    matrix
        A^vv, (n, n).
    sums
        Its column sums, (n,): the coverage gains of the empty set.
    eligible
        Positions that may be kept, (n,).
    """

    matrix: Matrix
    sums: Floats
    eligible: Mask


def precompute(vision_affinity: Matrix, eligible: Mask) -> State:
    """Query-independent state from A^vv, (n, n), and the positions that may be kept, (n,)."""
    sums = np.zeros(len(eligible))
    parts = _ranges(len(sums)) if vision_affinity.size >= _WORTH_SPLITTING else [(0, len(sums))]
    _run_parallel([partial(_add_rows, vision_affinity, sums, *ends) for ends in parts])
    return State(vision_affinity, sums, eligible)


def greedy(problems: Sequence[Problem]) -> list[Steps]:
    """Run several greedy selections in parallel."""
    if len(problems) == 1:
        return [_greedy(problems[0])]
    return _run_parallel([partial(_greedy, problem) for problem in problems])


def _greedy(problem: Problem) -> Steps:
    (matrix, sums, eligible), query, targets, rule, depth, alpha, weights = problem
    n, m, k = len(sums), len(query), len(targets)
    if query.dtype != matrix.dtype:
        # One compiled signature per type of entries.
        matrix, query = matrix.astype(np.float64, copy=False), query.astype(np.float64)
    # A depth that no set reaches is an unlimited one.
    depth = _UNLIMITED if depth is None or depth > k else int(depth)
    gains = np.zeros((2, n))
    gains[0] = sums
    _add_rows(query, gains[1], 0, n)
    gains[:, ~eligible] = -np.inf
    raised, synced = np.zeros((2, n), dtype=matrix.dtype)
    stale, largest = np.zeros(n + 1, dtype=np.int64), np.zeros((m, depth + 1))
    order, criterion, bound = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.bool_)
    steps = Steps(order, criterion, bound, np.zeros(k + 1), np.zeros(k + 1))
    factors = np.ones(n) if weights is None else weights
    kind = (int(rule), depth, float(alpha), factors)
    t, run = 0, (matrix, query, targets, *kind, gains, raised, synced, stale, largest, steps)
    while (t := _steps(*run, t)) < k:
        _run_parallel([partial(_lower_gains, matrix, stale, synced, raised, gains[0], *ends) for ends in _ranges(n)])
        synced[:] = raised
        stale[0] = 0
    return steps


def allocate(gains: Sequence[Floats], total: int) -> tuple[Ints, Ints]:
    """Algorithm 2 from the nominees' gains; parameters and result as in `stacktok.core.reference.allocate`.

    A crop that wins with some gain goes on winning until a nominee of its own gains less. So the steps are all nominees
    in falling order of the smallest gain that their crop has shown so far, ties by crop, then in their own order.
    """
    lowest = np.concatenate([np.minimum.accumulate(own) for own in gains])
    crops = np.repeat(np.arange(len(gains)), [len(own) for own in gains])
    winners = crops[np.argsort(-lowest, kind="stable")[:total]]
    won = winners[:, None] == np.arange(len(gains))
    return winners, np.cumsum(won, axis=0) - won


def refine(
    vision_affinity: Matrix,
    query_affinity: Matrix,
    kept: Ints,
    eligible: Mask,
    depth: int | None,
    target: float,
    epsilon: float,
    passes: int | None,
) -> tuple[Ints, list[Swap]]:
    """Swap refinement, Eq. (swap).

    Parameters
    ----------
    vision_affinity, query_affinity
        A^vv, (n, n), and A^qv, (m, n).
    kept
        The retained set, (r,).
    eligible
        Positions that may be kept, (n,).
    depth
        Kept tokens per query row that count towards relevance; None for all.
    target
        n theta_r, the support target at the set's size.
    epsilon, passes
        Smallest relative improvement; number of passes, None until one accepts nothing.

    Returns
    -------
    tuple
        Sorted indices after the swaps, and the accepted swaps.
    """
    if query_affinity.dtype != vision_affinity.dtype:
        vision_affinity = vision_affinity.astype(np.float64, copy=False)
        query_affinity = query_affinity.astype(np.float64)
    n, m, current = len(vision_affinity), len(query_affinity), np.sort(kept)
    counted = len(current) if depth is None else min(depth, len(current))
    # Rows that have as many kept tokens as they count: another must exceed the least of them.
    full = depth is not None and depth <= len(current)
    outside = eligible.copy()
    outside[current] = False
    top_v, top_q = np.zeros((n, 2)), np.zeros((m, counted + 1))
    _top(vision_affinity, current, top_v)
    _top(query_affinity, current, top_q)
    # Coverage gains of the set: those of the empty set, less what its rows have already.
    gains, rows = np.zeros((3, n)), np.arange(-1, n)
    rows[0] = n
    _add_rows(vision_affinity, gains[0], 0, n)
    thresholds = np.zeros((2, n), dtype=vision_affinity.dtype)
    thresholds[1] = top_v[:, 0]
    _lower_gains(vision_affinity, rows, *thresholds, gains[0], 0, n)
    swaps: list[Swap] = []
    limits, found = (float(target), float(epsilon)), np.zeros((len(current), 4))
    while passes is None or passes > 0:
        passes = None if passes is None else passes - 1
        arrays = (np.sort(current), current, outside, top_v, top_q, gains, found)
        accepted = _swap_pass(vision_affinity, query_affinity, counted, full, *limits, *arrays)
        swaps += [Swap(int(out), int(into), before, after) for out, into, before, after in found[:accepted].tolist()]
        if not accepted:
            break
    return np.sort(current), swaps


def _run_parallel(tasks: Sequence[Callable[[], _T]]) -> list[_T]:
    """Results of tasks that run without the GIL, on as many threads as torch uses."""
    workers = min(torch.get_num_threads(), len(tasks))
    if workers < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(workers) as pool:
        return [result.result() for result in [pool.submit(task) for task in tasks]]


def _ranges(count: int) -> list[tuple[int, int]]:
    """0 to ``count`` in one part per thread."""
    threads = torch.get_num_threads()
    return list(pairwise(count * part // threads for part in range(threads + 1)))


@compiled
def _add_rows(a, sums, first, last):  # type: ignore[no-untyped-def]
    """Add all rows of a matrix to ``sums``, from column ``first`` to ``last``."""
    part = sums[first:last]
    for i in range(a.shape[0]):
        row = a[i, first:last]
        for j in range(len(part)):
            part[j] += np.float64(row[j])


@compiled
def _add_between(row, low, high, sign, gains):  # type: ignore[no-untyped-def]
    """Add a row's gains over ``low`` less those over ``high``, times ``sign``: [a - low]_+ - [a - high]_+.

    That is a, clamped to low and high, less low. Thresholds are entries of the matrix or 0, so that its own type holds
    them and clamping is exact there; sums and differences are taken in float64.
    """
    for j in range(len(gains)):
        gains[j] += sign * (np.float64(min(max(row[j], low), high)) - np.float64(low))


@compiled
def _lower_gains(a, stale, old, new, gains, first, last):  # type: ignore[no-untyped-def]
    """Gains after the thresholds of stale rows, whose number comes first, rose from old to new."""
    part = gains[first:last]
    for q in range(1, 1 + stale[0]):
        i = stale[q]
        row, low, high = a[i, first:last], old[i], new[i]
        for j in range(len(part)):
            part[j] += np.float64(low) - np.float64(min(max(row[j], low), high))


@compiled
def _best(gains, weights):  # type: ignore[no-untyped-def]
    """Lowest index of the largest positive weighted gain, -1 if there is none; tokens out of play hold -infinity."""
    token, best = -1, 0.0
    for j in range(len(gains)):
        score = gains[j] * weights[j]
        if score > best:
            token, best = j, score
    return token


@compiled
def _steps(av, aq, targets, rule, depth, alpha, weights, gains, raised, synced, stale, largest, steps, start):  # type: ignore[no-untyped-def]
    """Steps of Algorithm 1 from ``start`` on; returns the step before which an update is worth splitting, or k.

    ``gains`` are those of coverage and relevance, (2, n). ``raised`` holds the row maxima of the kept set, ``synced``
    those that the coverage gains account for, ``stale`` the rows in which they differ, after their number. ``largest``
    holds the largest kept affinities of every query row in falling order, after them what a token must exceed.
    """
    n, m = av.shape[0], aq.shape[0]
    # By index: unpacked rows would not be known to be contiguous.
    coverage_gains, relevance_gains = gains[0], gains[1]
    order, criterion, bound, relevance_sums, coverage_sums = steps
    saturated = False
    for t in range(start, len(order)):
        deficit = targets[t] > coverage_sums[t]
        token, by = -1, _BY_INDEX
        # Gains only fall: relevance that gains nothing at one step gains nothing at any later one.
        if not saturated and (rule == _RELEVANCE or (rule == _GATED and not deficit)):
            token, by = _best(relevance_gains, weights), _BY_RELEVANCE
            saturated = token < 0
        if token < 0 and rule != _RELEVANCE:
            if stale[0] * n >= _WORTH_SPLITTING:
                return t
            _lower_gains(av, stale, synced, raised, coverage_gains, 0, n)
            for q in range(1, 1 + stale[0]):
                synced[stale[q]] = raised[stale[q]]
            stale[0] = 0
            if rule == _SCALARIZED:
                highest = 0.0
                for j in range(n):
                    score = (relevance_gains[j] / max(m, 1) + alpha * (coverage_gains[j] / n)) * weights[j]
                    if score > highest:
                        highest = score
                        token, by = j, _BY_SUM
            else:
                token, by = _best(coverage_gains, weights), _BY_COVERAGE
                if token < 0 and rule == _GATED and deficit:
                    token, by = _best(relevance_gains, weights), _BY_RELEVANCE
        if token < 0:
            token, by = 0, _BY_INDEX
            while relevance_gains[token] == -np.inf:
                token += 1
        coverage = coverage_sums[t]
        column = av[:, token]
        for i in range(n):
            if column[i] > raised[i]:
                coverage += np.float64(column[i]) - np.float64(raised[i])
                if raised[i] == synced[i]:
                    stale[0] += 1
                    stale[stale[0]] = i
                raised[i] = column[i]
        relevance = relevance_sums[t]
        for i in range(m):
            a = np.float64(aq[i, token])
            threshold = largest[i, depth]
            if a > threshold:
                relevance += a - threshold
                if depth != _UNLIMITED:
                    place = depth - 1
                    while place > 0 and largest[i, place - 1] < a:
                        largest[i, place] = largest[i, place - 1]
                        place -= 1
                    largest[i, place] = a
                    lowest = largest[i, depth - 1]
                    if lowest > threshold:
                        entry = aq.dtype.type
                        _add_between(aq[i], entry(threshold), entry(lowest), -1.0, relevance_gains)
                        largest[i, depth] = lowest
        coverage_gains[token] = relevance_gains[token] = -np.inf
        order[t] = token
        criterion[t] = by
        bound[t] = deficit and rule == _GATED
        relevance_sums[t + 1] = relevance
        coverage_sums[t + 1] = coverage
    return len(order)


@compiled
def _top(a, kept, top):  # type: ignore[no-untyped-def]
    """The largest entries of every row over the kept tokens, in falling order, padded with zeros, into ``top``."""
    count = top.shape[1]
    for i in range(a.shape[0]):
        for place in range(count):
            top[i, place] = 0.0
        for token in kept:
            value = np.float64(a[i, token])
            place = count
            while place > 0 and top[i, place - 1] < value:
                if place < count:
                    top[i, place] = top[i, place - 1]
                place -= 1
            if place < count:
                top[i, place] = value


@compiled
def _swap_pass(av, aq, counted, full, target, epsilon, order, kept, outside, top_v, top_q, gains, swaps):  # type: ignore[no-untyped-def]
    """One pass of exchanges with top-two deletions (top r + 1 for relevance that counts r tokens); see `refine`.

    Tokens are tried in ``order``. ``gains`` are those of coverage, of coverage without the token, and of relevance, (3,
    n). Accepted swaps go to ``swaps``; returns their number. Loops are written out: array expressions take much longer
    to compile.
    """
    n, m, accepted, entry = av.shape[0], aq.shape[0], 0, av.dtype.type
    coverage_gains, without, relevance_gains = gains[0], gains[1], gains[2]
    for out in order:
        coverage = relevance = 0.0
        for i in range(n):
            coverage += top_v[i, 0]
        for i in range(m):
            for place in range(counted):
                relevance += top_q[i, place]
        before = relevance / max(m, 1) + coverage / n
        floor = min(target, coverage)
        for j in range(n):
            without[j], relevance_gains[j] = coverage_gains[j], 0.0
        # Deleting `out` lowers only the rows that it alone represents; all other gains stay as they are.
        for i in range(n):
            if av[i, out] == top_v[i, 0] and top_v[i, 0] > top_v[i, 1]:
                coverage -= top_v[i, 0] - top_v[i, 1]
                _add_between(av[i], entry(top_v[i, 1]), entry(top_v[i, 0]), 1.0, without)
        for i in range(m):
            threshold = top_q[i, counted - 1]
            if aq[i, out] >= threshold:
                threshold = top_q[i, counted]
                relevance -= np.float64(aq[i, out]) - threshold
            _add_between(aq[i], entry(threshold if full else 0.0), entry(np.inf), 1.0, relevance_gains)
        into, highest = -1, -np.inf
        for j in range(n):
            if outside[j] and coverage + without[j] >= floor:
                after = (relevance + relevance_gains[j]) / max(m, 1) + (coverage + without[j]) / n
                if after > (1.0 + epsilon) * before and after > highest:
                    into, highest = j, after
        if into < 0:
            continue
        swap = swaps[accepted]
        swap[0], swap[1], swap[2], swap[3] = out, into, before, highest
        accepted += 1
        outside[out], outside[into] = True, False
        for place in range(len(kept)):
            if kept[place] == out:
                kept[place] = into
        for i in range(n):
            without[i] = top_v[i, 0]
        _top(av, kept, top_v)
        _top(aq, kept, top_q)
        for i in range(n):
            old, new = without[i], top_v[i, 0]
            if old < new:
                _add_between(av[i], entry(old), entry(new), -1.0, coverage_gains)
            elif new < old:
                _add_between(av[i], entry(new), entry(old), 1.0, coverage_gains)
    return accepted
