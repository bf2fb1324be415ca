"""What a table of methods says about each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tower = Literal["", "vision tower", "language model"]


@dataclass(frozen=True)
class Facts:
    """Facts about a method, the same for every set of parameters.

    Attributes
    ----------
    name
        Name for people, as tables print it.
    paper
        Where it was published.
    query_aware
        Whether the question has a say in what is kept.
    attention
        Whose attention scores it needs; empty for none.
    merges
        Whether output tokens may be made of several tokens.
    deviations
        What differs from the published method or its code, one clause each.
    """

    name: str
    paper: str
    query_aware: bool
    attention: Tower = ""
    merges: bool = False
    deviations: tuple[str, ...] = ()
