"""Affinities, Eq. (affinity): row softmax of cosine over temperature, on a grid that makes sums exact.

Whether a gain is exactly zero, whether two gains tie and whether a deficit is positive decide picks. Entries are
therefore rounded to multiples of 2^-b, with b so small that float64 holds every sum and difference of a column without
rounding: coverage and gains are then functions of the set alone, whatever the order of summation, the number of
threads or the way of updating.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from stacktok.core.inputs import Array, as_matrix, check_same_device
from stacktok.core.parameters import Parameters
from stacktok.kernels import Floats, Matrix

Affinity: TypeAlias = Any
"""A non-negative matrix on its grid, float32 or float64: an array in C order, or a tensor for the "triton" backend."""

QueryAffinity: TypeAlias = Affinity
"""A^qv, (m, n); m may be 0."""

Copies = tuple[torch.Tensor, torch.Tensor]
"""Tokens that equal an earlier one, and which."""

# Elements handled at a time: a block of float32 stays in a core's second-level cache, and no temporary is larger.
_BLOCK = 1 << 19
# Bytes of half a huge page, and from which on numpy asks for huge pages.
_HALF_A_PAGE, _HUGE = 1 << 20, 1 << 22
# Bytes at multiples of which matrices begin: a library may round products differently at other addresses.
_ALIGNMENT = 64
# Elements of half-precision features that are cast up at a time.
_CAST = 1 << 23


@cache
def grid_bits(rows: int, largest: float = 1.0) -> int:
    """Bits b of the grid step 2^-b on which sums over ``rows`` entries of at most ``largest`` are exact in float64."""
    return 52 - math.ceil(math.log2(max(1, rows))) - math.ceil(math.log2(max(1.0, largest)))


def vision_affinity(
    vision: torch.Tensor, tau: float, norm_epsilon: float, norms: torch.Tensor, *, host: bool = True
) -> Affinity:
    """A^vv of Eq. (affinity), shape (n, n).

    Built block by block inside the result, so that nothing else of its size is ever held.

    Parameters
    ----------
    vision
        Pre-projector features, (n, d_v), of any floating-point type.
    tau
        Temperature, tau_v.
    norm_epsilon
        Lower bound of the norms.
    norms
        Row norms of ``vision``, (n,), from `row_norms`.
    host
        Copy the result to the host. Otherwise it stays where it is, and nothing waits for the device.
    """
    n = len(vision)
    unit = vision.to(norms.dtype) / _floored(norms, norm_epsilon)[:, None]
    if unit.device.type == "cpu":
        result = torch.from_numpy(_empty_matrix(n, np.dtype(np.float64 if unit.dtype == torch.float64 else np.float32)))
    else:
        result = torch.empty((n, n), dtype=unit.dtype, device=unit.device)
    _multiply(unit, unit, result)
    tie(result, copies(vision, norms) if host else all_copies(vision, norms))
    bits = grid_bits(n)
    for rows in _row_blocks(n, n):
        _softmax_on_grid(result[rows], tau, bits)
    return _on_host(result) if host else result


class Embeddings(NamedTuple):
    """Post-projector embeddings of an image, and what every question needs of them.

    Attributes
    ----------
    rows
        The embeddings, (n, d), contiguous and aligned.
    lengths
        Their norms, not below the floor, (n,).
    equal
        Copies among them.
    host
        Whether affinities to them belong in host memory.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    equal: Copies | None
    host: bool = True

    @classmethod
    def of(cls, rows: torch.Tensor, norm_epsilon: float, name: str, *, host: bool = True) -> Embeddings:
        """Of features with finite norms; ``name`` is what error messages call them."""
        norms = row_norms(rows, name) if host else norms_of(rows)
        equal, rows = (copies if host else all_copies)(rows, norms), rows.contiguous()
        if rows.data_ptr() % _ALIGNMENT:
            rows = rows.clone()
        return cls(rows, _floored(norms, norm_epsilon), equal, host)


