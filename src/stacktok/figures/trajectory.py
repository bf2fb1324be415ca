"""Figure 2 from a real run: the trajectory of a selection, and the nominees of crops that share a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import Affinity
from stacktok.core.inputs import Mask
from stacktok.core.record import CropSelection, Selection
from stacktok.core.reference import gain_sums, row_thresholds
from stacktok.figures.image import crop_name
from stacktok.figures.kept import COVERAGE, MARKS, OTHER

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens that a run could have added and did not.

    Attributes
    ----------
    steps
        Size of the set to which each would have been added, (p,).
    tokens
        Which token, (p,).
    coverage
        C of the set with that token, (p,).
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    coverage: NDArray[np.float64]


def candidate_data(selection: Selection, vision_affinity: Affinity, eligible: Mask, per_step: int = 5) -> Candidates:
    """Some of the candidates of every step, evenly over their ranking by coverage, best and worst among them.

    Parameters
    ----------
    selection
        The record of a run.
    vision_affinity
        A^vv of that run, (n, n).
    eligible
        Tokens that may be kept, (n,).
    per_step
        How many at most.
    """
    if per_step < 1:
        raise ValueError(f"per_step={per_step} must be at least 1")
    affinity = torch.from_numpy(vision_affinity)
    best = row_thresholds(affinity, [])
    free = eligible.copy()
    steps, tokens, values = [], [], []
    for t, chosen in enumerate(selection.order.tolist()):
        reached = float(best.sum())
        gains = gain_sums(affinity, best).numpy()
        free[chosen] = False
        others = np.flatnonzero(free)
        ranked = others[np.argsort(-gains[others], kind="stable")]
        shown = (
            ranked[np.unique(np.linspace(0, len(ranked) - 1, per_step).round().astype(np.int64))]
            if len(ranked)
            else ranked
        )
        steps += [t] * len(shown)
        tokens += shown.tolist()
        values += ((reached + gains[shown]) / len(affinity)).tolist()
        best = torch.maximum(best, affinity[:, chosen].double())
    return Candidates(np.array(steps, dtype=np.int64), np.array(tokens, dtype=np.int64), np.array(values))


def draw_trajectory(axes: Axes, selection: Selection, candidates: Candidates | None = None) -> None:
    """Figure 2(a): coverage of the growing set against its target, every addition marked by what scored it.

    Parameters
    ----------
    axes
        Where to draw.
    selection
        The record of a run.
    candidates
        Additions that were possible and not made: faded dots and branches in the colour of the step's criterion.
    """
    if candidates is not None:
        _draw_candidates(axes, selection, candidates)
    sizes = np.arange(selection.k + 1)
    axes.plot(sizes, selection.reference, color=OTHER, lw=1, ls=":", label="coverage-only reference")
    axes.plot(sizes, selection.target, color="black", lw=1.2, ls="--", label="support target")
    axes.plot(sizes, selection.coverage, color="#b9c4c4", lw=1, zorder=1, label="this run")
    for name in dict.fromkeys(selection.criterion):
        marker, colour = MARKS.get(name, ("s", OTHER))
        steps = np.array([t for t, criterion in enumerate(selection.criterion) if criterion == name])
        axes.scatter(
            steps + 1,
            selection.coverage[steps + 1],
            s=26,
            marker=marker,
            c=colour,
            edgecolors="white",
            lw=0.5,
            zorder=3,
            label=f"added by {name}",
        )
    axes.fill_between(sizes, 0, selection.target, color=COVERAGE, alpha=0.06, lw=0)
    axes.set_xlim(0, selection.k + 0.5)
    axes.set_ylim(0, 1.08 * max(1e-9, float(selection.reference.max()), float(selection.coverage.max())))
    axes.set_xlabel("retained tokens")
    axes.set_ylabel("visual coverage C")
    bound = int(selection.bound.sum())
    axes.set_title(f"strictness {selection.strictness:.2f}, gate bound at {bound} of {selection.k} steps", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(fontsize=8, frameon=False)
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if handle is not None and text.get_text() == "not chosen":
            # The dots have the colours of their steps; their entry has none of them.
            handle.set(color=OTHER, alpha=0.3)


def _draw_candidates(axes: Axes, selection: Selection, candidates: Candidates) -> None:
    from matplotlib.collections import LineCollection

    colours = [MARKS.get(selection.criterion[t], ("s", OTHER))[1] for t in candidates.steps.tolist()]
    reached = selection.coverage[candidates.steps]
    ends = np.stack([candidates.steps + 1.0, candidates.coverage], axis=1)
    branches = np.stack([np.stack([candidates.steps, reached], axis=1), ends], axis=1)
    axes.add_collection(LineCollection(list(branches), colors=colours, linewidths=0.6, alpha=0.16, zorder=0.5))
    axes.scatter(ends[:, 0], ends[:, 1], s=7, c=colours, alpha=0.3, lw=0, zorder=0.6, label="not chosen")


@dataclass(frozen=True, eq=False)
class Nominees:
    """The nominees of all crops, step by step.

    Attributes
    ----------
    gains
        h_c of every crop's nominee, (k, L), NaN where it had none.
    winners
        Crop that got the slot, (k,).
    criteria
        What scored the winning token, (k,).
    """

    gains: NDArray[np.float64]
    winners: NDArray[np.int64]
    criteria: tuple[str, ...]


def nominee_data(selection: CropSelection) -> Nominees:
    """Nominees, winners and criteria of a selection over crops."""
    taken = [0] * len(selection.crops)
    criteria = []
    for crop, _ in selection.order:
        criteria.append(selection.crops[crop].criterion[taken[crop]])
        taken[crop] += 1
    winners = np.array([crop for crop, _ in selection.order], dtype=np.int64)
    return Nominees(selection.nominee_gain, winners, tuple(criteria))


def draw_nominees(axes: Axes, selection: CropSelection) -> None:
    """Figure 2(b): each step's nominees by crop; the chosen one filled by what scored it, the others faded."""
    data = nominee_data(selection)
    steps, crops = data.gains.shape
    finite = data.gains[np.isfinite(data.gains)]
    largest = float(finite.max()) if len(finite) else 1.0
    for crop in range(crops):
        sizes = 4 + 60 * np.sqrt(np.nan_to_num(data.gains[:, crop]) / max(largest, 1e-12))
        there = np.isfinite(data.gains[:, crop]) & (data.winners != crop)
        axes.scatter(np.flatnonzero(there) + 1, np.full(there.sum(), crop), s=sizes[there], c="#d3d7d8", lw=0)
        for name in dict.fromkeys(data.criteria):
            marker, colour = MARKS.get(name, ("s", OTHER))
            won = (data.winners == crop) & np.array([criterion == name for criterion in data.criteria], dtype=np.bool_)
            axes.scatter(np.flatnonzero(won) + 1, np.full(won.sum(), crop), s=sizes[won], c=colour, marker=marker, lw=0)
    shares = np.bincount(data.winners, minlength=crops)
    axes.set_yticks(range(crops), labels=[f"{crop_name(crop)}: {share}" for crop, share in enumerate(shares)])
    axes.invert_yaxis()
    axes.set_xlim(0.3, steps + 0.7)
    axes.set_xlabel("step; size of a mark: combined gain of the crop's nominee")
    axes.set_ylabel("crop: tokens it got")
    for name in dict.fromkeys(data.criteria):
        marker, colour = MARKS.get(name, ("s", OTHER))
        axes.scatter([], [], s=36, c=colour, marker=marker, lw=0, label=f"got the slot, by {name}")
    axes.scatter([], [], s=36, c="#d3d7d8", lw=0, label="nominee of a crop that did not")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=8, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
