"""The shared part of this package's kernels: how a ragged batch is handed over, how they are launched, and the argmax.

A batch is a table with one row of integers per unit: the addresses of its arrays and its sizes. So no array is copied
to stand next to another, units may differ in every size, and one launch runs all of them, one program (a block of
threads on one multiprocessor) each.

Threads of a program hand numbers to one another through global memory, which is ordered by `tl.debug_barrier`. Blocks
hold at least one element per thread, so that what is stored is loaded by the thread that stored it unless a barrier
stands between. Indices are 32-bit: n times n must stay below 2^31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns or rows that a program handles at a time."""

ROWS = 4
"""Rows of a matrix that are read at a time, so that more loads are under way."""

OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
"""Compiler options. A fused multiply-add would round once where the other backends round twice."""

ENTRIES = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Types of a matrix's entries."""


def check_device(device: torch.device) -> None:
    """Refuse tensors that Triton cannot reach."""
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            'backend="triton" runs on GPUs and the tensors lie on the CPU; use backend="cpu", or set '
            "TRITON_INTERPRET=1 before Python starts to interpret the kernels slowly"
        )


def entry_type(matrices: Sequence[torch.Tensor]) -> torch.dtype:
    """The one type of entries that a launch reads."""
    return torch.float64 if any(matrix.dtype == torch.float64 for matrix in matrices) else torch.float32


@triton.jit
def best(gains, weights, n, BLOCK: tl.constexpr):
    """Lowest index of the largest positive weighted gain, -1 if there is none.

    Tiles are visited in order and a later one must exceed the best so far, so ties go to the lowest index.
    """
    token = tl.full((), -1, tl.int32)
    highest = tl.full((), 0.0, tl.float64)
    for first in range(0, n, BLOCK):
        j = first + tl.arange(0, BLOCK)
        gain = tl.load(gains + j, mask=j < n, other=0.0)
        score = tl.maximum(gain, 0.0) * tl.load(weights + j, mask=j < n, other=0.0)
        value, at = tl.max(score, 0, return_indices=True)
        token = tl.where(value > highest, first + at, token)
        highest = tl.maximum(highest, value)
    return token
