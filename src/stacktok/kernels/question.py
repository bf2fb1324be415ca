"""A^qv of a question, Eq. (affinity): from the rows of a query to its affinities with all crops of an image.

A question on a prepared image takes about a millisecond, of which a dozen calls into libraries would be a good part: so
all of it is one call, the entropies of the rows included. Threads take the rows of the query, then the tokens of all
crops in portions, then the rows in which products become affinities. For this shape, many rows by a few, a general
matrix product takes about twice as long per core; and here a token's products do not depend on its place or on the
number of threads. Exponentials and logarithms are written out: a compiler makes vectors of products, but not of calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity
from stacktok.kernels import Floats
from stacktok.kernels.compiled import Kernel, Region, compiled
from stacktok.kernels.team import count_of, count_up, memory, run_in_team
from stacktok.kernels.threads import parallel_address

Floats32 = NDArray[np.float32]

# Columns of the query, and of four tokens, that stay in a core's first-level cache while all rows of the query pass by.
_COLUMNS = 512
# Tokens and rows of the query whose products are summed at a time. Their twelve sums, each of a vector's width, leave a
# core without AVX-512 four registers for what it reads.
_TOKENS_WIDE, _ROWS_WIDE, _LANES = 4, 3, 8
# Tokens that a thread takes at a time; a multiple of four.
_PORTION = 16
# Entries of embeddings from which on other threads are worth waking.
_WORTH_SPLITTING = 1 << 20

# How embeddings are stored.
_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
STORED = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
"""Types of embeddings that a question takes as they are."""

# Entries of a row of affinities that are handled at a time; a multiple of the lanes.
_STRIP = 256
# Bits of float64: of 1, of sqrt(1/2), of 2^52, and where a number has its fraction.
_ONE, _ROOT_OF_HALF, _TWO_TO_52 = (np.float64(x).view(np.uint64) for x in (1.0, 0.5**0.5, 2.0**52))
_FRACTION = np.uint64((1 << 52) - 1)
# Of series, from the last term to the first: artanh's denominators, and ratios of exp's factorials.
_ODD, _FACTORS = tuple(range(21, 0, -2)), tuple(range(7, 0, -1))
# log 2 is 355 / 512, whose multiples by exponents are exact in float32, and a rest.
_LOG_2 = math.log(2)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(355 / 512), np.float32(_LOG_2 - 355 / 512)

_SMALLEST = float(np.finfo(np.float32).tiny)

# What threads are told of an image: addresses of its embeddings and their lengths, number of tokens, type.
_ROWS, _LENGTHS, _TOKENS, _TYPE = range(4)
# What threads count together: rows of the query taken and done, portions taken, rows of affinities taken, and from
# there on the portions done of every image.
_UNITS_TAKEN, _UNITS_DONE, _PORTIONS_TAKEN, _ROWS_TAKEN, _DONE = range(5)

_JOB = np.dtype(
    [
        ("query", np.int64),  # addresses of arrays
        ("norms", np.int64),
        ("unit", np.int64),
        ("images", np.int64),
        ("begins", np.int64),
        ("counters", np.int64),
        ("result", np.int64),
        ("entropies", np.int64),
        ("count", np.int64),  # number of images
        ("m", np.int64),  # rows of the query, and with rows of zeros
        ("padded", np.int64),
        ("width", np.int64),
        ("norm_floor", np.float32),
        ("tau", np.float32),
        ("scale", np.float32),  # 2^b of the grid
        ("entropy_floor", np.float64),  # of what logarithms are taken of
    ]
)

_FLOAT = ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, _LANES)


@intrinsic
def _add_products(_, tokens, tokens_apart, rows, rows_apart, steps, sums, ahead):  # type: ignore[no-untyped-def]
    """Add the products of four tokens with three rows, in steps of a vector, to vectors of sums, (3, 4).

    Tokens and rows are given by the address of the first and the distance to the next in entries, sums by their
    address. Meanwhile as much memory at the address ``ahead`` is brought near, where another call will need it. Written
    in the compiler's own language, since a loop over arrays ends with summing up its vectors: here that is left for
    when all columns are done.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        tokens, tokens_apart, rows, rows_apart, steps, sums, ahead = arguments

        def number(value: int) -> Any:
            return ir.Constant(ir.IntType(64), value)

        def lines(address: Any, apart: Any, count: int) -> list[Any]:
            first = builder.inttoptr(address, _FLOAT.as_pointer())
            return [builder.gep(first, [builder.mul(apart, number(line))]) for line in range(count)]

        def vector(line: Any, position: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(line, [position]), _VECTOR.as_pointer()), align=4)

        first = builder.inttoptr(sums, _VECTOR.as_pointer())
        places = [builder.gep(first, [number(place)]) for place in range(_TOKENS_WIDE * _ROWS_WIDE)]
        held = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
        token_lines, row_lines = lines(tokens, tokens_apart, _TOKENS_WIDE), lines(rows, rows_apart, _ROWS_WIDE)
        soon = builder.inttoptr(ahead, _FLOAT.as_pointer())
        # To be read, into the second-level cache, data.
        how = [ir.Constant(ir.IntType(32), value) for value in (0, 2, 1)]
        prefetching = ir.FunctionType(ir.VoidType(), [_BYTES, *(value.type for value in how)])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], prefetching)
        with cgutils.for_range(builder, steps) as loop:
            position = builder.mul(loop.index, number(_LANES))
            builder.call(prefetch, [builder.bitcast(builder.gep(soon, [position]), _BYTES), *how])
            row_vectors = [vector(line, position) for line in row_lines]
            for r, line in enumerate(token_lines):
                token_vector = vector(line, position)
                for i, row_vector in enumerate(row_vectors):
                    total = held[i * _TOKENS_WIDE + r]
                    product = builder.fmul(token_vector, row_vector, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for total, place in zip(held, places, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


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


@compiled
def _multiply(address, kind, tokens, unit, width, first, last, block, sums, products):  # type: ignore[no-untyped-def]
    """Products of the query's rows with tokens first to last, four or more unless there are no more.

    What is left at the end is done as four tokens that overlap the ones before, so that a token's products are the
    same wherever it stands.
    """
    halves = carray(memory(address), (max(tokens, _TOKENS_WIDE), width), np.uint16)
    floats = carray(memory(address), (max(tokens, _TOKENS_WIDE), width), np.float32)
    padded, size = unit.shape[1], 4 if kind == _FLOAT32 else 2
    for place in range(first, last, _TOKENS_WIDE):
        j = max(min(place, last - _TOKENS_WIDE), 0)
        sums[:] = 0
        for b in range(unit.shape[0]):
            start = b * _COLUMNS
            columns = min(_COLUMNS, width - start)
            if kind == _FLOAT32:
                four = floats[j : j + _TOKENS_WIDE, start : start + columns]
                apart = width
            else:
                for r in range(_TOKENS_WIDE):
                    _widen(halves[j + r, start : start + columns], kind, block[r])
                four = block[:, :columns]
                apart = _COLUMNS
            steps = columns // _LANES
            for i in range(0, padded, _ROWS_WIDE):
                # Columns that follow, or the next tokens' first ones: of another of the four with every three rows.
                ahead = (j + min(i // _ROWS_WIDE, _TOKENS_WIDE - 1)) * width + start + columns
                if start + columns == width:
                    ahead += (_TOKENS_WIDE - 1) * width
                three, into = unit[b, i:].ctypes.data, sums[i:].ctypes.data
                _add_products(four.ctypes.data, apart, three, _COLUMNS, steps, into, address + ahead * size)
            for p in range(steps * _LANES, columns):
                for i in range(padded):
                    for r in range(_TOKENS_WIDE):
                        sums[i, r, 0] += four[r, p] * unit[b, i, p]
        for i in range(products.shape[0]):
            for r in range(min(_TOKENS_WIDE, last - j)):
                s = sums[i, r]
                products[i, j + r] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))


@partial(compiled, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _to_length_one(row, floor, unit, i):  # type: ignore[no-untyped-def]
    """Write a row of the query, brought to length one, to its places in blocks of columns; returns its norm."""
    squares = np.float32(0)
    for p in range(len(row)):
        squares += row[p] * row[p]
    norm = np.sqrt(squares)
    length = max(norm, floor)
    for b in range(unit.shape[0]):
        part = row[b * _COLUMNS : (b + 1) * _COLUMNS]
        place = unit[b, i]
        for p in range(len(part)):
            place[p] = part[p] / length
    return norm


@partial(compiled, fastmath={"contract"}, error_model="numpy")
def _logarithms(x, scratch):  # type: ignore[no-untyped-def]
    """Replace positive numbers by their logarithms; in a form that a compiler turns into vectors.

    x = 2^e f with f from sqrt(1/2) to sqrt(2), and log f = 2 artanh s with s = (f - 1) / (f + 1), |s| < 0.172.
    """
    bits, exponents = x.view(np.uint64), scratch.view(np.uint64)
    for j in range(len(x)):
        shifted = bits[j] + (_ONE - _ROOT_OF_HALF)
        # As the lowest bits of 2^52, so that no conversion is needed.
        exponents[j] = (shifted >> np.uint64(52)) | _TWO_TO_52
        bits[j] = (shifted & _FRACTION) + _ROOT_OF_HALF
    for j in range(len(x)):
        s = (x[j] - 1.0) / (x[j] + 1.0)
        z = s * s
        series = 0.0
        for k in _ODD:
            series = series * z + 1.0 / k
        x[j] = (scratch[j] - (2.0**52 + 1023)) * _LOG_2 + 2.0 * s * series


@compiled
def _entropy(row, floor, scratch):  # type: ignore[no-untyped-def]
    """H_i of Eq. (beta): -sum a log max(a, floor) over a row; ``scratch`` is (3, _STRIP), float64."""
    terms, totals = scratch[0], scratch[2, :_LANES]
    totals[:] = 0
    for start in range(0, len(row), _STRIP):
        strip = row[start : start + _STRIP]
        for j in range(len(strip)):
            terms[j] = max(np.float64(strip[j]), floor)
        terms[len(strip) :] = 1
        _logarithms(terms, scratch[1])
        for j in range(len(strip)):
            terms[j] *= np.float64(strip[j])
        for first in range(0, _STRIP, _LANES):
            for lane in range(_LANES):
                totals[lane] -= terms[first + lane]
    total = 0.0
    for lane in range(_LANES):
        total += totals[lane]
    return total


@partial(compiled, fastmath={"contract"}, error_model="numpy")
def _exponentials(x, scratch):  # type: ignore[no-untyped-def]
    """Replace numbers up to 0 by their exponentials; in a form that a compiler turns into vectors.

    exp x = 2^e exp r with e = rint(x / log 2), so that |r| < 0.347 and seven terms of the series are enough.
    """
    powers = scratch.view(np.int32)
    for j in range(len(x)):
        # Below are numbers that round to 0 on every grid.
        bounded = max(x[j], np.float32(-87))
        e = np.rint(bounded * np.float32(1 / _LOG_2))
        powers[j] = (np.int32(e) + np.int32(127)) << np.int32(23)
        r = (bounded - e * _LOG_2_HIGH) - e * _LOG_2_LOW
        series = np.float32(1)
        for k in _FACTORS:
            series = series * (r * np.float32(1 / k)) + np.float32(1)
        x[j] = series
    for j in range(len(x)):
        x[j] *= scratch[j]


@partial(compiled, fastmath={"reassoc", "nnan", "nsz"}, error_model="numpy")
def _softmax_on_grid(row, lengths, tau, scale, scratch):  # type: ignore[no-untyped-def]
    """Replace products by the softmax of cosines over tau, rounded to the grid."""
    highest = np.float32(-np.inf)
    for j in range(len(row)):
        row[j] /= lengths[j]
        highest = max(highest, row[j])
    # The maximum goes before the division, so that no temperature is too small.
    for j in range(len(row)):
        row[j] = (row[j] - highest) / tau
    for start in range(0, len(row), _STRIP):
        strip = row[start : start + _STRIP]
        _exponentials(strip, scratch)
    total = 0.0
    for j in range(len(row)):
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
    """What every thread does: take rows of the query, portions of tokens, rows of affinities, as long as there are."""
    job = carray(address, (1,), _JOB)[0]
    counters = carray(memory(job.counters), (job.count + _DONE,), np.int64)
    images = carray(memory(job.images), (job.count, 4), np.int64)
    begins = carray(memory(job.begins), (job.count + 1,), np.int64)
    query = carray(memory(job.query), (job.m, job.width), np.float32)
    norms = carray(memory(job.norms), (job.m,), np.float32)
    unit = carray(memory(job.unit), (-(-job.width // _COLUMNS), job.padded, _COLUMNS), np.float32)
    while True:
        i = count_up(counters, _UNITS_TAKEN)
        if i >= job.padded:
            break
        if i < job.m:
            norms[i] = _to_length_one(query[i], job.norm_floor, unit, i)
        else:
            unit[:, i] = 0
        count_up(counters, _UNITS_DONE)
    # Another thread may be at its last row.
    while count_of(counters, _UNITS_DONE) < job.padded:
        pass
    for i in range(job.m):
        if not norms[i] < np.inf:
            return
    result = carray(memory(job.result), (begins[job.count],), np.float32)
    entropies = carray(memory(job.entropies), (job.count, job.m), np.float64)
    block = np.empty((_TOKENS_WIDE, _COLUMNS), np.float32)
    sums = np.empty((job.padded, _TOKENS_WIDE, _LANES), np.float32)
    scratch = np.empty((3, _STRIP))
    image, passed = 0, 0
    while True:
        portion = count_up(counters, _PORTIONS_TAKEN)
        while image < job.count and portion >= passed + _portions(images[image, _TOKENS]):
            passed += _portions(images[image, _TOKENS])
            image += 1
        if image == job.count:
            break
        tokens = images[image, _TOKENS]
        first, last = _tokens_of(portion - passed, tokens)
        products = result[begins[image] : begins[image + 1]].reshape((job.m, tokens))
        rows, kind = images[image, _ROWS], images[image, _TYPE]
        _multiply(rows, kind, tokens, unit, job.width, first, last, block, sums, products)
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
        begin = begins[image] + i * tokens
        affinities = result[begin : begin + tokens]
        lengths = carray(memory(images[image, _LENGTHS]), (tokens,), np.float32)
        _softmax_on_grid(affinities, lengths, job.tau, job.scale, scratch[0].view(np.float32))
        entropies[image, i] = _entropy(affinities, job.entropy_floor, scratch)


@Kernel
def _ask(query, norm_floor, tau, scale, entropy_floor, images, result, entropies, parallel, region, threads):  # type: ignore[no-untyped-def]
    """Share a question; returns the first row without a finite norm, or -1."""
    (count, m), width = entropies.shape, query.shape[1]
    padded = -(-m // _ROWS_WIDE) * _ROWS_WIDE
    unit = np.empty((-(-width // _COLUMNS), padded, _COLUMNS), np.float32)
    norms, counters = np.empty(m, np.float32), np.zeros(count + _DONE, np.int64)
    begins = np.zeros(count + 1, np.int64)
    for c in range(count):
        begins[c + 1] = begins[c] + m * images[c, _TOKENS]
    job = np.empty(1, _JOB)
    task = job[0]
    task.query, task.norms, task.unit = query.ctypes.data, norms.ctypes.data, unit.ctypes.data
    task.images, task.begins, task.counters = images.ctypes.data, begins.ctypes.data, counters.ctypes.data
    task.result, task.entropies = result.ctypes.data, entropies.ctypes.data
    task.count, task.m, task.padded, task.width = count, m, padded, width
    task.norm_floor, task.tau, task.scale, task.entropy_floor = norm_floor, tau, scale, entropy_floor
    run_in_team(parallel, region, job, threads, (unit, norms, begins, counters))
    for i in range(m):
        if not norms[i] < np.inf:
            return i
    return -1


@Kernel
def _entropies(affinity, floor, entropies):  # type: ignore[no-untyped-def]
    scratch = np.empty((3, _STRIP))
    for i in range(affinity.shape[0]):
        entropies[i] = _entropy(affinity[i], floor, scratch)


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


class Tokens(NamedTuple):
    """An image's embeddings, as compiled code takes them.

    Attributes
    ----------
    n
        Their number.
    kind
        How they are stored.
    rows
        Embeddings, and rows of zeros where there are fewer than four, (max(n, 4), d).
    lengths
        Their norms, (n,).
    """

    n: int
    kind: int
    rows: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, lengths: torch.Tensor) -> Tokens:
        """Of embeddings, (n, d), of a type in `STORED`, and lengths, (n,), float32; contiguous, in host memory."""
        n, kind = len(rows), STORED[rows.dtype]
        if n < _TOKENS_WIDE:
            rows = torch.cat([rows, rows.new_zeros((_TOKENS_WIDE - n, rows.shape[1]))])
        # Torch does not resize memory that numpy has seen. It may still move it (`share_memory_`).
        rows.reshape(-1).view(torch.int16).numpy()
        return cls(n, kind, rows, lengths)

    @property
    def entry(self) -> tuple[int, int, int, int]:
        """What threads are told of them."""
        return self.rows.data_ptr(), self.lengths.data_ptr(), self.n, self.kind


def query_affinities(
    query: Floats32, images: Sequence[Tokens], tau: float, bits: int, norm_floor: float, entropy_floor: float
) -> tuple[list[tuple[Floats32, Floats]], int]:
    """A^qv of one question for every image, (m, n_c), in C order, and the entropies of its rows, (m,).

    Beside them the first row of the query without a finite norm, or -1; if there is one, the rest is not computed.

    Parameters
    ----------
    query
        Rows of the query, (m, d), m >= 1, in C order.
    images
        Embeddings of images or crops, of d columns.
    tau
        Temperature.
    bits
        Of the grid.
    norm_floor, entropy_floor
        Lower bounds of the query's norms, and of what logarithms are taken of.
    """
    m, width = query.shape
    tokens = sum([image.n for image in images])
    result, entropies = np.empty(m * tokens, dtype=np.float32), np.empty((len(images), m))
    threads = torch.get_num_threads() if tokens * width >= _WORTH_SPLITTING else 1
    numbers = (float(max(norm_floor, _SMALLEST)), float(max(tau, _SMALLEST)), 2.0**bits, float(entropy_floor))
    table = np.array([image.entry for image in images], dtype=np.int64)
    bad = _ask(query, *numbers, table, result, entropies, parallel_address(), _share.address(), threads)
    found, begin = [], 0
    for image, of_rows in zip(images, entropies, strict=True):
        end = begin + m * image.n
        found.append((result[begin:end].reshape(m, image.n), of_rows))
        begin = end
    return found, bad
