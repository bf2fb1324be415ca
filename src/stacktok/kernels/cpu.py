"""The compiled backend: exact incremental greedy, without the interpreter's lock.

Adding token s changes only the rows with A_is > c_i, so a gain is kept up to date by what those rows lose; on grid
affinities the update is exact. Rows raised by relevance picks are noted and their coverage gains brought up to date
only when coverage next scores a step: the first picks raise nearly all rows, and one update then serves for many.
Updates of millions of entries, which only images of thousands of tokens have, are split over all cores by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import carray

from stacktok.core.affinity import Affinity
from stacktok.core.inputs import Mask
from stacktok.kernels import CRITERIA, Floats, Ints, Rule
from stacktok.kernels.compiled import Kernel, Region, compiled
from stacktok.kernels.team import count_up, memory, run_in_team
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


@Kernel
def _add_columns(a, sums, first, last):  # type: ignore[no-untyped-def]
    part = sums[first:last]
    for i in range(a.shape[0]):
        row = a[i, first:last]
        for j in range(len(part)):
            part[j] += np.float64(row[j])


@Kernel
def _begin(  # type: ignore[no-untyped-def]
    av, columns, sums, aq, eligible, order, criterion, bound, relevance_sums, coverage_sums, candidates, raised, synced,
    stale, stale_count, coverage_gains, relevance_gains, largest, threshold, lowered, places,
):  # fmt: skip
    """The state of the empty set; ``places`` notes where all of it is."""
    relevance_sums[0] = coverage_sums[0] = 0.0
    stale_count[0] = 0
    candidates[:] = eligible
    raised[:] = 0
    synced[:] = 0
    largest[:] = 0.0
    threshold[:] = 0.0
    lowered[:] = 0.0
    coverage_gains[:] = sums
    for j in range(len(eligible)):
        if not eligible[j]:
            coverage_gains[j] = -np.inf
            relevance_gains[j] = -np.inf
    place = places[0]
    place.av, place.columns, place.aq = av.ctypes.data, columns.ctypes.data, aq.ctypes.data
    place.order, place.criterion, place.bound = order.ctypes.data, criterion.ctypes.data, bound.ctypes.data
    place.relevance_sums, place.coverage_sums = relevance_sums.ctypes.data, coverage_sums.ctypes.data
    place.candidates, place.raised, place.synced = candidates.ctypes.data, raised.ctypes.data, synced.ctypes.data
    place.stale, place.stale_count = stale.ctypes.data, stale_count.ctypes.data
    place.coverage_gains, place.relevance_gains = coverage_gains.ctypes.data, relevance_gains.ctypes.data
    place.largest, place.threshold, place.lowered = largest.ctypes.data, threshold.ctypes.data, lowered.ctypes.data
    place.n, place.m, place.capacity, place.levels = len(av), len(aq), len(order), largest.shape[1]


@compiled
def _lower_gains(a, rows, count, old, new, gains, first, last):  # type: ignore[no-untyped-def]
    """Gains after thresholds of ``count`` rows rose from old to new: [a - old]_+ - [a - new]_+ is lost per row.

    That is a, clamped to old and new, less old. Thresholds are entries of the matrix or 0, so that its own type holds
    them and clamping is exact there; sums and differences are taken in float64.
    """
    part = gains[first:last]
    entry = a.dtype.type
    whole = count - count % 4
    for q in range(0, whole, 4):
        i0, i1, i2, i3 = rows[q], rows[q + 1], rows[q + 2], rows[q + 3]
        o0, o1, o2, o3 = entry(old[i0]), entry(old[i1]), entry(old[i2]), entry(old[i3])
        w0, w1, w2, w3 = entry(new[i0]), entry(new[i1]), entry(new[i2]), entry(new[i3])
        a0, a1, a2, a3 = a[i0, first:last], a[i1, first:last], a[i2, first:last], a[i3, first:last]
        before = (np.float64(o0) + np.float64(o1)) + (np.float64(o2) + np.float64(o3))
        for j in range(len(part)):
            after01 = np.float64(min(max(a0[j], o0), w0)) + np.float64(min(max(a1[j], o1), w1))
            after23 = np.float64(min(max(a2[j], o2), w2)) + np.float64(min(max(a3[j], o3), w3))
            part[j] += before - (after01 + after23)
    for q in range(whole, count):
        i = rows[q]
        o, w = entry(old[i]), entry(new[i])
        row = a[i, first:last]
        for j in range(len(part)):
            part[j] += np.float64(o) - np.float64(min(max(row[j], o), w))


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
def _steps(  # type: ignore[no-untyped-def]
    av, columns, aq, rule, depth, alpha, targets, start, stop, order, criterion, bound, relevance_sums, coverage_sums,
    candidates, raised, synced, stale, stale_count, coverage_gains, relevance_gains, largest, threshold, lowered,
):  # fmt: skip
    """Steps of Algorithm 1; returns the step before which an update is worth splitting, or stop."""
    n, m = av.shape[0], aq.shape[0]
    one_row = np.empty(1, np.int64)
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
            if stale_count[0] * n >= _WORTH_SPLITTING:
                return t
            _lower_gains(av, stale, stale_count[0], synced, raised, coverage_gains, 0, n)
            for q in range(stale_count[0]):
                synced[stale[q]] = raised[stale[q]]
            stale_count[0] = 0
            if rule == _SCALARIZED:
                highest = 0.0
                for j in range(n):
                    if candidates[j]:
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
                if candidates[j]:
                    token = j
                    break
        coverage = coverage_sums[t]
        for start in range(0, n, _STRIP):
            column, high = columns[token, start : start + _STRIP], raised[start : start + _STRIP]
            above = 0
            for i in range(len(high)):
                above |= column[i] > high[i]
            if above:
                for i in range(len(high)):
                    if column[i] > high[i]:
                        coverage += np.float64(column[i]) - np.float64(high[i])
                        if high[i] == synced[start + i]:
                            stale[stale_count[0]] = start + i
                            stale_count[0] += 1
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
                    lowered[i] = largest[i, depth - 1]
                    if lowered[i] > threshold[i]:
                        one_row[0] = i
                        _lower_gains(aq, one_row, 1, threshold, lowered, relevance_gains, 0, n)
                        threshold[i] = lowered[i]
        candidates[token] = False
        coverage_gains[token] = -np.inf
        relevance_gains[token] = -np.inf
        order[t] = token
        criterion[t] = by
        bound[t] = deficit and rule == _GATED
        relevance_sums[t + 1] = relevance
        coverage_sums[t + 1] = coverage
    return stop


_extend = Kernel(_steps)

_WALK = np.dtype(
    [
        (name, np.int64)
        for name in (
            # Addresses of arrays, in the order in which they are handed to `_steps`.
            "av", "columns", "aq", "order", "criterion", "bound", "relevance_sums", "coverage_sums", "candidates",
            "raised", "synced", "stale", "stale_count", "coverage_gains", "relevance_gains", "largest", "threshold",
            "lowered",
            # Sizes, and from where to where to go.
            "n", "m", "capacity", "levels", "rule", "depth", "start", "stop",
        )
    ]
    + [("alpha", np.float64)]
)  # fmt: skip
_TEAM = np.dtype([(name, np.int64) for name in ("walks", "targets", "counter", "count", "steps")])


@Region
def _share(address):  # type: ignore[no-untyped-def]
    """What every thread does: take walks and extend them, until there are no more."""
    team = carray(address, (1,), _TEAM)[0]
    walks = carray(memory(team.walks), (team.count,), _WALK)
    targets = carray(memory(team.targets), (team.count, team.steps), np.float64)
    counter = carray(memory(team.counter), (1,), np.int64)
    while True:
        c = count_up(counter, 0)
        if c >= team.count:
            return
        w = walks[c]
        n, m, capacity = w.n, w.m, w.capacity
        w.start = _steps(
            carray(memory(w.av), (n, n), np.float32),
            carray(memory(w.columns), (n, n), np.float32),
            carray(memory(w.aq), (m, n), np.float32),
            w.rule,
            w.depth,
            w.alpha,
            targets[c],
            w.start,
            w.stop,
            carray(memory(w.order), (capacity,), np.int64),
            carray(memory(w.criterion), (capacity,), np.int8),
            carray(memory(w.bound), (capacity,), np.bool_),
            carray(memory(w.relevance_sums), (capacity + 1,), np.float64),
            carray(memory(w.coverage_sums), (capacity + 1,), np.float64),
            carray(memory(w.candidates), (n,), np.bool_),
            carray(memory(w.raised), (n,), np.float32),
            carray(memory(w.synced), (n,), np.float32),
            carray(memory(w.stale), (n,), np.int64),
            carray(memory(w.stale_count), (1,), np.int64),
            carray(memory(w.coverage_gains), (n,), np.float64),
            carray(memory(w.relevance_gains), (n,), np.float64),
            carray(memory(w.largest), (m, w.levels), np.float64),
            carray(memory(w.threshold), (m,), np.float64),
            carray(memory(w.lowered), (m,), np.float64),
        )


@Kernel
def _extend_together(walks, targets, counter, job, parallel, region, threads):  # type: ignore[no-untyped-def]
    team = job[0]
    team.walks, team.targets, team.counter = walks.ctypes.data, targets.ctypes.data, counter.ctypes.data
    team.count, team.steps = targets.shape
    run_in_team(parallel, region, job, threads)


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


def _column_sums(affinity: Affinity) -> Floats:
    sums = np.zeros(affinity.shape[1])
    if affinity.size >= _WORTH_SPLITTING:
        over_ranges(len(sums), _add_columns, affinity, sums)
    else:
        _add_columns(affinity, sums, 0, len(sums))
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
    """

    matrix: Affinity
    columns: Affinity
    sums: Floats


