"""The last few results of something that takes a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class LRUCache(OrderedDict[K, T]):
    """The last few results, made when they are not there.

    Parameters
    ----------
    size
        How many are held.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def find(self, key: K) -> T | None:
        """A result that is held, which then is the latest; None otherwise."""
        if key in self:
            self.move_to_end(key)
        return super().get(key)

    def get(self, key: K, make: Callable[[], T]) -> T:  # type: ignore[override]
        """A result, made now if it is not held."""
        if key not in self:
            self[key] = make()
            while len(self) > self.size:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]
