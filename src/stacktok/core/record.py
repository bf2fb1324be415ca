"""The record of a run: what was kept, in which order, by which criterion, along which curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.inputs import Mask
from stacktok.core.notebook import figure_html, grid_of, kept_svg
from stacktok.kernels import CRITERIA, Floats, Ints, Swap

_Rows = TypeVar("_Rows", torch.Tensor, NDArray[Any])


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
    row_weights, focus
        Query-weighted coverage alone, whose F stands in place of R above: the weights w_i of the image's rows, (n,),
        and the share lambda of them that the question decided. None elsewhere.
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
    row_weights: Floats | None = None
    focus: float | None = None
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
        """Plain Python numbers, strings and lists; weights and focus where there are any."""
        own: dict[str, Any] = {} if self.focus is None else {"focus": self.focus}
        if self.row_weights is not None:
            own["row_weights"] = self.row_weights.tolist()
        return own | {
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
        """The record that `to_dict` described; what does not fit together is an error."""
        read = _Reader("Selection", values)
        n, m, k = (read.count(name) for name in ("n", "m", "k"))
        read.check(k <= n, f"k={k} is larger than n={n}")
        indices, order = (read.numbers(name, np.int64, (k,)) for name in ("indices", "order"))
        for name, tokens in (("indices", indices), ("order", order)):
            inside = len(set(tokens.tolist())) == k and all(0 <= token < n for token in tokens.tolist())
            read.check(inside, f"{name} does not hold {k} different tokens of 0 to {n - 1}")
        read.check(bool((np.diff(indices) > 0).all()), "indices are not ascending")
        criterion, swaps = read.get("criterion", list), read.get("swaps", list)
        known = len(criterion) == k and all(name in CRITERIA for name in criterion)
        read.check(known, f"criterion does not hold {k} of {', '.join(CRITERIA)}")
        read.numbers("swaps", np.float64, (len(swaps), 4))
        curves: dict[str, Any] = {
            name: read.numbers(name, np.float64, (k + 1,)) for name in ("relevance", "coverage", "reference", "target")
        }
        finals: dict[str, Any] = {
            name: read.number(name) for name in ("strictness", "final_relevance", "final_coverage")
        }
        if "row_weights" in values:
            curves["row_weights"] = read.numbers("row_weights", np.float64, (n,))
        if "focus" in values:
            finals["focus"] = read.number("focus")
        return cls(
            n=n,
            m=m,
            k=k,
            indices=indices,
            order=order,
            criterion=tuple(criterion),
            bound=read.numbers("bound", np.bool_, (k,)),
            swaps=tuple(Swap(*swap) for swap in swaps),
            _not_anytime=read.get("not_anytime", str),
            **curves,
            **finals,
        )

    def to_json(self) -> str:
        """The record as JSON; floats survive the round trip to the bit."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """The record that `to_json` wrote."""
        return cls.from_dict(_load(text, "Selection"))


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
        read = _Reader("CropSelection", _load(text, "CropSelection"))
        k, crops = read.count("k"), read.get("crops", list)
        read.check(bool(crops), "crops is empty")
        selections = tuple(Selection.from_dict(crop) for crop in crops)
        read.check(sum(crop.k for crop in selections) == k, f"the crops do not hold k={k} tokens together")
        picks = [[c, token] for c, crop in enumerate(selections) for token in crop.order.tolist()]
        order = read.numbers("crop_order", np.int64, (k, 2)).tolist()
        read.check(sorted(order) == sorted(picks), "crop_order is not an order of the crops' picks")
        shape = (k, len(selections))
        return cls(
            k=k,
            crops=selections,
            order=tuple((crop, token) for crop, token in order),
            nominees=read.numbers("nominees", np.int64, shape),
            nominee_gain=read.numbers("nominee_gain", np.float64, shape, finite=False),
            _not_anytime=read.get("not_anytime", str),
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


class _Reader:
    """Reads the fields of a record that may have been damaged or made by hand."""

    def __init__(self, kind: str, values: Any) -> None:
        self.kind, self.values = kind, values
        self.check(isinstance(values, dict), "it is not an object")

    def check(self, condition: bool, problem: str) -> None:
        if not condition:
            raise ValueError(f"the text is not a {self.kind} that to_json wrote: {problem}")

    def get(self, name: str, kind: type[Any]) -> Any:
        self.check(name in self.values, f"it has no {name}")
        value = self.values[name]
        self.check(isinstance(value, kind), f"{name} has type {type(value).__name__}, not {kind.__name__}")
        return value

    def count(self, name: str) -> int:
        value = self.get(name, int)
        self.check(not isinstance(value, bool) and value >= 0, f"{name}={value} is not a count")
        return int(value)

    def number(self, name: str) -> float:
        value = self.numbers(name, np.float64, ())
        return float(value)

    def numbers(self, name: str, dtype: Any, shape: tuple[int, ...], *, finite: bool = True) -> Any:
        """An array of one kind of numbers; an empty list has every shape without entries."""
        self.check(name in self.values, f"it has no {name}")
        try:
            given = np.array(self.values[name], dtype=np.float64 if not finite else None)
        except (TypeError, ValueError, OverflowError):
            given = np.array(None)
        kinds = {np.int64: "i", np.bool_: "b"}.get(dtype, "if")
        if given.size == 0 and 0 in shape:
            given = given.reshape(shape).astype(dtype)
        self.check(given.shape == shape and given.dtype.kind in kinds, f"{name} is not an array {shape} of numbers")
        self.check(not finite or bool(np.isfinite(given).all()), f"{name} holds NaN or infinity")
        return given.astype(dtype)


def _load(text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text is not a {kind} that to_json wrote: it is not JSON ({error})") from None