class CpuWalk:
    """A selection in progress; see `stacktok.kernels.Walk`."""

    def __init__(
        self,
        ground: Ground,
        query_affinity: Affinity,
        eligible: Mask,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> None:
        matrix, columns, sums = ground
        n, m = len(matrix), len(query_affinity)
        capacity = int(np.count_nonzero(eligible))
        # A depth that no set reaches is an unlimited one.
        levels = _UNLIMITED if depth is None or depth > capacity else depth
        self.length = 0
        self.order = np.empty(capacity, dtype=np.int64)
        self.criterion = np.empty(capacity, dtype=np.int8)
        self.bound = np.empty(capacity, dtype=np.bool_)
        self.relevance_sums, self.coverage_sums = np.empty(capacity + 1), np.empty(capacity + 1)
        self._fixed = (matrix, columns, query_affinity, int(rule), levels, float(alpha))
        self._record = (self.order, self.criterion, self.bound, self.relevance_sums, self.coverage_sums)
        self._state = (
            np.empty(n, dtype=np.bool_),  # candidates
            np.empty(n, dtype=matrix.dtype),  # row maxima of the kept set
            np.empty(n, dtype=matrix.dtype),  # row maxima that the coverage gains account for
            np.empty(n, dtype=np.int64),  # rows on which the two differ
            np.empty(1, dtype=np.int64),  # how many they are
            np.empty(n),  # gains of coverage
            _column_sums(query_affinity),  # gains of relevance
            np.empty((m, max(1, levels))),  # largest kept affinities of every query row
            np.empty(m),  # the smallest of them: what a token must exceed
            np.empty(m),
        )
        self.places = np.empty(1, dtype=_WALK)
        _begin(matrix, columns, sums, query_affinity, eligible, *self._record, *self._state, self.places)

    def extend(self, length: int, targets: Floats) -> None:
        if length <= self.length:
            return
        self.length = _extend(*self._fixed, targets, self.length, length, *self._record, *self._state)
        while self.length < length:
            self._split_update()
            self.length = _extend(*self._fixed, targets, self.length, length, *self._record, *self._state)

    def _split_update(self) -> None:
        """Bring coverage gains up to date on all cores."""
        affinity = self._fixed[0]
        _, raised, synced, stale, stale_count, coverage_gains = self._state[:6]
        rows = (stale, int(stale_count[0]), synced, raised)
        over_ranges(len(affinity), _lower_gains, affinity, *rows, coverage_gains)
        synced[:] = raised
        stale_count[0] = 0

    @property
    def plain(self) -> bool:
        """Whether all matrices are what `_share` takes them for."""
        matrices = self._fixed[:3]
        return all(matrix.dtype == np.float32 and matrix.flags.c_contiguous for matrix in matrices)


class CpuBackend:
    """See `stacktok.kernels.Backend`."""

    name = "cpu"

    def ground(self, vision_affinity: Affinity) -> Ground:
        columns = vision_affinity.T
        if vision_affinity.size <= _WORTH_TURNING:
            columns = torch.from_numpy(columns).contiguous().numpy()
        return Ground(vision_affinity, columns, _column_sums(vision_affinity))

    def walk(
        self,
        ground: Ground,
        query_affinity: Affinity,
        eligible: Mask,
        rule: Rule,
        depth: int | None,
        alpha: float,
    ) -> CpuWalk:
        return CpuWalk(ground, query_affinity, eligible, rule, depth, alpha)

    def extend(self, walks: Sequence[CpuWalk], lengths: Sequence[int], targets: Sequence[Floats]) -> None:
        shorter = [c for c, walk in enumerate(walks) if walk.length < lengths[c]]
        together = [c for c in shorter if walks[c].plain] if len(shorter) > 1 else []
        if together:
            places = np.concatenate([walks[c].places for c in together])
            aims = np.empty((len(together), max(lengths[c] for c in together)))
            for place, aim, c in zip(places, aims, together, strict=True):
                _, _, _, place["rule"], place["depth"], place["alpha"] = walks[c]._fixed
                place["start"], place["stop"] = walks[c].length, lengths[c]
                aim[: lengths[c]] = targets[c][: lengths[c]]
            team = (np.zeros(1, dtype=np.int64), np.empty(1, dtype=_TEAM))
            _extend_together(places, aims, *team, parallel_address(), _share.address(), torch.get_num_threads())
            for c, reached in zip(together, places["start"].tolist(), strict=True):
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
