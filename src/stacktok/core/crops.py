"""Crops of a high-resolution image that share one budget: Algorithm 2.

A crop's nominee depends on its own set alone, so the sequence of its nominees is its own run of Algorithm 1. All crops
run in parallel, first somewhat beyond an equal share; sharing the budget is then a merge of their nominees by h, and a
crop that wins all of its nominees runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from stacktok.core.affinity import QueryAffinity, query_affinities
from stacktok.core.budget import Budget, Coverage, resolve_budget
from stacktok.core.greedy import CoverageReference, CropRun, GreedyRun, adaptive_size, get_backend
from stacktok.core.inputs import Array, Eligible, check_list, check_same_device
from stacktok.core.parameters import Allocation, Parameters, Settings
from stacktok.core.record import CropSelection
from stacktok.core.selection import PreparedImage, given_unit, question_parameters
from stacktok.kernels import Ints

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class Crop:
    """One encoder input of a high-resolution image: the base view or a tile.

    Attributes
    ----------
    vision
        Pre-projector features, (n_c, d_v).
    projected
        Post-projector embeddings, (n_c, d).
    eligible
        Positions that may be kept: indices or a boolean mask; None for all.
    """

    vision: Array
    projected: Array
    eligible: Eligible = None


class PreparedCrops:
    """Crops whose coverage side is done; see `PreparedImage`. Made by `prepare_crops`."""

    def __init__(self, crops: Sequence[PreparedImage]) -> None:
        self.crops, self.parameters = tuple(crops), crops[0].parameters
        # One query serves all of them, and is checked against the first.
        embeddings = {f"crop {c}": crop.embeddings.rows for c, crop in enumerate(self.crops)}
        check_same_device(**embeddings)
        for name, rows in embeddings.items():
            if rows.shape[1] != embeddings["crop 0"].shape[1]:
                raise ValueError(
                    f"{name}: projected has {rows.shape[1]} columns and that of crop 0 "
                    f"{embeddings['crop 0'].shape[1]}; give embeddings of one language model"
                )

    def select(self, query: Array | None, budget: Budget, **settings: Unpack[Settings]) -> CropSelection:
        """Select tokens over all crops for a question; see `PreparedImage.select`."""
        for crop in self.crops:
            crop.check()
        parameters = question_parameters(self.parameters, dict(settings))
        question, embeddings = self.crops[0].question(query), [crop.embeddings for crop in self.crops]
        queries = query_affinities(question, embeddings, parameters)
        references = [crop.reference for crop in self.crops]
        return _select(list(zip(references, queries, strict=True)), budget, parameters)

    @property
    def nbytes(self) -> int:
        """Bytes that preparing added to the features."""
        return sum(crop.nbytes for crop in self.crops)


def prepare_crops(crops: Sequence[Crop], **settings: Unpack[Settings]) -> PreparedCrops:
    """Do everything about the crops of an image that no question changes; see `prepare`."""
    check_list(crops, "crops", "Crop(vision, projected, eligible)")
    if not crops:
        raise ValueError("crops is empty; give at least one Crop")
    for c, crop in enumerate(crops):
        if not isinstance(crop, Crop):
            raise TypeError(f"crops[{c}] has type {type(crop).__name__}; give a Crop(vision, projected, eligible)")
    parameters = Parameters.of(settings)
    return PreparedCrops(
        [
            PreparedImage(crop.vision, crop.projected, crop.eligible, parameters, f"crop {c}: ")
            for c, crop in enumerate(crops)
        ]
    )


def select_crops(
    crops: Sequence[Crop], query: Array | None, budget: Budget, **settings: Unpack[Settings]
) -> CropSelection:
    """Keep one shared budget over the crops of an image: Algorithm 2 of the paper, from features.

    Parameters
    ----------
    crops
        Base view and tiles, L >= 1.
    query
        Input embeddings of the query's tokens, (m, d); None or m = 0 selects by coverage alone.
    budget
        A count, or a fraction of all crops' encoded positions together.
    **settings
        See `Parameters`.
    """
    return prepare_crops(crops, **settings).select(query, budget)


def select_crops_from_affinities(
    affinities: Sequence[tuple[Array | None, Array, Eligible]], budget: Budget, **settings: Unpack[Settings]
) -> CropSelection:
    """Algorithm 2 on given affinities.

    Parameters
    ----------
    affinities
        One (query_affinity, vision_affinity, eligible) per crop, as in `select_from_affinities`.
    budget, **settings
        As in `select_crops`.
    """
    check_list(affinities, "affinities", "(query_affinity, vision_affinity, eligible)")
    if not affinities:
        raise ValueError("affinities is empty; give at least one (query_affinity, vision_affinity, eligible)")
    for c, entry in enumerate(affinities):
        if len(entry) != 3:
            raise ValueError(
                f"affinities[{c}] has {len(entry)} entries; give (query_affinity, vision_affinity, eligible)"
            )
    parameters = Parameters.of(settings)
    units = [
        given_unit(a_qv, a_vv, eligible, parameters, crop=f"crop {c}: ")
        for c, (a_qv, a_vv, eligible) in enumerate(affinities)
    ]
    rows = {len(query) for _, query in units}
    if len(rows) > 1:
        raise ValueError(f"the crops' query affinities have {sorted(rows)} rows; one query serves all crops")
    return _select(units, budget, parameters)


def _select(
    units: Sequence[tuple[CoverageReference, QueryAffinity]], budget: Budget, parameters: Parameters
) -> CropSelection:
    """Spend a budget over crops, Algorithm 2 or fixed quotas, and refine each crop by itself."""
    references = [reference for reference, _ in units]
    capacities = [reference.capacity for reference in references]
    adaptive = Coverage.of(budget)
    bound = budget if adaptive is None else adaptive.at_most
    total = resolve_budget(bound, sum(reference.n for reference in references), sum(capacities))
    horizons, totals = [min(total, capacity) for capacity in capacities], [total] * len(units)
    limits = horizons
    if parameters.allocation != "shared":
        weights = [Fraction(1)] * len(units)
        if parameters.allocation == "proportional":
            lengths = [min(1, horizon) for horizon in horizons]
            first = [run.on_host() for run in GreedyRun.run(units, parameters, totals, lengths, horizons)]
            gains = [Fraction(float(run.nominee_gains().sum())) for run in first]
            weights = gains if any(gains) else weights
        limits = apportion(total, weights, capacities)
    if parameters.allocation == "shared":
        runs = _shared_runs(units, parameters, total, horizons)
    else:
        runs = [run.on_host() for run in GreedyRun.run(units, parameters, totals, limits, horizons)]
    found = spend(runs, total, parameters.allocation)
    if adaptive is None:
        return found
    sizes = np.zeros((total + 1, len(runs)), dtype=np.int64)
    for step, (crop, _) in enumerate(found.order):
        sizes[step + 1] = sizes[step]
        sizes[step + 1, crop] += 1
    return found.prefix(adaptive_size(adaptive, runs, sizes), refine=True)


def _shared_runs(
    units: Sequence[tuple[CoverageReference, QueryAffinity]],
    parameters: Parameters,
    total: int,
    horizons: Sequence[int],
) -> list[GreedyRun]:
    """Runs of crops that share a budget, as long as Algorithm 2 asks for their nominees."""
    lengths = [min(horizon, 1 + 3 * total // (2 * len(units))) for horizon in horizons]
    runs: dict[int, GreedyRun] = {}
    short = list(range(len(units)))
    while short:
        own = ([values[c] for c in short] for values in (lengths, horizons))
        found = GreedyRun.run([units[c] for c in short], parameters, [total] * len(short), *own)
        runs |= {c: run.on_host() for c, run in zip(short, found, strict=True)}
        winners, _ = _allocate([runs[c] for c in range(len(units))], min(total, sum(lengths)))
        won = np.bincount(winners, minlength=len(units))
        short = [c for c, length in enumerate(lengths) if won[c] == length < horizons[c]]
        for c in short:
            lengths[c] = min(horizons[c], 2 * lengths[c])
    return [runs[c] for c in range(len(units))]


def _allocate(runs: Sequence[CropRun], total: int) -> tuple[Ints, Ints]:
    return get_backend(runs[0].reference.backend).allocate([run.nominee_gains() for run in runs], total)


def spend(runs: Sequence[CropRun], total: int, allocation: Allocation = "shared") -> CropSelection:
    """Algorithm 2 on runs of every crop, none shorter than what its crop may get, and each crop's record."""
    gains_of, limits = [run.nominee_gains() for run in runs], [len(run.steps.order) for run in runs]
    winners, sizes = _allocate(runs, total)
    nominees, nominee_gain = np.full(sizes.shape, -1, dtype=np.int64), np.full(sizes.shape, np.nan)
    for c, run in enumerate(runs):
        open_ = sizes[:, c] < limits[c]
        nominees[open_, c] = run.steps.order[sizes[open_, c]]
        nominee_gain[open_, c] = gains_of[c][sizes[open_, c]]
    won = np.bincount(winners, minlength=len(runs)).tolist()
    selections = tuple(run.record(size) for run, size in zip(runs, won, strict=True))
    return CropSelection(
        k=total,
        crops=selections,
        order=tuple(zip(winners.tolist(), nominees[np.arange(total), winners].tolist(), strict=True)),
        nominees=nominees,
        nominee_gain=nominee_gain,
        _not_anytime=selections[0]._not_anytime or ("" if allocation == "shared" else f'allocation="{allocation}"'),
    )


def apportion(total: int, weights: Sequence[Fraction], capacities: Sequence[int]) -> list[int]:
    """Split ``total`` by weights, largest remainders first (ties to the lowest index), no share above its capacity.

    What a full share leaves over goes to the others by their weights; where those are all zero, equally.
    """
    shares = [0] * len(weights)
    opened = list(range(len(weights)))
    while opened:
        scale = sum(weights[c] for c in opened)
        exact = {c: total * (weights[c] / scale if scale else Fraction(1, len(opened))) for c in opened}
        full = [c for c in opened if exact[c] >= capacities[c]]
        if not full:
            break
        for c in full:
            shares[c] = capacities[c]
            total -= capacities[c]
            opened.remove(c)
    for c in opened:
        shares[c] = int(exact[c])
    left = total - sum(shares[c] for c in opened)
    for c in sorted(opened, key=lambda c: (shares[c] - exact[c], c))[:left]:
        shares[c] += 1
    return shares
