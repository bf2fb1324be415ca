"""The compiled backend: exact incremental greedy, without the interpreter's lock.

Adding token s changes only the rows with A_is > c_i, so a gain is kept up to date by what those rows lose; on grid
affinities the update is exact. Rows raised by relevance picks are noted and their coverage gains brought up to date
only when coverage next scores a step: the first picks raise nearly all rows, and one update then serves for many.
Updates of millions of entries, which only images of thousands of tokens have, are split over all cores by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity, empty_matrix
from stacktok.core.inputs import Mask
from stacktok.kernels import CRITERIA, Floats, Ints, Rule
from stacktok.kernels.compiled import Kernel, Region, compiled
from stacktok.kernels.team import count_of, count_up, memory, run_in_team
from stacktok.kernels.threads import over_ranges, parallel_address

_GATED, _RELEVANCE, _COVERAGE, _SCALARIZED = (int(rule) for rule in Rule)
_BY_RELEVANCE, _BY_COVERAGE, _BY_SUM, _BY_INDEX = range(len(CRITERIA))
_UNLIMITED = 0

# Entries whose update takes much longer than to hand it to other threads.
_WORTH_SPLITTING = 1 << 20
# Entries that are looked at together, to pass over them if none of them counts.
_STRIP = 64
# Entries up to which a transposed copy is kept: a pick then reads its column from one place, for twice the memory.
_WORTH_TURNING = 1 << 22


@compiled
def _add_columns(a, sums, first, last):  # type: ignore[no-untyped-def]
    part = sums[first:last]
    for i in range(a.shape[0]):
        row = a[i, first:last]
        for j in range(len(part)):
            part[j] += np.float64(row[j])


@compiled
def _lower(row, old, new, gains):  # type: ignore[no-untyped-def]
    """Gains after a row's threshold rose from old to new: [a - old]_+ - [a - new]_+ is lost.

    That is a, clamped to old and new, less old. Thresholds are entries of the matrix or 0, so that its own type holds
    them and clamping is exact there; sums and differences are taken in float64.
    """
    for j in range(len(gains)):
        gains[j] += np.float64(old) - np.float64(min(max(row[j], old), new))


@compiled
def _lower_gains(a, stale, old, new, gains, first, last):  # type: ignore[no-untyped-def]
    """`_lower` for all stale rows, whose number comes first: four at a time, and the rest one by one."""
    part = gains[first:last]
    whole = 1 + stale[0] // 4 * 4
    for q in range(1, whole, 4):
        i0, i1, i2, i3 = stale[q], stale[q + 1], stale[q + 2], stale[q + 3]
        o0, o1, o2, o3 = old[i0], old[i1], old[i2], old[i3]
        w0, w1, w2, w3 = new[i0], new[i1], new[i2], new[i3]
        a0, a1, a2, a3 = a[i0, first:last], a[i1, first:last], a[i2, first:last], a[i3, first:last]
        if max(max(o0, o1), max(o2, o3)) == 0:
            # Most rows of a walk rise from 0 in one update.
            for j in range(len(part)):
                after01 = np.float64(min(a0[j], w0)) + np.float64(min(a1[j], w1))
                after23 = np.float64(min(a2[j], w2)) + np.float64(min(a3[j], w3))
                part[j] -= after01 + after23
        else:
            before = (np.float64(o0) + np.float64(o1)) + (np.float64(o2) + np.float64(o3))
            for j in range(len(part)):
                after01 = np.float64(min(max(a0[j], o0), w0)) + np.float64(min(max(a1[j], o1), w1))
                after23 = np.float64(min(max(a2[j], o2), w2)) + np.float64(min(max(a3[j], o3), w3))
                part[j] += before - (after01 + after23)
    for q in range(whole, 1 + stale[0]):
        i = stale[q]
        _lower(a[i, first:last], old[i], new[i], part)


@partial(compiled, fastmath={"nnan", "nsz"})
def _best(gains):  # type: ignore[no-untyped-def]
    """Lowest index of the largest gain; tokens out of play hold minus infinity."""
    best, token = -np.inf, 0
    for start in range(0, len(gains), _STRIP):
        strip = gains[start : start + _STRIP]
        highest = -np.inf
        for j in range(len(strip)):
            highest = max(highest, strip[j])
        if highest > best:
            best, token = highest, start
    while token < len(gains) and gains[token] != best:
        token += 1
    return token, best


@compiled
def _state_size(n, m, capacity, depth):  # type: ignore[no-untyped-def]
    """How much memory a walk needs, in numbers of eight bytes."""
    return 5 * capacity + 3 + 5 * n + m * (max(1, depth) + 1)


@compiled
def _carve_record(state, capacity):  # type: ignore[no-untyped-def]
    """What a walk has to show for itself: see `stacktok.kernels.Walk`."""
    end = 2 * capacity + 2
    return (
        state[:end].reshape((2, capacity + 1)),
        state[end : end + 3 * capacity].view(np.int64).reshape((3, capacity)),
    )


@compiled
def _carve(state, n, m, capacity, depth, entries):  # type: ignore[no-untyped-def]
    """The rest of a walk's memory; ``entries`` is of the type of A^vv."""
    levels, end = max(1, depth), 5 * capacity + 2
    # Rows whose maxima have risen since coverage gains were brought up to date, after their number.
    stale, end = state[end : end + 1 + n].view(np.int64), end + 1 + n
    # Gains; tokens out of play hold minus infinity.
    coverage_gains, end = state[end : end + n], end + n
    relevance_gains, end = state[end : end + n], end + n
    # The largest kept affinities of every query row, and the smallest of them: what a token must exceed.
    largest, end = state[end : end + m * levels].reshape((m, levels)), end + m * levels
    threshold, end = state[end : end + m], end + m
    # Row maxima of the kept set, and those that the coverage gains account for.
    raised, end = state[end : end + n].view(entries.dtype)[:n], end + n
    synced = state[end : end + n].view(entries.dtype)[:n]
    return stale, coverage_gains, relevance_gains, largest, threshold, raised, synced


