"""The paper's pictures of results: radar over models and budgets, difference bars, floating bars.

Each picture has a function that computes what is drawn and one that draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from stacktok.figures.kept import COVERAGE, OTHER, RELEVANCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR_ZERO = 0.10
"""Points below which a difference counts as near zero: a rule of the picture, not a test."""

RADIAL = (89.0, 101.0)
"""The truncated radial axis, in percent."""

_COLOURS = {"StackTok": RELEVANCE, "MMTok": COVERAGE, "DivPrune": "#5470a8", "VisionZip": "#9a6fb0"}
_LINES = {"StackTok": "-", "MMTok": "--", "DivPrune": "-.", "VisionZip": ":"}


@dataclass(frozen=True)
class Average:
    """A method's average retention on a model at a budget, in percent."""

    model: str
    method: str
    budget: str
    average: float


@dataclass(frozen=True)
class Radar:
    """The data of a radar chart.

    Attributes
    ----------
    spokes
        (model, budget), model by model, the tightest budget of each last.
    values
        Per method its average at every spoke, None where it has none.
    notes
        (spoke, value) that are annotated.
    """

    spokes: tuple[tuple[str, str], ...]
    values: Mapping[str, tuple[float | None, ...]]
    notes: tuple[tuple[int, float], ...]


def radar_data(averages: Sequence[Any], annotate: str = "StackTok") -> Radar:
    """Spokes, values and annotations of Figure 3(a).

    Parameters
    ----------
    averages
        Entries with model, method, budget and average, such as `published_cross_model` gives; fine-tuned ones are left
        out.
    annotate
        Method whose value at each model's tightest budget is written out.
    """
    kept = [entry for entry in averages if not getattr(entry, "fine_tuned", False)]
    budgets: dict[str, list[str]] = {}
    for entry in kept:
        own = budgets.setdefault(entry.model, [])
        if str(entry.budget) not in own:
            own.append(str(entry.budget))
    spokes = tuple(
        (model, budget) for model, own in budgets.items() for budget in sorted(own, key=_tightness, reverse=True)
    )
    found = {(entry.method, entry.model, str(entry.budget)): float(entry.average) for entry in kept}
    methods = dict.fromkeys(entry.method for entry in kept)
    values = {method: tuple(found.get((method, *spoke)) for spoke in spokes) for method in methods}
    tightest = [max(i for i, (own, _) in enumerate(spokes) if own == model) for model in budgets]
    notes = [(spoke, values[annotate][spoke]) for spoke in tightest if annotate in values]
    return Radar(spokes, values, tuple((spoke, value) for spoke, value in notes if value is not None))


def _tightness(budget: str) -> float:
    return float(budget.rstrip("%"))


def draw_radar(axes: Axes, data: Radar) -> None:
    """Draw a radar on polar axes."""
    angles = np.linspace(0, 2 * np.pi, len(data.spokes), endpoint=False)
    low, high = RADIAL
    for method, values in data.values.items():
        radii = np.array([np.nan if value is None else max(value, low) for value in values])
        axes.plot(
            np.append(angles, angles[0]),
            np.append(radii, radii[0]),
            _LINES.get(method, "--"),
            color=_COLOURS.get(method, OTHER),
            lw=1.8 if method == "StackTok" else 1.2,
            marker="o",
            ms=3,
            label=method,
        )
    axes.set_ylim(low, high)
    axes.set_yticks([90, 92, 94, 96, 98, 100], labels=["90", "92", "94", "96", "98", "100 %"], fontsize=7, color=OTHER)
    axes.set_xticks(angles, labels=[f"{model}\n{budget}" for model, budget in data.spokes], fontsize=7)
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        # Labels stand outside the circle: left ones end at it, right ones begin there.
        label.set_horizontalalignment(
            "center" if abs(np.cos(angle)) < 0.2 else "left" if np.cos(angle) > 0 else "right"
        )
    axes.tick_params(pad=4)
    for spoke, value in data.notes:
        axes.annotate(
            f"{value:.2f}",
            (angles[spoke], value),
            (angles[spoke], value + 2.4),
            fontsize=8,
            fontweight="bold",
            color=RELEVANCE,
            ha="center",
            va="center",
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=8, frameon=False)