def query_affinities(query: torch.Tensor, images: Sequence[Embeddings], parameters: Parameters) -> list[QueryAffinity]:
    """A^qv of Eq. (affinity), (m, n), of one question for several images or crops.

    Parameters
    ----------
    query
        Embeddings of the query's tokens, (m, d); m may be 0.
    images
        The images' embeddings.
    parameters
        Temperature tau_t and the floor of the norms.
    """
    if not len(query):
        empty = [query.new_empty((0, len(image.rows)), dtype=torch.float32) for image in images]
        return [_on_host(one) if image.host else one for one, image in zip(empty, images, strict=True)]
    found = query_cosines(query, images, parameters.norm_epsilon)
    for cosines in found:
        _softmax_on_grid(cosines, parameters.tau_query, grid_bits(len(cosines)))
    return [_on_host(one) if image.host else one for one, image in zip(found, images, strict=True)]


def query_cosines(query: torch.Tensor, images: Sequence[Embeddings], norm_epsilon: float) -> list[torch.Tensor]:
    """Cosines of a question's rows, (m, d), with the tokens of several images or crops, (m, n) each."""
    waits = any(image.host for image in images)
    norms = _floored(row_norms(query, "query") if waits else norms_of(query), norm_epsilon)
    unit = query.to(norms.dtype) / norms[:, None]
    return [_cosines(unit, image) for image in images]


def _cosines(unit: torch.Tensor, image: Embeddings) -> torch.Tensor:
    """Cosines of query rows of length one, (m, d), with an image's tokens, (m, n)."""
    unit = unit.to(torch.promote_types(unit.dtype, image.lengths.dtype))
    cosines = unit.new_empty((len(unit), len(image.rows)))
    for block in _row_blocks(len(image.rows), image.rows.shape[1], _CAST):
        cosines[:, block] = _multiply(unit, image.rows[block].to(unit.dtype))
    cosines /= image.lengths
    tie(cosines, image.equal)
    return cosines


def weighted_affinity(affinity: Affinity, weights: Floats) -> Affinity:
    """An affinity matrix, (n, n), whose rows are multiplied by weights, (n,), of mean at most 1; on the same grid.

    A column then sums to at most n, as that of the matrix itself does, so that sums stay exact.
    """
    matrix = torch.as_tensor(affinity)
    bits = grid_bits(len(matrix))
    result = matrix * torch.from_numpy(weights).to(matrix)[:, None]
    result.mul_(2.0**bits).round_().mul_(2.0**-bits)
    return result if isinstance(affinity, torch.Tensor) else result.numpy()


def row_norms(features: torch.Tensor, name: str) -> torch.Tensor:
    """Euclidean norm of every row, in the working precision; a row without a finite norm is an error.

    The norms are needed anyway, and show NaN and infinity at no cost.
    """
    norms = norms_of(features)
    if not bool(torch.isfinite(norms).all()):
        raise _no_norm(features, int((~torch.isfinite(norms)).nonzero()[0]), name)
    return norms


def norms_of(features: torch.Tensor) -> torch.Tensor:
    """Euclidean norm of every row, (n,), in the working precision, unchecked."""
    norms = torch.empty(len(features), dtype=_working_type(features), device=features.device)
    for rows in _row_blocks(len(features), features.shape[1], _CAST):
        norms[rows] = torch.linalg.vector_norm(features[rows].to(norms.dtype), dim=1)
    return norms


def _no_norm(features: torch.Tensor, row: int, name: str) -> ValueError:
    """Why a row has no finite norm."""
    values = features[row].to(_working_type(features))
    if bool(torch.isfinite(values).all()):
        return ValueError(f"{name}[{row}] is finite but its norm overflows {values.dtype}; scale the features down")
    return ValueError(f"{name}[{row}] holds NaN or infinity; give finite features")


def copies(features: torch.Tensor, norms: torch.Tensor) -> Copies | None:
    """Tokens that equal an earlier one, and the first token that each equals; None where there are none.

    Only rows of equal norm can be equal, so an image without copies pays for sorting its norms.

    Parameters
    ----------
    features, norms
        The tokens, (n, d), and their norms, (n,).
    """
    ordered, index = norms.sort(stable=True)
    same = ordered[1:] == ordered[:-1]
    if not bool(same.any()):
        return None
    suspects = torch.zeros_like(norms, dtype=torch.bool)
    suspects[index[1:][same]] = True
    suspects[index[:-1][same]] = True
    tokens = suspects.nonzero()[:, 0]
    _, kind = torch.unique(features[tokens].to(norms.dtype), dim=0, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(norms), device=tokens.device)
    first.scatter_reduce_(0, kind, tokens, "amin")
    later = first[kind] != tokens
    return (tokens[later], first[kind][later]) if bool(later.any()) else None


