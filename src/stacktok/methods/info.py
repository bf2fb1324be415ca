"""A method as tables describe it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodInfo:
    """A method in a table, the same for every set of parameters; nothing here changes what the method does.

    Attributes
    ----------
    name
        Name for people, as tables print it.
    paper
        Where it was published.
    deviations
        What differs from the published method or its code, one clause each.
    """

    name: str
    paper: str
    deviations: tuple[str, ...] = ()
