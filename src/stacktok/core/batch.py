"""Many images at once: different sizes, queries and budgets, all cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

import torch

from stacktok.core.budget import Budget, budget_share
from stacktok.core.inputs import Array, Eligible, check_list
from stacktok.core.parameters import Parameters, Settings
from stacktok.core.record import Selection
from stacktok.core.selection import PreparedImage

if TYPE_CHECKING:
    from typing_extensions import Unpack


def select_batch(
    vision: Sequence[Array],
    projected: Sequence[Array],
    query: Sequence[Array | None],
    budget: Budget | Sequence[Budget],
    *,
    eligible: Sequence[Eligible] | None = None,
    **settings: Unpack[Settings],
) -> list[Selection]:
    """Select on many images; the results are those of `select` on each, detached.

    Affinities are built image by image, each on all cores; meanwhile the greedy runs of the images already built go on
    in parallel, since a run is sequential.

    Parameters
    ----------
    vision, projected, query
        One entry per image, as in `select`; images may differ in every size.
    budget
        One budget for all images, or one per image.
    eligible
        One entry per image, or None for all positions of all images.
    **settings
        See `Parameters`.
    """
    parameters = Parameters.of(settings)
    for name, given in (("vision", vision), ("projected", projected), ("query", query)):
        check_list(given, name, "one matrix per image")
    count = len(vision)
    if isinstance(budget, str) or not isinstance(budget, Iterable):
        budgets: list[Budget] = [budget] * count
    else:
        budgets = list(budget)
    masks: list[Eligible] = [None] * count if eligible is None else list(eligible)
    for name, values in (("projected", projected), ("query", query), ("budget", budgets), ("eligible", masks)):
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} images; give one per image")
    for one in budgets:
        budget_share(one)
    selections: list[Future[Selection]] = []
    workers = torch.get_num_threads()
    # Images built ahead of the greedy runs wait, so that only a few hold their affinities at a time.
    waiting = BoundedSemaphore(2 * workers)
    with ThreadPoolExecutor(workers) as pool:
        for image, x in enumerate(vision):
            waiting.acquire()
            prepared = PreparedImage(x, projected[image], masks[image], parameters, f"image {image}: ")
            selections.append(pool.submit(_select, prepared, query[image], budgets[image], waiting))
            del prepared
    return [selection.result() for selection in selections]


def _select(image: PreparedImage, query: Array | None, budget: Budget, waiting: BoundedSemaphore) -> Selection:
    try:
        return image.select(query, budget).detach()
    finally:
        waiting.release()
