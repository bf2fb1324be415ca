"""The parameters of the method, named once and checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable

Criterion = Literal["gated", "relevance", "coverage", "scalarized"]
Target = Literal["size", "final"]
Fill = Literal["coverage", "index"]
Allocation = Literal["shared", "uniform", "proportional"]
Depth = int | Literal["auto"] | None


class Settings(TypedDict, total=False):
    """Keyword arguments that every entry point of the selector takes; see `Parameters` for their meaning."""

    tau_query: float
    tau_vision: float
    beta_min: float
    beta_max: float
    swap_limit: int
    swap_passes: int | None
    swap_epsilon: float
    norm_epsilon: float
    entropy_floor: float
    relevance_depth: Depth
    strictness: float | None
    target: Target
    criterion: Criterion
    fill: Fill
    alpha: float
    allocation: Allocation
    backend: str


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of the selector, with the paper's values as defaults.

    Parameters
    ----------
    tau_query, tau_vision
        Temperatures of the affinities, Eq. (affinity). The paper uses tau_query = 0.01 on Qwen2.5-VL.
    beta_min, beta_max
        Clipping range of the strictness, Eq. (beta).
    swap_limit
        Retained sets of at most this many tokens are refined by swaps; 0 turns refinement off.
    swap_passes
        Passes over the retained set; None repeats until a pass accepts nothing.
    swap_epsilon
        Smallest relative improvement of R + C that a swap must bring, Eq. (swap).
    norm_epsilon
        Lower bound of the norm that features are divided by.
    entropy_floor
        Floor inside the logarithm of Eq. (beta).
    relevance_depth
        Beyond the paper: how many kept tokens of a query row count towards relevance; 1 is the paper, None counts all,
        "auto" is a row's even share of the budget (see `depth`).
    strictness
        A fixed strictness in place of Eq. (beta); None, the paper's rule, reads it from the query's entropy.
    target
        "size": the target follows the reference curve, as in the paper; "final": its last value holds at every step.
    criterion
        "gated": the paper's policy; "relevance", "coverage": one signal only; "scalarized": relevance + alpha coverage.
        Only the paper's policy is refined by swaps, whose objective is R + C.
    fill
        What `criterion="relevance"` does once relevance has saturated: pick by "coverage" or by lowest "index".
    alpha
        The exchange rate of `criterion="scalarized"`.
    allocation
        How crops share a budget: "shared" is Algorithm 2; "uniform" and "proportional" (to the first nominee's gain)
        are fixed quotas.
    backend
        "reference" (plain torch, reads like the paper), "cpu" (compiled), "triton" (on the features' GPU), or "auto":
        "triton" for tensors on a GPU where Triton is installed, otherwise "cpu".
    """

    tau_query: float = 0.02
    tau_vision: float = 0.2
    beta_min: float = 0.3
    beta_max: float = 0.9
    swap_limit: int = 16
    swap_passes: int | None = 1
    swap_epsilon: float = 1e-6
    norm_epsilon: float = 1e-8
    entropy_floor: float = 1e-12
    relevance_depth: Depth = 1
    strictness: float | None = None
    target: Target = "size"
    criterion: Criterion = "gated"
    fill: Fill = "coverage"
    alpha: float = 0.5
    allocation: Allocation = "shared"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("tau_query", "tau_vision", "norm_epsilon", "entropy_floor"):
            if not _number(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")
        for name in ("swap_epsilon", "alpha"):
            if not _number(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or greater")
        if not 0 <= _number(self, "beta_min") <= _number(self, "beta_max") <= 1:
            raise ValueError(
                f"beta_min={self.beta_min!r} and beta_max={self.beta_max!r} must satisfy 0 <= beta_min <= beta_max <= 1"
            )
        if self.strictness is not None and not 0 <= _number(self, "strictness") <= 1:
            raise ValueError(f"strictness={self.strictness!r} must lie in [0, 1], or be None to follow the entropy")
        _count(self, "swap_limit", least=0)
        _count(self, "swap_passes", least=0, none_means="until a pass accepts nothing")
        if self.relevance_depth != "auto":
            _count(self, "relevance_depth", least=1, none_means="unlimited")
        _choice(self, "target", ("size", "final"))
        _choice(self, "criterion", ("gated", "relevance", "coverage", "scalarized"))
        _choice(self, "fill", ("coverage", "index"))
        _choice(self, "allocation", ("shared", "uniform", "proportional"))
        _choice(self, "backend", ("auto", "cpu", "reference", "triton"))

    def depth(self, rows: int, budget: int) -> int | None:
        """Kept tokens per query row that count; "auto" is a row's even share of the budget, ceil(k / m).

        So relevance does not saturate before the budget is spent. Chosen among other rules on the embedded model's dev
        split (`benchmarks/depth_rule.py`, docs/results.md).

        Parameters
        ----------
        rows
            Rows of the query, m.
        budget
            Tokens to be kept in the end.
        """
        if self.relevance_depth == "auto":
            return max(1, -(-budget // max(1, rows)))
        return None if self.relevance_depth is None else int(self.relevance_depth)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Parameters:
        """Parameters from keyword arguments; an unknown name is an error that lists the known ones."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise TypeError(f"unknown parameter {unknown[0]!r}; the parameters are {', '.join(known)}")
        return cls(**settings)


def _number(owner: Parameters, name: str) -> float:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be finite")
    return number


def _count(owner: Parameters, name: str, *, least: int, none_means: str | None = None) -> None:
    value = getattr(owner, name)
    alternative = f", or None ({none_means})" if none_means else ""
    if value is None and none_means:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} must be an integer{alternative}, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}{alternative}")


def _choice(owner: Parameters, name: str, choices: Iterable[str]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, choices))}")