def all_copies(features: torch.Tensor, norms: torch.Tensor) -> Copies:
    """All tokens, and of each the first token that it equals, its own where it equals none.

    Shapes do not depend on the numbers, so that nothing waits for a device. A token is compared with the first of those
    whose norm it shares; of two kinds of tokens with one norm, only copies of the first kind are found.
    """
    ordered, index = norms.sort(stable=True)
    tokens = torch.arange(len(norms), device=norms.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    leader = index[torch.where(new, tokens, 0).cummax(0).values]
    first = torch.empty_like(index).scatter_(0, index, leader)
    same = (features[first] == features).all(1)
    return tokens, torch.where(same, first, tokens)


def tie(products: torch.Tensor, equal: Copies | None) -> None:
    """Give equal tokens equal columns: a matrix product may round the same row differently at different places.

    Parameters
    ----------
    products
        Products with every token, (rows, n); changed in place.
    equal
        From `copies`.
    """
    if equal is not None:
        products[:, equal[0]] = products[:, equal[1]]


def affinities(
    vision: Array,
    projected: Array,
    query: Array | None,
    *,
    tau_query: float = 0.02,
    tau_vision: float = 0.2,
    norm_epsilon: float = 1e-8,
) -> tuple[Affinity, Affinity]:
    """Both affinities of one image, as the selector builds them.

    Parameters
    ----------
    vision
        Pre-projector features, (n, d_v).
    projected
        Post-projector embeddings, (n, d).
    query
        Embeddings of the query's tokens, (m, d), or None for m = 0.
    tau_query, tau_vision, norm_epsilon
        As in `Parameters`.

    Returns
    -------
    tuple
        A^qv, (m, n), and A^vv, (n, n).
    """
    parameters = Parameters(tau_query=tau_query, tau_vision=tau_vision, norm_epsilon=norm_epsilon)
    x, z, q = check_features(vision, projected, query)
    a_vv = vision_affinity(x, tau_vision, norm_epsilon, row_norms(x, "vision"))
    embeddings = Embeddings.of(z, norm_epsilon, "projected")
    return query_affinities(q, [embeddings], parameters)[0], a_vv


def check_features(
    vision: Array, projected: Array, query: Array | None, where: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three feature matrices as tensors of agreeing shapes on one device; no query becomes a (0, d) one.

    ``where`` says in error messages which image or crop it is.
    """
    x, z = as_matrix(vision, f"{where}vision"), as_matrix(projected, f"{where}projected")
    if len(x) != len(z):
        raise ValueError(f"{where}vision has {len(x)} rows and projected {len(z)}; give one row per visual token each")
    if len(x) == 0:
        raise ValueError(f"{where}vision has 0 rows; an image has at least one visual token")
    for name, features in (("vision", x), ("projected", z)):
        if features.shape[1] == 0:
            raise ValueError(f"{where}{name} has 0 columns; a feature has at least one number")
    q = check_query(query, z)
    check_same_device(vision=x, projected=z, query=q)
    return x, z, q


def check_query(query: Array | None, projected: torch.Tensor) -> torch.Tensor:
    """The query's embeddings as a tensor that fits ``projected``; None becomes a (0, d) one."""
    if query is None:
        return projected.new_empty((0, projected.shape[1]))
    q = as_matrix(query, "query")
    if q.shape[1] != projected.shape[1]:
        raise ValueError(
            f"query has {q.shape[1]} columns and projected {projected.shape[1]}; both are language-model embeddings"
        )
    return q


def given_affinity(affinity: Array, name: str, depth: int | None = 1) -> Affinity:
    """A caller's affinity matrix, checked and rounded to its grid; the caller's memory is never written.

    Parameters
    ----------
    affinity
        Non-negative finite matrix, (rows, n).
    name
        Its name in error messages.
    depth
        How many entries of a row may count at once: a row's value, not only an entry, must fit the grid.
    """
    tensor = as_matrix(affinity, name)
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    tensor = tensor.cpu().contiguous()
    rows, n = tensor.shape
    if n == 0:
        raise ValueError(f"{name} has no columns; an image has at least one visual token")
    if rows == 0:
        return _on_host(tensor)
    smallest, largest = (float(bound) for bound in torch.aminmax(tensor))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise ValueError(f"{name} holds NaN or infinity; give finite affinities")
    if smallest < 0:
        raise ValueError(f"{name} holds {smallest}; affinities must not be negative")
    if depth != 1:
        counted = n if depth is None else min(depth, n)
        row_value = float(tensor.double().topk(counted, dim=1, sorted=False).values.sum(1).max())
        # One bit of float64 is spare, which absorbs what rounding adds to rows that sum to one.
        largest = max(largest, row_value / 2 * (1 + 2.0**-20))
    if not math.isfinite(largest * rows):
        raise ValueError(f"{name} holds {largest}, whose sums overflow; scale the affinities down")
    bits = grid_bits(rows, largest)
    if tensor.dtype == torch.float64 and all(_fits_float32(_rounded(tensor[b], bits)) for b in _row_blocks(rows, n)):
        return _on_host(torch.cat([_rounded(tensor[b], bits).float() for b in _row_blocks(rows, n)]))
    result = tensor
    for block in _row_blocks(rows, n):
        rounded = _rounded(tensor[block], bits)
        if result is tensor:
            if torch.equal(rounded, tensor[block]):
                continue
            result = tensor.clone()
        result[block] = rounded
    return _on_host(result)


def on_grid(affinity: torch.Tensor) -> torch.Tensor:
    """A matrix of entries from 0 to 1, (rows, n), rounded to its grid where it is; nothing waits for a device."""
    return _rounded(affinity, grid_bits(len(affinity)))


def _working_type(features: torch.Tensor) -> torch.dtype:
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _empty_matrix(n: int, dtype: np.dtype[np.floating]) -> Affinity:
    """An aligned (n, n) matrix in host memory, in huge pages if it fills half of one or more.

    A greedy run jumps from row to row, and would spend much of its time on looking up small pages. Numpy asks the
    system for huge ones, but only for arrays of 4 MiB and more: a smaller matrix is the beginning of one.
    """
    size = n * n * dtype.itemsize
    memory = np.empty((max(size, _HUGE) if size >= _HALF_A_PAGE else size) + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    matrix: Affinity = memory[first : first + size].view(dtype).reshape(n, n)
    return matrix


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Products of all rows of two matrices, (p, d) and (n, d), in their own precision whatever autocast says."""
    # The first product of a Python thread otherwise runs on another number of threads than all later ones, and rounds
    # differently: asking for the number settles it.
    torch.get_num_threads()
    with torch.autocast(left.device.type, enabled=False):
        return torch.mm(left, right.T, out=out)


def _floored(norms: torch.Tensor, norm_epsilon: float) -> torch.Tensor:
    return norms.clamp_min(_floor(norm_epsilon, norms.dtype))


def _floor(norm_epsilon: float, dtype: torch.dtype) -> float:
    return max(norm_epsilon, torch.finfo(dtype).tiny)


def _fits_float32(affinity: torch.Tensor) -> bool:
    return torch.equal(affinity.float().double(), affinity)


def _row_blocks(rows: int, columns: int, elements: int = _BLOCK) -> list[slice]:
    # Multiples of 16 rows, so that aligned matrices have aligned blocks.
    step = max(16, elements // max(1, columns) // 16 * 16)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _softmax_on_grid(logits: torch.Tensor, tau: float, bits: int) -> None:
    """Replace cosines by their row softmax, rounded to the grid."""
    # The row maximum goes before the division, so that no temperature is too small.
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(max(tau, torch.finfo(logits.dtype).tiny))
    torch.softmax(logits, dim=-1, out=logits)
    logits.mul_(2.0**bits).round_().mul_(2.0**-bits)


def _rounded(affinity: torch.Tensor, bits: int) -> torch.Tensor:
    return affinity.mul(2.0**bits).round_().mul_(2.0**-bits)


def on_host(affinity: Affinity) -> Matrix:
    """An affinity as an array, whatever the backend holds."""
    return _on_host(affinity) if isinstance(affinity, torch.Tensor) else affinity


def _on_host(affinity: torch.Tensor) -> Matrix:
    """A matrix in host memory; from a GPU by way of pinned memory, which is the fastest."""
    if affinity.is_cuda:
        pinned = torch.empty(affinity.shape, dtype=affinity.dtype, pin_memory=True)
        return pinned.copy_(affinity).numpy()
    return affinity.cpu().numpy()
