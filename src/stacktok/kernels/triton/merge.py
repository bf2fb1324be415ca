"""Sharing a budget over crops, Algorithm 2, one program per image.

Every crop has already run Algorithm 1 by itself to its horizon. Its nominee after s picks is its pick s, whatever the
other crops do, so sharing the budget is a merge of the crops' runs by the gain h of their nominees, Eq. (crop-nominee).

Invariant: after t steps ``taken`` holds how many tokens each crop has, t together, and ``heads`` the gain of its next
nominee, minus infinity once the crop is exhausted. Ties go to the lowest crop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from stacktok.kernels import Steps
from stacktok.kernels.transfer import upload

MERGE_FIELDS = tl.constexpr(4)
"""Integers per image: its first crop, the number of crops, the budget, and where its winners begin."""

CROP_FIELDS = tl.constexpr(5)
"""Integers per crop: the addresses of its curves, its rows m and n, and the number of its picks."""


@triton.jit
def merge(images, crops, winners, sizes, CROPS: tl.constexpr):
    """Spend every image's budget; see `stacktok.kernels.triton.allocate`."""
    image = images + tl.program_id(0) * MERGE_FIELDS
    first, count = tl.load(image), tl.load(image + 1)
    budget = tl.load(image + 2).to(tl.int32)
    winners += tl.load(image + 3)
    c = tl.arange(0, CROPS)
    row = crops + (first + c) * CROP_FIELDS
    inside = c < count
    relevance = tl.load(row, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    coverage = tl.load(row + 1, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    query_rows = tl.maximum(tl.load(row + 2, mask=inside, other=1), 1).to(tl.float64)
    vision_rows = tl.load(row + 3, mask=inside, other=1).to(tl.float64)
    limit = tl.load(row + 4, mask=inside, other=0)
    taken = tl.zeros((CROPS,), tl.int64)
    for step in range(budget):
        left = taken < limit
        more_relevant = tl.load(relevance + taken + 1, mask=left, other=0.0) - tl.load(
            relevance + taken, mask=left, other=0.0
        )
        more_covered = tl.load(coverage + taken + 1, mask=left, other=0.0) - tl.load(
            coverage + taken, mask=left, other=0.0
        )
        heads = tl.where(left, more_relevant / query_rows + more_covered / vision_rows, float("-inf"))
        winner = tl.argmax(heads, 0)
        tl.store(winners + step, winner.to(tl.int64))
        taken += (c == winner).to(tl.int64)
    tl.store(sizes + first + c, taken, mask=inside)


class Runs(NamedTuple):
    """The runs of the crops of one image.

    Attributes
    ----------
    steps
        One per crop, each as far as the crop may get.
    rows
        Query rows m and tokens n of every crop.
    budget
        Tokens to share, at most the number of all steps.
    """

    steps: Sequence[Steps]
    rows: Sequence[tuple[int, int]]
    budget: int


def allocate(images: Sequence[Runs]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Algorithm 2 for every image in one launch: the winner of each step, (budget,), and the crops' sizes, (L,)."""
    device = images[0].steps[0].coverage.device
    table, crops, first, begin = [], [], 0, 0
    for image in images:
        table.append([first, len(image.steps), image.budget, begin])
        for steps, (m, n) in zip(image.steps, image.rows, strict=True):
            crops.append([steps.relevance.data_ptr(), steps.coverage.data_ptr(), m, n, len(steps.order)])
        first += len(image.steps)
        begin += image.budget
    winners = torch.empty(begin, dtype=torch.int64, device=device)
    sizes = torch.empty(first, dtype=torch.int64, device=device)
    block = 1 << max(len(image.steps) for image in images).bit_length()
    merge[(len(images),)](
        upload(table, device, torch.int64), upload(crops, device, torch.int64), winners, sizes, CROPS=block,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    budgets, counts = [image.budget for image in images], [len(image.steps) for image in images]
    return list(zip(winners.split(budgets), sizes.split(counts), strict=True))
