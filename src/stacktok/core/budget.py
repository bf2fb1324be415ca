"""Budgets: a count, a fraction of the encoded positions, or as many as an image needs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias

from stacktok.core.limits import shown

Budget: TypeAlias = "int | float | str | Coverage"

_REMEDY = "give a count such as 64, a fraction in (0, 1] such as 0.2, or a percentage such as '20%'"

# Plain decimals of bounded length alone: Fraction would spend minutes on an exponent that someone made large.
_PERCENTAGE = re.compile(r"\s{0,8}([0-9]{1,9}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s{0,8}%\s{0,8}")
_COUNT = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,3})?")

_ADAPTIVE = re.compile(r"\s{0,8}coverage\s{1,8}([0-9.]{1,20})\s{0,8}(%?)\s{0,8},\s{0,8}at most\s{1,8}(\S{1,30})\s{0,8}")


@dataclass(frozen=True)
class Coverage:
    """A budget that adapts: the smallest prefix of the run that covers enough and whose relevance has saturated.

    Coverage counts against that of all eligible tokens, over all crops together. Relevance has saturated where no
    further token raises it, in any crop. As text: ``"coverage 95%, at most 192"``.

    Parameters
    ----------
    share
        Share of the coverage of all eligible tokens, in (0, 1].
    at_most
        A count, fraction or percentage that is never exceeded.
    """

    share: float
    at_most: int | float | str

    def __post_init__(self) -> None:
        given: object = self.share
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= 1:
            raise ValueError(f"share={shown(self.share)} is not in (0, 1]; give a share of the coverage such as 0.95")
        budget_share(self.at_most)

    def __str__(self) -> str:
        return f"coverage {100 * self.share:g}%, at most {self.at_most}"

    @classmethod
    def of(cls, budget: object) -> Coverage | None:
        """The adaptive budget that an object or a text is; None for other budgets."""
        if isinstance(budget, Coverage):
            return budget
        match = _ADAPTIVE.fullmatch(budget) if isinstance(budget, str) else None
        if match is None:
            return None
        try:
            share = float(Fraction(match.group(1)) / (100 if match.group(2) else 1))
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"budget={shown(budget)} has no share; give one such as 'coverage 95%, at most 192'"
            ) from None
        return cls(share, _plain(match.group(3)))


def check_budget(budget: object) -> None:
    """Refuse what is not a budget of any kind."""
    if Coverage.of(budget) is None:
        budget_share(budget)


def resolve_budget(budget: Budget, encoded: int, eligible: int) -> int:
    """Number of tokens to keep, ``min(K, eligible)``.

    A fraction is taken of the encoded positions and rounded down, but keeps at least one token where any is eligible.
    It is read as the decimal number that the caller wrote, so that 0.29 of 100 is 29.

    Parameters
    ----------
    budget
        An int is a count; a float in (0, 1] or a string such as "20%" is a fraction.
    encoded
        Number of encoded positions, of all crops together where crops share the budget.
    eligible
        Number of positions that may be kept.
    """
    requested = budget_share(budget)
    if isinstance(requested, Fraction):
        requested = max(1, int(requested * encoded))
    return min(requested, eligible)


def budget_share(budget: object) -> int | Fraction:
    """The budget as a checked count (int) or as an exact fraction of the encoded positions."""
    if Coverage.of(budget) is not None:
        raise ValueError(f"budget={shown(str(budget))} adapts to the image, which only StackTok's run can; {_REMEDY}")
    if isinstance(budget, bool):
        raise TypeError(f"budget={budget!r} is a bool; {_REMEDY}")
    if isinstance(budget, (int, Integral)):
        if budget < 0:
            raise ValueError(f"budget={shown(budget)} is negative; {_REMEDY}")
        return int(budget)
    if isinstance(budget, str):
        match = _PERCENTAGE.fullmatch(budget)
        if match is None:
            raise ValueError(f"budget={shown(budget)} is not a percentage; {_REMEDY}")
        share = Fraction(match.group(1)) / 100
    elif isinstance(budget, Fraction):
        share = budget
    elif isinstance(budget, Real):
        if not math.isfinite(budget):
            raise ValueError(f"budget={budget!r} is not finite; {_REMEDY}")
        share = Fraction(str(budget))
    else:
        raise TypeError(f"budget={shown(budget)} has type {type(budget).__name__}; {_REMEDY}")
    if not 0 < share <= 1:
        raise ValueError(f"budget={shown(budget)} is not a fraction in (0, 1]; {_REMEDY}")
    return share


def parse_budget(text: str) -> Budget:
    """A budget typed by a person: "64" is a count, "0.2" and "20%" are fractions, or "coverage 95%, at most 192"."""
    adaptive = Coverage.of(text)
    budget = _plain(text.strip()) if adaptive is None else adaptive
    check_budget(budget)
    return budget


def _plain(text: str) -> int | float | str:
    if _COUNT.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text