@compiled
def _steps(av, columns, sums, eligible, capacity, aq, rule, depth, alpha, state, targets, start, stop):  # type: ignore[no-untyped-def]
    """Steps of Algorithm 1; returns the step before which an update is worth splitting, or stop."""
    n, m = av.shape[0], aq.shape[0]
    totals, picks = _carve_record(state, capacity)
    relevance_sums, coverage_sums = totals[0], totals[1]
    order, criterion, bound = picks[0], picks[1], picks[2]
    carved = _carve(state, n, m, capacity, depth, av)
    stale, coverage_gains, relevance_gains, largest, threshold, raised, synced = carved
    if start == 0:
        stale[0] = 0
        coverage_gains[:] = sums
        relevance_gains[:] = 0.0
        _add_columns(aq, relevance_gains, 0, n)
        for j in range(n):
            if not eligible[j]:
                coverage_gains[j] = relevance_gains[j] = -np.inf
        largest[:] = 0.0
        threshold[:] = 0.0
        raised[:] = 0
        synced[:] = 0
    served = False
    for t in range(start, stop):
        deficit = targets[t] > coverage_sums[t]
        token, by = -1, _BY_INDEX
        # Gains only fall: relevance that gains nothing at one step gains nothing at any later one.
        if not served and (rule == _RELEVANCE or (rule == _GATED and not deficit)):
            candidate, gain = _best(relevance_gains)
            served = not gain > 0.0
            if not served:
                token, by = candidate, _BY_RELEVANCE
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
                    score = relevance_gains[j] / max(m, 1) + alpha * (coverage_gains[j] / n)
                    if score > highest:
                        highest = score
                        token, by = j, _BY_SUM
            else:
                candidate, gain = _best(coverage_gains)
                if gain > 0.0:
                    token, by = candidate, _BY_COVERAGE
                elif rule == _GATED and deficit:
                    candidate, gain = _best(relevance_gains)
                    if gain > 0.0:
                        token, by = candidate, _BY_RELEVANCE
        if token < 0:
            for j in range(n):
                if relevance_gains[j] > -np.inf:
                    token = j
                    break
        coverage = coverage_sums[t]
        for start_of_strip in range(0, n, _STRIP):
            strip = slice(start_of_strip, start_of_strip + _STRIP)
            column, high = columns[token, strip], raised[strip]
            above = 0
            for i in range(len(high)):
                above |= column[i] > high[i]
            if above:
                for i in range(len(high)):
                    if column[i] > high[i]:
                        coverage += np.float64(column[i]) - np.float64(high[i])
                        if high[i] == synced[start_of_strip + i]:
                            stale[0] += 1
                            stale[stale[0]] = start_of_strip + i
                        high[i] = column[i]
        relevance = relevance_sums[t]
        for i in range(m):
            a = np.float64(aq[i, token])
            if a > threshold[i]:
                relevance += a - threshold[i]
                if depth != _UNLIMITED:
                    place = depth - 1
                    while place > 0 and largest[i, place - 1] < a:
                        largest[i, place] = largest[i, place - 1]
                        place -= 1
                    largest[i, place] = a
                    lowest = largest[i, depth - 1]
                    if lowest > threshold[i]:
                        entry = aq.dtype.type
                        _lower(aq[i], entry(threshold[i]), entry(lowest), relevance_gains)
                        threshold[i] = lowest
        coverage_gains[token] = relevance_gains[token] = -np.inf
        order[t] = token
        criterion[t] = by
        bound[t] = deficit and rule == _GATED
        relevance_sums[t + 1] = relevance
        coverage_sums[t + 1] = coverage
    return stop


