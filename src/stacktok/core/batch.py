"""Many images at once: different sizes, queries and budgets, all cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

import torch

from stacktok.core.budget import Budget, budget_share
from stacktok.core.inputs import Array, Eligible
from stacktok.core.parameters import Parameters, Settings
from stacktok.core.record import Selection
from stacktok.core.selection import PreparedImage, finish
from stacktok.core.trajectory import Trajectory

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

    Affinities are built image by image, each on all cores; meanwhile the greedy walks of the images already built run
    beside each other, since a walk is sequential.

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
    walks: list[Future[Selection]] = []
    workers = torch.get_num_threads()
    # Images built ahead of the walks wait, so that only a few hold their affinities at a time.
    room = BoundedSemaphore(2 * workers)
    with ThreadPoolExecutor(workers) as pool:
        for image, x in enumerate(vision):
            room.acquire()
            prepared = PreparedImage(x, projected[image], masks[image], parameters, f"image {image}: ")
            walks.append(pool.submit(_walk, prepared.trajectory(query[image], prepared.count(budgets[image])), room))
            del prepared
    return [walk.result() for walk in walks]


def _walk(trajectory: Trajectory, room: BoundedSemaphore) -> Selection:
    try:
        return finish(trajectory).detach()
    finally:
        room.release()
