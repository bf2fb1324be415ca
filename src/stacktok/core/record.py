"""The record of a run: what was kept, in which order, by which criterion, along which curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask
from stacktok.core.notebook import figure_html, grid_of, kept_svg

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_Rows = TypeVar("_Rows", torch.Tensor, NDArray[Any])


class Swap(NamedTuple):
    """An accepted exchange of swap refinement, with J = R + C before and after."""

    out: int
    into: int
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Selection:
    """The full record of one selection.

    Attributes
    ----------
    n
        Number of encoded positions.
    m
        Number of query rows.
    k
        Number of kept tokens.
    indices
        Kept tokens after swaps, ascending, (k,).
    order
        Tokens in order of selection, before swaps, (k,).
    criterion
        Per step what scored the pick: "relevance", "coverage", "scalarized" (that ablation only), or "fill" where
        nothing gained and the lowest index filled the budget.
    bound
        Per step whether the support deficit was positive, so that the gate called for coverage, (k,).
    relevance, coverage, reference, target
        R(S_t), C(S_t), C^ref_t and theta_t for t = 0..k, (k + 1,).
    strictness
        beta.
    swaps
        Accepted swaps.
    final_relevance, final_coverage
        R and C of the kept set after swaps.
    """

    n: int
    m: int
    k: int
    indices: Ints
    order: Ints
    criterion: tuple[str, ...]
    bound: Mask
    relevance: Floats
    coverage: Floats
    reference: Floats
    target: Floats
    strictness: float
    swaps: tuple[Swap, ...]
    final_relevance: float
    final_coverage: float
    # Why a prefix of this run is not the run of a smaller budget, or empty where it is.
    _not_anytime: str = field(default="", repr=False)
    # Runs the swaps on a prefix; holds the affinities, and is absent from a detached or restored record.
    _refine: Callable[[Selection], Selection] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        picks = ", ".join(f"{name} {self.criterion.count(name)}" for name in dict.fromkeys(self.criterion))
        return (
            f"Selection({self.k} of {self.n} tokens, {self.m} query rows; {picks or 'no picks'}; strictness "
            f"{self.strictness:.3f}, gate bound at {int(self.bound.sum())} steps, {len(self.swaps)} swaps; "
            f"relevance {self.final_relevance:.4f}, coverage {self.final_coverage:.4f})"
        )

    def _repr_html_(self) -> str:
        return figure_html([self._drawing()], repr(self))

    def _drawing(self) -> str:
        scored = dict(zip(self.order.tolist(), self.criterion, strict=True))
        kept = self.indices.tolist()
        return kept_svg(grid_of(self.n), kept, [scored.get(index, "swap") for index in kept])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        # A copy that travels to another process travels light.
        return self.__dict__ | {"_refine": None}

    @property
    def mask(self) -> Mask:
        """Which positions are kept, (n,)."""
        mask = np.zeros(self.n, dtype=np.bool_)
        mask[self.indices] = True
        return mask

    def gather(self, projected: _Rows) -> _Rows:
        """The kept rows of ``projected`` (n, d), in their original order, (k, d)."""
        return gather_rows(projected, self.indices, self.n)

    def prefix(self, k: int, *, refine: bool = False) -> Selection:
        """The selection for a smaller budget: what a run with ``budget=k`` gives.

        Parameters
        ----------
        k
            Number of tokens, at most this record's.
        refine
            Run the swaps as well; without them the result equals a run with ``swap_limit=0``.
        """
        k = check_prefix(k, self.k, self._not_anytime)
        shorter = replace(
            self,
            k=k,
            indices=np.sort(self.order[:k]),
            order=self.order[:k].copy(),
            criterion=self.criterion[:k],
            bound=self.bound[:k].copy(),
            relevance=self.relevance[: k + 1].copy(),
            coverage=self.coverage[: k + 1].copy(),
            reference=self.reference[: k + 1].copy(),
            target=self.target[: k + 1].copy(),
            swaps=(),
            final_relevance=float(self.relevance[k]),
            final_coverage=float(self.coverage[k]),
        )
        if not refine:
            return shorter
        if self._refine is None:
            raise ValueError(
                "refine=True needs the affinities, which a detached or restored record does not hold; "
                "call prefix on the selection itself"
            )
        return self._refine(shorter)

    def detach(self) -> Selection:
        """The same record without the affinities that `prefix` needs to refine: small enough to keep in bulk."""
        return replace(self, _refine=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python numbers, strings and lists."""
        return {
            "n": self.n,
            "m": self.m,
            "k": self.k,
            "indices": self.indices.tolist(),
            "order": self.order.tolist(),
            "criterion": list(self.criterion),
            "bound": self.bound.tolist(),
            "relevance": self.relevance.tolist(),
            "coverage": self.coverage.tolist(),
            "reference": self.reference.tolist(),
            "target": self.target.tolist(),
            "strictness": self.strictness,
            "swaps": [list(swap) for swap in self.swaps],
            "final_relevance": self.final_relevance,
            "final_coverage": self.final_coverage,
            "not_anytime": self._not_anytime,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Selection:
        """The record that `to_dict` described."""
        return cls(
            n=values["n"],
            m=values["m"],
            k=values["k"],
            indices=np.array(values["indices"], dtype=np.int64),
            order=np.array(values["order"], dtype=np.int64),
            criterion=tuple(values["criterion"]),
            bound=np.array(values["bound"], dtype=np.bool_),
            relevance=np.array(values["relevance"], dtype=np.float64),
            coverage=np.array(values["coverage"], dtype=np.float64),
            reference=np.array(values["reference"], dtype=np.float64),
            target=np.array(values["target"], dtype=np.float64),
            strictness=values["strictness"],
            swaps=tuple(Swap(*swap) for swap in values["swaps"]),
            final_relevance=values["final_relevance"],
            final_coverage=values["final_coverage"],
            _not_anytime=values["not_anytime"],
        )

    def to_json(self) -> str:
        """The record as JSON; floats survive the round trip to the bit."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """The record that `to_json` wrote."""
        return cls.from_dict(_load(text, "Selection", "order"))


@dataclass(frozen=True, eq=False)
class CropSelection:
    """The full record of a selection over crops that share one budget.

    Attributes
    ----------
    k
        Number of kept tokens over all crops.
    crops
        One `Selection` per crop, its curves up to the size that the crop got.
    order
        (crop, token) pairs in order of allocation, before swaps.
    nominees
        Token that each crop nominated at each step, (k, L), -1 where a crop was exhausted or its quota used up.
    nominee_gain
        h_c of those nominees, (k, L), NaN where there was none.
    """

    k: int
    crops: tuple[Selection, ...]
    order: tuple[tuple[int, int], ...]
    nominees: Ints
    nominee_gain: Floats
    _not_anytime: str = field(default="", repr=False)

    def __repr__(self) -> str:
        shares = ", ".join(str(crop.k) for crop in self.crops)
        return f"CropSelection({self.k} of {sum(crop.n for crop in self.crops)} tokens; per crop {shares})"

    def _repr_html_(self) -> str:
        return figure_html([crop._drawing() for crop in self.crops], repr(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CropSelection) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    @property
    def indices(self) -> tuple[Ints, ...]:
        """Kept tokens of every crop after swaps, ascending."""
        return tuple(crop.indices for crop in self.crops)

    @property
    def mask(self) -> tuple[Mask, ...]:
        """Which positions are kept, per crop."""
        return tuple(crop.mask for crop in self.crops)

    def gather(self, projected: Sequence[_Rows]) -> list[_Rows]:
        """The kept rows of every crop's ``projected`` (n_c, d), in their original order."""
        if len(projected) != len(self.crops):
            raise ValueError(
                f"projected holds {len(projected)} matrices for {len(self.crops)} crops; give one per crop"
            )
        return [crop.gather(rows) for crop, rows in zip(self.crops, projected, strict=True)]

    def prefix(self, k: int, *, refine: bool = False) -> CropSelection:
        """The selection for a smaller shared budget; see `Selection.prefix`."""
        k = check_prefix(k, self.k, self._not_anytime)
        order = self.order[:k]
        sizes = np.bincount([crop for crop, _ in order], minlength=len(self.crops))
        return replace(
            self,
            k=k,
            crops=tuple(crop.prefix(int(size), refine=refine) for crop, size in zip(self.crops, sizes, strict=True)),
            order=order,
            nominees=self.nominees[:k],
            nominee_gain=self.nominee_gain[:k],
        )

    def detach(self) -> CropSelection:
        """The same record without the affinities; see `Selection.detach`."""
        return replace(self, crops=tuple(crop.detach() for crop in self.crops))

    def to_json(self) -> str:
        """The record as JSON; floats survive the round trip to the bit."""
        gains = [[None if np.isnan(gain) else gain for gain in step] for step in self.nominee_gain.tolist()]
        return json.dumps(
            {
                "k": self.k,
                "crops": [crop.to_dict() for crop in self.crops],
                "crop_order": [list(pair) for pair in self.order],
                "nominees": self.nominees.tolist(),
                "nominee_gain": gains,
                "not_anytime": self._not_anytime,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> CropSelection:
        """The record that `to_json` wrote."""
        values = _load(text, "CropSelection", "crop_order")
        shape = (values["k"], len(values["crops"]))
        return cls(
            k=values["k"],
            crops=tuple(Selection.from_dict(crop) for crop in values["crops"]),
            order=tuple((crop, token) for crop, token in values["crop_order"]),
            nominees=np.array(values["nominees"], dtype=np.int64).reshape(shape),
            nominee_gain=np.array(values["nominee_gain"], dtype=np.float64).reshape(shape),
            _not_anytime=values["not_anytime"],
        )


def gather_rows(projected: _Rows, indices: Ints, n: int) -> _Rows:
    """Rows of a tensor or array by ascending indices, on the tensor's device."""
    if len(projected) != n:
        raise ValueError(
            f"projected has {len(projected)} rows for a selection over {n}; give the features it was made on"
        )
    if isinstance(projected, torch.Tensor):
        return projected[torch.from_numpy(indices.copy()).to(projected.device)]
    return projected[indices]


def check_prefix(k: int, available: int, not_anytime: str) -> int:
    """Refuse a prefix that this run does not contain."""
    if not_anytime:
        raise ValueError(f"a run with {not_anytime} has no prefixes; call the selector again with budget={k!r}")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise TypeError(f"k={k!r} must be an integer, not {type(k).__name__}")
    if not 0 <= k <= available:
        raise ValueError(
            f"k={k} lies outside 0 to {available}, the tokens of this selection; run it with a larger budget"
        )
    return int(k)


def _load(text: str, kind: str, key: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict) or key not in values:
        raise ValueError(f"the text is not a {kind} that to_json wrote")
    return values