_extend = Kernel(_steps)

# What threads are told of a walk: addresses and sizes of what `_steps` takes.
_WALK = np.dtype(
    [
        (name, np.float64 if name == "alpha" else np.int64)
        for name in (
            "av", "columns", "sums", "eligible", "capacity", "aq", "rule", "depth", "alpha", "state", "n", "m",
        )
    ]
)  # fmt: skip
# And of where it is: how far it has come, where it goes, and where its targets begin.
_START, _STOP, _TARGETS = range(3)
_TEAM = np.dtype([(name, np.int64) for name in ("walks", "ends", "targets", "length", "counters", "count", "threads")])


@Region
def _share(address):  # type: ignore[no-untyped-def]
    """What every thread does: take walks and extend them, until there are no more."""
    team = carray(address, (1,), _TEAM)[0]
    walks = carray(memory(team.walks), (team.count,), _WALK)
    ends = carray(memory(team.ends), (team.count, 3), np.int64)
    targets = carray(memory(team.targets), (team.length,), np.float64)
    # What is taken, and from there on what is done of every walk.
    counters = carray(memory(team.counters), (1 + team.count,), np.int64)
    # With five walks for two threads, one is taken in halves, at the beginning and at the end.
    halved = team.count % team.threads
    whole = team.count - halved
    while True:
        taken = count_up(counters, 0)
        if taken >= team.count + halved:
            return
        if taken < halved:
            c = whole + taken
            stop = (ends[c, _START] + ends[c, _STOP]) // 2
        elif taken < team.count:
            c = taken - halved
            stop = ends[c, _STOP]
        else:
            c = whole + taken - team.count
            # Another thread may be at the first half.
            while count_of(counters, 1 + c) == 0:
                pass
            stop = ends[c, _STOP]
        w, start = walks[c], ends[c, _START]
        if stop > start:
            reached = _steps(
                carray(memory(w.av), (w.n, w.n), np.float32),
                carray(memory(w.columns), (w.n, w.n), np.float32),
                carray(memory(w.sums), (w.n,), np.float64),
                carray(memory(w.eligible), (w.n,), np.bool_),
                w.capacity,
                carray(memory(w.aq), (w.m, w.n), np.float32),
                w.rule,
                w.depth,
                w.alpha,
                carray(memory(w.state), (_state_size(w.n, w.m, w.capacity, w.depth),), np.float64),
                targets[ends[c, _TARGETS] :],
                start,
                stop,
            )
            if reached < stop:
                # An update is worth all threads: the walk goes on when this team has done its work.
                ends[c, _STOP] = reached
            ends[c, _START] = reached
        count_up(counters, 1 + c)


@Kernel
def _extend_together(walks, ends, targets, parallel, region, threads):  # type: ignore[no-untyped-def]
    counters, job = np.zeros(1 + len(walks), np.int64), np.empty(1, _TEAM)
    team = job[0]
    team.walks, team.ends, team.targets = walks.ctypes.data, ends.ctypes.data, targets.ctypes.data
    team.counters, team.count, team.length, team.threads = counters.ctypes.data, len(walks), len(targets), threads
    run_in_team(parallel, region, job, threads, (walks, ends, targets, counters))


@compiled
def _top(a, kept, count):  # type: ignore[no-untyped-def]
    """The ``count`` largest entries of every row over the kept tokens, in falling order, padded with zeros."""
    top = np.zeros((a.shape[0], count))
    for i in range(a.shape[0]):
        for token in kept:
            value = np.float64(a[i, token])
            if value > top[i, count - 1]:
                place = count - 1
                while place > 0 and top[i, place - 1] < value:
                    top[i, place] = top[i, place - 1]
                    place -= 1
                top[i, place] = value
    return top