@dataclass(frozen=True)
class Bar:
    """One difference: the benchmark, percentage points of retention, and "gain", "loss" or "near zero"."""

    benchmark: str
    points: float
    kind: str


def difference_data(
    first: Mapping[str, float], second: Mapping[str, float], full: Mapping[str, float], near: float = NEAR_ZERO
) -> list[Bar]:
    """Retention of the first method minus that of the second, per benchmark, largest first (Figure 3(b)).

    Parameters
    ----------
    first, second, full
        Scores of two methods and of the unpruned model, by benchmark.
    near
        Points up to which a difference is near zero.
    """
    bars = []
    for name, whole in full.items():
        if name in first and name in second:
            points = 100 * (first[name] - second[name]) / whole
            kind = "near zero" if abs(points) <= near else "gain" if points > 0 else "loss"
            bars.append(Bar(name, points, kind))
    return sorted(bars, key=lambda bar: -bar.points)


def draw_differences(axes: Axes, bars: Sequence[Bar], title: str = "") -> None:
    """Draw difference bars; hatching says the same as colour."""
    from matplotlib.patches import Patch

    looks = {"gain": (RELEVANCE, ""), "loss": (COVERAGE, "//"), "near zero": ("#c4c8ca", "..")}
    drawn = axes.barh([bar.benchmark for bar in bars], [bar.points for bar in bars], height=0.66)
    for patch, bar in zip(drawn, bars, strict=True):
        colour, hatch = looks[bar.kind]
        patch.set(facecolor=colour, hatch=hatch, edgecolor="white")
        side = "left" if bar.points >= 0 else "right"
        shift = 4 if bar.points >= 0 else -4
        axes.annotate(
            f"{bar.points:+.2f}",
            (bar.points, bar.benchmark),
            (shift, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
        )
    labels = {"gain": "ahead", "loss": "behind", "near zero": f"within {NEAR_ZERO:.1f} points"}
    kinds = {bar.kind for bar in bars}
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=labels[kind])
        for kind, (colour, hatch) in looks.items()
        if kind in kinds
    ]
    axes.legend(handles=handles, loc="lower right", fontsize=8, frameon=False)
    axes.axvline(0, color="black", lw=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("percentage points of retention")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


@dataclass(frozen=True)
class Step:
    """A floating bar from one average to the next."""

    label: str
    start: float
    end: float


def floating_data(averages: Sequence[tuple[str, float]], start: tuple[str, float] = ("100%", 100.0)) -> list[Step]:
    """Successive changes of an average as the budget tightens (Figure 3(c)).

    Parameters
    ----------
    averages
        (budget, average), loosest first.
    start
        Label and average of the unpruned model.
    """
    chain = [start, *averages]
    return [Step(f"{a[0]} → {b[0]}", a[1], b[1]) for a, b in pairwise(chain)]


def draw_floating(axes: Axes, steps: Sequence[Step], title: str = "") -> None:
    """Draw floating bars, each joined to the next."""
    for number, step in enumerate(steps):
        low, high = sorted((step.start, step.end))
        colour, hatch = (COVERAGE, "//") if step.end < step.start else (RELEVANCE, "")
        axes.bar(number, high - low, bottom=low, color=colour, hatch=hatch, edgecolor="white", width=0.6)
        axes.annotate(
            f"{step.end - step.start:+.2f}", (number, low), (0, -4), textcoords="offset points", ha="center", va="top"
        )
        axes.annotate(
            f"{step.end:.2f} %", (number, low), (0, -17), textcoords="offset points", ha="center", va="top", fontsize=8
        )
        if number + 1 < len(steps):
            axes.plot([number + 0.3, number + 0.7], [step.end, step.end], color=OTHER, lw=0.8)
    axes.set_xticks(range(len(steps)), labels=[step.label for step in steps])
    ends = [value for step in steps for value in (step.start, step.end)]
    axes.set_ylim(min(ends) - 0.2 * (max(ends) - min(ends)) - 0.5, max(ends) + 1)
    axes.set_ylabel("average retention, %")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
