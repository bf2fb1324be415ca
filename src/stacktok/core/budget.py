"""Budgets: a count, or a fraction of the encoded positions."""

from __future__ import annotations

from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias

Budget: TypeAlias = "int | float | str"

_REMEDY = "give a count such as 64, a fraction in (0, 1] such as 0.2, or a percentage such as '20%'"


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
            raise ValueError(f"budget={budget!r} is negative; {_REMEDY}")
        return int(budget)
    if isinstance(budget, str):
        text = budget.strip()
        try:
            share = Fraction(text[:-1].strip()) / 100 if text.endswith("%") else None
        except (ValueError, ZeroDivisionError):
            share = None
        if share is None:
            raise ValueError(f"budget={budget!r} is not a percentage; {_REMEDY}")
    elif isinstance(budget, Real):
        number = float(budget)
        if not number == number or number in (float("inf"), float("-inf")):
            raise ValueError(f"budget={budget!r} is not finite; {_REMEDY}")
        share = Fraction(str(budget))
    else:
        raise TypeError(f"budget={budget!r} has type {type(budget).__name__}; {_REMEDY}")
    if not 0 < share <= 1:
        raise ValueError(f"budget={budget!r} is not a fraction in (0, 1]; {_REMEDY}")
    return share


def parse_budget(text: str) -> Budget:
    """A budget typed by a person: "64" is a count, "0.2" and "20%" are fractions."""
    stripped = text.strip()
    budget: Budget = stripped
    for convert in (int, float):
        try:
            budget = convert(stripped)
            break
        except ValueError:
            continue
    budget_share(budget)
    return budget