@compiled
def _gains_over(a, threshold):  # type: ignore[no-untyped-def]
    gains = np.zeros(a.shape[1])
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            gains[j] += max(np.float64(a[i, j]) - threshold[i], 0.0)
    return gains


@Kernel
def _refine(av, aq, kept, eligible, depth, target, epsilon, passes):  # type: ignore[no-untyped-def]
    """One-exchange passes with top-two deletions (top r + 1 for relevance of depth r); see `Backend.refine`."""
    n, m = av.shape[0], aq.shape[0]
    outs, intos = [0 for _ in range(0)], [0 for _ in range(0)]
    befores, afters = [0.0 for _ in range(0)], [0.0 for _ in range(0)]
    outside = eligible.copy()
    for token in kept:
        outside[token] = False
    counted = len(kept) if depth == _UNLIMITED else min(depth, len(kept))
    top_v, top_q = _top(av, kept, 2), _top(aq, kept, counted + 1)
    coverage, relevance = top_v[:, 0].sum(), top_q[:, :counted].sum()
    gains = _gains_over(av, top_v[:, 0])
    without = np.empty(n)
    threshold = np.empty(m)
    completed = 0
    while passes < 0 or completed < passes:
        accepted = False
        for out in np.sort(kept):
            before = relevance / max(m, 1) + coverage / n
            floor = min(target, coverage)
            # Deleting `out` lowers only the rows it alone represents, so all other gains stay as they are.
            without[:] = gains
            coverage_without = coverage
            for i in range(n):
                high, low = top_v[i, 0], top_v[i, 1]
                if high > low and np.float64(av[i, out]) == high:
                    coverage_without -= high - low
                    for j in range(n):
                        without[j] += min(max(np.float64(av[i, j]), low), high) - low
            relevance_without = relevance
            for i in range(m):
                value = np.float64(aq[i, out])
                if value >= top_q[i, counted - 1]:
                    relevance_without -= value - top_q[i, counted]
                    threshold[i] = top_q[i, counted]
                else:
                    threshold[i] = top_q[i, counted - 1]
                if counted != depth:
                    threshold[i] = 0.0
            relevance_gains = _gains_over(aq, threshold)
            into, highest = -1, -np.inf
            for j in range(n):
                if outside[j]:
                    after_coverage = coverage_without + without[j]
                    if after_coverage >= floor:
                        after = (relevance_without + relevance_gains[j]) / max(m, 1) + after_coverage / n
                        if after > (1.0 + epsilon) * before and after > highest:
                            highest = after
                            into = j
            if into < 0:
                continue
            accepted = True
            outs.append(out)
            intos.append(into)
            befores.append(before)
            afters.append(highest)
            outside[out], outside[into] = True, False
            kept[np.argmax(kept == out)] = into
            old = top_v[:, 0].copy()
            top_v, top_q = _top(av, kept, 2), _top(aq, kept, counted + 1)
            coverage, relevance = top_v[:, 0].sum(), top_q[:, :counted].sum()
            for i in range(n):
                new = top_v[i, 0]
                if new > old[i]:
                    for j in range(n):
                        gains[j] -= min(max(np.float64(av[i, j]), old[i]), new) - old[i]
                elif new < old[i]:
                    for j in range(n):
                        gains[j] += min(max(np.float64(av[i, j]), new), old[i]) - new
        completed += 1
        if not accepted:
            break
    return outs, intos, befores, afters


_sum_columns = Kernel(_add_columns)


def _column_sums(affinity: Affinity) -> Floats:
    sums = np.zeros(affinity.shape[1])
    if affinity.size >= _WORTH_SPLITTING:
        over_ranges(len(sums), _sum_columns, affinity, sums)
    else:
        _sum_columns(affinity, sums, 0, len(sums))
    return sums


