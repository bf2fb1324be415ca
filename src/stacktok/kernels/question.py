"""A^qv of a question, Eq. (affinity): from the rows of a query to its affinities with all crops of an image.

A question on a prepared image takes about a millisecond, of which a dozen calls into libraries would be a good part: so
all of it is one call, the entropies of the rows included. Threads take the tokens of all crops in portions, and then
the rows in which products become affinities. For this shape, many rows by a few, a general matrix product takes about
twice as long per core; and here a token's products do not depend on its place or on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity
from stacktok.kernels import Floats
from stacktok.kernels.compiled import Kernel, Region, compiled
from stacktok.kernels.team import count_of, count_up, memory, run_in_team
from stacktok.kernels.threads import parallel_address

Floats32 = NDArray[np.float32]

# Columns of four rows that stay in a core's first-level cache while all rows of the query pass by.
_COLUMNS = 1024
# Tokens that a thread takes at a time; a multiple of four.
_PORTION = 16
# Entries of embeddings from which on other threads are worth waking.
_WORTH_SPLITTING = 1 << 20

# How embeddings are stored.
_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
STORED = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
"""Types of embeddings that a question takes as they are."""

_SMALLEST = float(np.finfo(np.float32).tiny)

# What threads are told of an image: addresses of its embeddings and their lengths, number of tokens, type, and where
# its result begins.
_ROWS, _LENGTHS, _TOKENS, _TYPE, _BEGIN = range(5)
# What threads count together: portions taken, rows taken, and from there on the portions done of every image.
_PORTIONS, _ROWS_TAKEN, _DONE = range(3)

_JOB = np.dtype(
    [
        ("unit", np.int64),  # addresses of arrays
        ("images", np.int64),
        ("counters", np.int64),
        ("result", np.int64),
        ("entropies", np.int64),
        ("count", np.int64),  # number of images
        ("m", np.int64),  # rows of the query, and with rows of zeros
        ("padded", np.int64),
        ("width", np.int64),
        ("tau", np.float32),
        ("scale", np.float32),  # 2^b of the grid
        ("floor", np.float64),  # of what logarithms are taken of
    ]
)


@compiled
def _widen(halves, kind, result):  # type: ignore[no-untyped-def]
    """Bits of bfloat16 or float16 as float32."""
    bits = result.view(np.uint32)
    if kind == _BFLOAT16:
        for p in range(len(halves)):
            bits[p] = np.uint32(halves[p]) << np.uint32(16)
    else:
        # Sign and the rest go where float32 has them, and the two types' exponents differ by 112.
        for p in range(len(halves)):
            half = np.uint32(halves[p])
            rest = ((half & np.uint32(0x7FFF)) << np.uint32(13)) + np.uint32(112 << 23)
            bits[p] = ((half & np.uint32(0x8000)) << np.uint32(16)) | rest
        # Those without an exponent of their own count in steps of 2^-24.
        for p in range(len(halves)):
            steps = np.float32(halves[p] & np.uint16(0x03FF)) * np.float32(2.0**-24)
            small = -steps if halves[p] & np.uint16(0x8000) else steps
            result[p] = result[p] if halves[p] & np.uint16(0x7C00) else small


@partial(compiled, fastmath={"reassoc", "contract", "nsz"})
def _add_products(x, first, start, y, begin, width, sums):  # type: ignore[no-untyped-def]
    """Add y[:, begin:][:, :width] @ x[first : first + 4, start:][:, :width].T; y has a multiple of three rows.

    Four rows by three at a time, whose twelve sums leave a core without AVX-512 four registers for what it reads.
    """
    stop, end = start + width, begin + width
    x0, x1, x2, x3 = x[first, start:stop], x[first + 1, start:stop], x[first + 2, start:stop], x[first + 3, start:stop]
    for i in range(0, y.shape[0], 3):
        y0, y1, y2 = y[i, begin:end], y[i + 1, begin:end], y[i + 2, begin:end]
        zero = np.float32(0)
        s00, s01, s02 = zero, zero, zero
        s10, s11, s12 = zero, zero, zero
        s20, s21, s22 = zero, zero, zero
        s30, s31, s32 = zero, zero, zero
        for p in range(width):
            s00 += x0[p] * y0[p]
            s01 += x0[p] * y1[p]
            s02 += x0[p] * y2[p]
            s10 += x1[p] * y0[p]
            s11 += x1[p] * y1[p]
            s12 += x1[p] * y2[p]
            s20 += x2[p] * y0[p]
            s21 += x2[p] * y1[p]
            s22 += x2[p] * y2[p]
            s30 += x3[p] * y0[p]
            s31 += x3[p] * y1[p]
            s32 += x3[p] * y2[p]
        sums[i, 0] += s00
        sums[i + 1, 0] += s01
        sums[i + 2, 0] += s02
        sums[i, 1] += s10
        sums[i + 1, 1] += s11
        sums[i + 2, 1] += s12
        sums[i, 2] += s20
        sums[i + 1, 2] += s21
        sums[i + 2, 2] += s22
        sums[i, 3] += s30
        sums[i + 1, 3] += s31
        sums[i + 2, 3] += s32


@compiled
def _multiply(address, kind, tokens, unit, first, last, block, sums, products):  # type: ignore[no-untyped-def]
    """Products of the query's rows with tokens first to last, four or more unless there are no more.

    What is left at the end is done as four tokens that overlap the ones before, so that a token's products are the
    same wherever it stands.
    """
    width = unit.shape[1]
    rows = carray(memory(address), (max(tokens, 4), width), np.float32)
    halves = carray(memory(address), (max(tokens, 4), width), np.uint16)
    for place in range(first, last, 4):
        j = max(min(place, last - 4), 0)
        sums[:] = 0
        for start in range(0, width, _COLUMNS):
            columns = min(_COLUMNS, width - start)
            if kind == _FLOAT32:
                _add_products(rows, j, start, unit, start, columns, sums)
            else:
                for r in range(4):
                    _widen(halves[j + r, start : start + columns], kind, block[r])
                _add_products(block, 0, 0, unit, start, columns, sums)
        for i in range(products.shape[0]):
            for r in range(min(4, last - j)):
                products[i, j + r] = sums[i, r]


@compiled
def _entropy(row, floor):  # type: ignore[no-untyped-def]
    """H_i of Eq. (beta): -sum a log max(a, floor) over a row."""
    total = 0.0
    for a in row:
        total -= np.float64(a) * np.log(max(np.float64(a), floor))
    return total


@partial(compiled, fastmath={"reassoc", "nnan", "nsz"})
def _softmax_on_grid(row, lengths, tau, scale):  # type: ignore[no-untyped-def]
    """Replace products by the softmax of cosines over tau, rounded to the grid."""
    highest = np.float32(-np.inf)
    for j in range(len(row)):
        row[j] /= lengths[j]
        highest = max(highest, row[j])
    # The maximum goes before the division, so that no temperature is too small.
    total = 0.0
    for j in range(len(row)):
        row[j] = np.exp((row[j] - highest) / tau)
        total += np.float64(row[j])
    sum32 = np.float32(total)
    for j in range(len(row)):
        row[j] = np.rint(row[j] / sum32 * scale) / scale


@compiled
def _portions(tokens):  # type: ignore[no-untyped-def]
    return max(1, tokens // _PORTION)


@compiled
def _tokens_of(portion, tokens):  # type: ignore[no-untyped-def]
    """First and last token of a portion; the last portion takes what does not fill one."""
    first = portion * _PORTION
    return first, tokens if portion == _portions(tokens) - 1 else first + _PORTION


@Region
def _share(address):  # type: ignore[no-untyped-def]
    """What every thread does: take portions of tokens, then rows of affinities, until there are no more."""
    job = carray(address, (1,), _JOB)[0]
    counters = carray(memory(job.counters), (job.count + 2,), np.int64)
    images = carray(memory(job.images), (job.count, 5), np.int64)
    unit = carray(memory(job.unit), (job.padded, job.width), np.float32)
    entries = images[job.count - 1, _BEGIN] + job.m * images[job.count - 1, _TOKENS]
    result = carray(memory(job.result), (entries,), np.float32)
    entropies = carray(memory(job.entropies), (job.count, job.m), np.float64)
    block, sums = np.empty((4, _COLUMNS), np.float32), np.empty((job.padded, 4), np.float32)
    image, passed = 0, 0
    while True:
        portion = count_up(counters, _PORTIONS)
        while image < job.count and portion >= passed + _portions(images[image, _TOKENS]):
            passed += _portions(images[image, _TOKENS])
            image += 1
        if image == job.count:
            break
        tokens = images[image, _TOKENS]
        first, last = _tokens_of(portion - passed, tokens)
        begin = images[image, _BEGIN]
        products = result[begin : begin + job.m * tokens].reshape((job.m, tokens))
        _multiply(images[image, _ROWS], images[image, _TYPE], tokens, unit, first, last, block, sums, products)
        count_up(counters, _DONE + image)
    while True:
        row = count_up(counters, _ROWS_TAKEN)
        if row >= job.count * job.m:
            return
        image, i = row // job.m, row % job.m
        tokens = images[image, _TOKENS]
        # Another thread may be at its last portion.
        while count_of(counters, _DONE + image) < _portions(tokens):
            pass
        begin = images[image, _BEGIN] + i * tokens
        affinities = result[begin : begin + tokens]
        lengths = carray(memory(images[image, _LENGTHS]), (tokens,), np.float32)
        _softmax_on_grid(affinities, lengths, job.tau, job.scale)
        entropies[image, i] = _entropy(affinities, job.floor)


@partial(Kernel, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _ask(  # type: ignore[no-untyped-def]
    query, norm_floor, tau, scale, entropy_floor, images, unit, result, entropies, counters, job, parallel, region,
    threads,
):  # fmt: skip
    """Bring the query's rows to length one and share the rest; returns the first row without a finite norm, or -1."""
    for i in range(query.shape[0]):
        squares = np.float32(0)
        for p in range(query.shape[1]):
            squares += query[i, p] * query[i, p]
        norm = np.sqrt(squares)
        if not norm < np.inf:
            return i
        length = max(norm, np.float32(norm_floor))
        for p in range(query.shape[1]):
            unit[i, p] = query[i, p] / length
    unit[query.shape[0] :] = 0
    task = job[0]
    task.unit, task.images, task.counters = unit.ctypes.data, images.ctypes.data, counters.ctypes.data
    task.result, task.entropies = result.ctypes.data, entropies.ctypes.data
    task.count, task.m = entropies.shape
    task.padded, task.width = unit.shape
    task.tau, task.scale, task.floor = tau, scale, entropy_floor
    run_in_team(parallel, region, job, threads)
    return -1


