"""Budgets: a count, or a fraction of the encoded positions."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias

from stacktok.core.limits import shown

Budget: TypeAlias = "int | float | str"

_REMEDY = "give a count such as 64, a fraction in (0, 1] such as 0.2, or a percentage such as '20%'"

# Plain decimals of bounded length alone: Fraction would spend minutes on an exponent that someone made large.
_PERCENTAGE = re.compile(r"\s{0,8}([0-9]{1,9}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s{0,8}%\s{0,8}")
_COUNT = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,3})?")


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
    """A budget typed by a person: "64" is a count, "0.2" and "20%" are fractions."""
    stripped = text.strip()
    budget: Budget = stripped
    if _COUNT.fullmatch(stripped):
        budget = int(stripped)
    elif _DECIMAL.fullmatch(stripped):
        budget = float(stripped)
    budget_share(budget)
    return budget