class Ground(NamedTuple):
    """What walks need of A^vv.

    Attributes
    ----------
    matrix
        A^vv itself, (n, n).
    columns
        Its transpose, (n, n): in memory of its own where that is worth it.
    sums
        Sums of its columns, (n,): the gains of the empty set.
    eligible, capacity
        Positions that may be kept, (n,), and their number.
    addresses
        Of these arrays, if the matrices are what `_share` takes them for.
    """

    matrix: Affinity
    columns: Affinity
    sums: Floats
    eligible: Mask
    capacity: int
    addresses: tuple[int, ...] | None


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class CpuWalk:
    """A selection in progress; see `stacktok.kernels.Walk`."""

    def __init__(
        self,
        ground: Ground,
        query_affinity: Affinity,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> None:
        (m, n), capacity = query_affinity.shape, ground.capacity
        # A depth that no set reaches is an unlimited one.
        levels = _UNLIMITED if depth is None or depth > capacity else int(depth)
        # One piece of memory, which the first step fills: a walk may take a fifth of a millisecond.
        state = np.empty(_state_size.py_func(n, m, capacity, levels))
        self.sums, self.picks = _carve_record.py_func(state, capacity)
        self.sums[:, 0] = 0.0
        self.length = 0
        self._addresses = ground.addresses
        self.steps = (*ground[:-1], query_affinity, int(rule), levels, float(alpha), state)

    def extend(self, length: int, targets: Floats) -> None:
        while self.length < length:
            reached = _extend(*self.steps, targets, self.length, length)
            if reached < length:
                self._split_update()
            self.length = reached

    def _split_update(self) -> None:
        """Bring coverage gains up to date on all cores."""
        matrix, _, _, _, capacity, query_affinity, _, levels, _, state = self.steps
        sizes = (len(matrix), len(query_affinity), capacity, levels)
        stale, coverage_gains, _, _, _, raised, synced = _carve.py_func(state, *sizes, matrix)
        over_ranges(len(matrix), _lower_gains, matrix, stale, synced, raised, coverage_gains)
        synced[:] = raised
        stale[0] = 0

    @cached_property
    def description(self) -> tuple[float, ...] | None:
        """What `_share` needs to know, a `_WALK`, if the matrices are what it takes them for."""
        _, _, _, eligible, capacity, query_affinity, rule, levels, alpha, state = self.steps
        if self._addresses is None or query_affinity.dtype != np.float32:
            return None
        question = (_address(query_affinity), rule, levels, alpha, _address(state))
        return (*self._addresses, capacity, *question, len(eligible), len(query_affinity))


class CpuBackend:
    """See `stacktok.kernels.Backend`."""

    name = "cpu"

    def ground(self, vision_affinity: Affinity, eligible: Mask) -> Ground:
        columns = vision_affinity.T
        if vision_affinity.size <= _WORTH_TURNING:
            columns = empty_matrix(len(columns), columns.dtype)
            torch.from_numpy(columns).copy_(torch.from_numpy(vision_affinity).T)
        arrays = (vision_affinity, columns, _column_sums(vision_affinity), eligible)
        shareable = vision_affinity.dtype == np.float32 and columns.flags.c_contiguous
        addresses = tuple(_address(array) for array in arrays) if shareable else None
        return Ground(*arrays, int(np.count_nonzero(eligible)), addresses)

    def walk(
        self,
        ground: Ground,
        query_affinity: Affinity,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> CpuWalk:
        return CpuWalk(ground, query_affinity, rule, depth, alpha)

    def extend(self, walks: Sequence[CpuWalk], lengths: Sequence[int], targets: Sequence[Floats]) -> None:
        shorter = [c for c, walk in enumerate(walks) if walk.length < lengths[c]]
        together = [c for c in shorter if walks[c].description is not None] if len(shorter) > 1 else []
        if together:
            team, aims = np.array([walks[c].description for c in together], _WALK), [targets[c] for c in together]
            begins = accumulate((len(aim) for aim in aims), initial=0)
            places = [(walks[c].length, lengths[c], begin) for c, begin in zip(together, begins, strict=False)]
            ends = np.array(places, dtype=np.int64)
            threads = min(len(team), torch.get_num_threads())
            _extend_together(team, ends, np.concatenate(aims), parallel_address(), _share.address(), threads)
            for c, reached in zip(together, ends[:, _START].tolist(), strict=True):
                walks[c].length = reached
        for c in shorter:
            walks[c].extend(lengths[c], targets[c])

    def refine(
        self,
        vision_affinity: Affinity,
        query_affinity: Affinity,
        kept: Ints,
        eligible: Mask,
        depth: int | None,
        target: float,
        epsilon: float,
        passes: int | None,
    ) -> tuple[Ints, list[tuple[int, int, float, float]]]:
        current = np.sort(kept)
        levels = _UNLIMITED if depth is None else depth
        limit = -1 if passes is None else passes
        swaps = _refine(
            vision_affinity, query_affinity, current, eligible, levels, float(target), float(epsilon), limit
        )
        return np.sort(current), list(zip(*swaps, strict=True))


CPU = CpuBackend()