@Kernel
def _entropies(affinity, floor, entropies):  # type: ignore[no-untyped-def]
    for i in range(affinity.shape[0]):
        entropies[i] = _entropy(affinity[i], floor)


def row_entropies(affinity: Affinity, floor: float) -> Floats:
    """H_i of Eq. (beta) for every row, (m,).

    Parameters
    ----------
    affinity
        A^qv, (m, n).
    floor
        Lower bound of what the logarithm is taken of.
    """
    entropies = np.empty(len(affinity))
    _entropies(affinity, float(floor), entropies)
    return entropies


def query_affinities(
    query: Floats32,
    images: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tau: float,
    bits: int,
    norm_floor: float,
    entropy_floor: float,
) -> tuple[list[tuple[Floats32, Floats]], int]:
    """A^qv of one question for every image, (m, n_c), in C order, and the entropies of its rows, (m,).

    Beside them the first row of the query without a finite norm, or -1; if there is one, the rest is not computed.

    Parameters
    ----------
    query
        Rows of the query, (m, d), m >= 1, in C order.
    images
        Embeddings, (n_c, d), of a type in `STORED`, and their lengths, (n_c,), float32; contiguous, in host memory.
    tau
        Temperature.
    bits
        Of the grid.
    norm_floor, entropy_floor
        Lower bounds of the query's norms, and of what logarithms are taken of.
    """
    m, width = query.shape
    alive, table, end = [], [], 0
    for rows, lengths in images:
        n = lengths.shape[0]
        if n < 4:
            rows = torch.cat([rows, rows.new_zeros((4 - n, width))])
            alive.append(rows)
        table.append((rows.data_ptr(), lengths.data_ptr(), n, STORED[rows.dtype], end))
        end += m * n
    unit = np.empty((-(-m // 3) * 3, width), dtype=np.float32)
    result, entropies = np.empty(end, dtype=np.float32), np.empty((len(images), m))
    counters, job = np.zeros(len(images) + _DONE, dtype=np.int64), np.empty(1, dtype=_JOB)
    threads = torch.get_num_threads() if end // m * width >= _WORTH_SPLITTING else 1
    numbers = (float(max(norm_floor, _SMALLEST)), float(max(tau, _SMALLEST)), 2.0**bits, float(entropy_floor))
    team = (counters, job, parallel_address(), _share.address(), threads)
    bad = _ask(query, *numbers, np.array(table), unit, result, entropies, *team)
    begins = [entry[_BEGIN] for entry in table]
    found = [result[a:b].reshape(m, -1) for a, b in pairwise([*begins, end])]
    return list(zip(found, entropies, strict=True)), bad
