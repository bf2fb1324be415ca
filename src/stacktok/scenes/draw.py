"""Random draws that are the same on every machine and for every library version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Seeded draws built on ``random.Random.random`` alone, the one stream that Python promises to keep.

    Parameters
    ----------
    seed : int
        Any integer; equal seeds give equal draws.
    """

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def uniform(self, low: float, high: float) -> float:
        """A float in [low, high)."""
        return low + (high - low) * self._source.random()

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], both included."""
        return low + int(self._source.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self._source.random() < probability

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self._source.random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items in random order."""
        return self.shuffled(items)[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in random order, as a new list."""
        result = list(items)
        for i in range(len(result) - 1, 0, -1):
            j = self.integer(0, i)
            result[i], result[j] = result[j], result[i]
        return result
