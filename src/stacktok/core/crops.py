"""Crops of a high-resolution image that share one budget: Algorithm 2.

What a crop nominates depends on its own set alone, so the sequence of its nominees is its own run of Algorithm 1.
Sharing the budget is then a merge of those sequences by h; a crop's run is extended only when its next nominee is
asked for, which is the caching of nominations that the paper describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from stacktok.core.affinity import query_sides
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.inputs import Array, Eligible, check_same_device
from stacktok.core.parameters import Parameters, Settings
from stacktok.core.record import CropSelection
from stacktok.core.selection import PreparedImage, given_unit, question_parameters
from stacktok.core.trajectory import Support, Trajectory

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Nominees by which a crop's run is extended at the least, so that the merge is not one call per token.
_MARGIN = 8


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

    def __init__(self, crops: Sequence[Crop], parameters: Parameters) -> None:
        if len(crops) == 0:
            raise ValueError("crops is empty; give at least one Crop")
        self.parameters = parameters
        for c, crop in enumerate(crops):
            if not isinstance(crop, Crop):
                raise TypeError(f"crops[{c}] has type {type(crop).__name__}; give a Crop(vision, projected, eligible)")
        self.crops = tuple(
            PreparedImage(crop.vision, crop.projected, crop.eligible, parameters, f"crop {c}: ")
            for c, crop in enumerate(crops)
        )
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
        parameters = question_parameters(self.parameters, dict(settings))
        total = _total(budget, [crop.support for crop in self.crops])
        question, embeddings = self.crops[0].question(query), [crop.embeddings for crop in self.crops]
        sides = zip(self.crops, query_sides(question, embeddings, parameters), strict=True)
        return allocate([Trajectory(crop.support, side, parameters, total) for crop, side in sides], total, parameters)


def prepare_crops(crops: Sequence[Crop], **settings: Unpack[Settings]) -> PreparedCrops:
    """Do everything about the crops of an image that no question changes; see `prepare`."""
    return PreparedCrops(crops, Parameters.of(settings))


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
    if len(affinities) == 0:
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
    rows = {len(side.affinity) for _, side in units}
    if len(rows) > 1:
        raise ValueError(f"the crops' query affinities have {sorted(rows)} rows; one query serves all crops")
    total = _total(budget, [support for support, _ in units])
    return allocate([Trajectory(*unit, parameters, total) for unit in units], total, parameters)


def _total(budget: Budget, units: Sequence[Support]) -> int:
    """A budget that crops share as a number of tokens."""
    return resolve_budget(budget, sum(unit.n for unit in units), sum(unit.capacity for unit in units))


def allocate(crops: Sequence[Trajectory], total: int, parameters: Parameters) -> CropSelection:
    """Spend a budget over crops, Eqs. (crop-nominee) and (global), and refine each crop by itself."""
    from stacktok.kernels.merge import Merge

    horizons = [min(total, crop.support.capacity) for crop in crops]
    shared = parameters.allocation == "shared"
    merge = Merge.of(total, horizons if shared else _quotas(crops, total, horizons, parameters))

    def walk(lengths: dict[int, int]) -> None:
        ends = [horizons[c] for c in lengths]
        Trajectory.advance_together([crops[c] for c in lengths], list(lengths.values()), ends)
        for c in lengths:
            crops[c].nominate(merge.tokens[c], merge.gains[c], merge.known[c])
            merge.known[c] = crops[c].length

    # Every crop walks to an equal share at once; the merge then asks for what it needs beyond.
    limits, share = merge.limits.tolist(), total // len(crops)
    walk({c: min(limit, share) for c, limit in enumerate(limits)})
    step = 0
    while (step := merge.spend(step)) < total:
        # To where a crop gets if it goes on winning as often as until now, and a little further.
        ahead = [size * total * 9 // (8 * max(1, step)) + _MARGIN for size in merge.sizes.tolist()]
        known = merge.known.tolist()
        walk({c: min(end, limits[c]) for c, end in enumerate(ahead) if known[c] < min(end, limits[c])})
    selections = tuple(crop.record(size) for crop, size in zip(crops, merge.sizes.tolist(), strict=True))
    return CropSelection(
        k=total,
        crops=selections,
        order=tuple(zip(merge.winners.tolist(), merge.chosen.tolist(), strict=True)),
        nominees=merge.nominees,
        nominee_gain=merge.nominee_gain,
        _not_anytime=selections[0]._not_anytime or ("" if shared else f'allocation="{parameters.allocation}"'),
    )


def _quotas(crops: Sequence[Trajectory], total: int, horizons: list[int], parameters: Parameters) -> list[int]:
    """Fixed shares of the budget: equal, or proportional to the first nominee's gain."""
    weights = [Fraction(1)] * len(crops)
    if parameters.allocation == "proportional":
        token, gain = np.empty(1, dtype=np.int64), np.zeros(1)
        for c, crop in enumerate(crops):
            if horizons[c]:
                crop.advance(1, horizons[c])
                crop.nominate(token, gain, 0)
            weights[c] = Fraction(float(gain[0])) if horizons[c] else Fraction(0)
        if not any(weights):
            weights = [Fraction(1)] * len(crops)
    capacities = [crop.support.capacity for crop in crops]
    return apportion(total, weights, capacities)


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
