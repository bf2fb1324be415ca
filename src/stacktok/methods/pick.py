"""Methods that look at one set of tokens and say which stay: the shortest way to write a method.

Such a method implements `PickMethod.pick` for an `EncodedCrop`; budgets, crops, order and provenance are done here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import check_features
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.crops import apportion
from stacktok.core.inputs import Array, Eligible, eligible_mask
from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints, Reduction, TowerAttention, single_crop
from stacktok.methods.base import FeatureMethod

Spread = Literal["joined", "uniform", "proportional"]


@dataclass(frozen=True, eq=False)
class Choice:
    """What a method keeps of one set of tokens.

    Attributes
    ----------
    n
        Number of encoded positions.
    indices
        Kept tokens, ascending, (k,).
    order
        The same tokens in order of choice, (k,), where the method has one.
    embeddings
        Embedding, (d,), of kept tokens that are not simply their own row, by token index.
    sources
        Tokens that such a kept token was made of, itself included, by token index.
    cls
        Embedding, (d,), of the CLS token where the method keeps that too.
    """

    n: int
    indices: Ints
    order: Ints | None = None
    embeddings: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sources: Mapping[int, Ints] = field(default_factory=dict)
    cls: torch.Tensor | None = None

    @classmethod
    def of(cls, order: NDArray[np.integer], n: int) -> Choice:
        """A plain subset, given in any order."""
        picks: Ints = np.asarray(order, dtype=np.int64)
        return cls(n=n, indices=np.sort(picks), order=picks)

    @property
    def k(self) -> int:
        """Number of output tokens, CLS counted."""
        return len(self.indices) + (self.cls is not None)

    def gather(self, projected: torch.Tensor) -> torch.Tensor:
        """The output tokens from ``projected`` (n, d): CLS first where it is kept, then by index, (k, d)."""
        rows = projected[torch.from_numpy(self.indices).to(projected.device)].clone()
        for at, token in enumerate(self.indices.tolist()):
            if token in self.embeddings:
                rows[at] = self.embeddings[token].to(rows)
        return rows if self.cls is None else torch.cat([self.cls[None].to(rows), rows])

    def __repr__(self) -> str:
        merged = f", {len(self.embeddings)} merged" if self.embeddings else ""
        return f"Choice({self.k} of {self.n} tokens{merged}{', CLS' if self.cls is not None else ''})"


@dataclass(frozen=True)
class PickMethod(FeatureMethod):
    """A method that is told a set of tokens and a count.

    Attributes
    ----------
    spread
        What a set is where an image has several crops: "joined", all crops are one set; "uniform", each crop is a set
        with an equal share of the budget; "proportional", shares go by the number of eligible tokens.
    """

    spread: ClassVar[Spread] = "joined"

    @abstractmethod
    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """Keep ``k`` tokens of a set, fewer than are eligible and at least one.

        Parameters
        ----------
        crop
            The set: features, grid and eligible tokens.
        query
            Input embeddings of the query's tokens, (m, d), or None.
        k
            Number of output tokens.
        """

    def select(self, vision: Array, projected: Array, query: Array | None, eligible: Eligible = None) -> Choice:
        """Select on features, without a model.

        Parameters
        ----------
        vision
            Pre-projector features, (n, d_v).
        projected
            Post-projector embeddings, (n, d).
        query
            Input embeddings of the query's tokens, (m, d), or None.
        eligible
            Positions that may be kept, as indices or a boolean mask; None for all.
        """
        return self.select_crop(as_crop(vision, projected, query, eligible), query)

    def select_crop(self, crop: EncodedCrop, query: Array | None) -> Choice:
        """Select on one set under this method's own budget."""
        if self.budget is None:
            name = type(self).__name__
            raise ValueError(f"budget=None keeps everything and selects nothing; give {name} a budget")
        q = check_features(crop.vision, crop.projected, query)[2] if query is not None else None
        return self._pick(crop, q, resolve_budget(self.budget, crop.n, int(crop.eligible.sum())))

    def reduce(self, image: EncodedImage, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Pick in every set of the image."""
        total = resolve_budget(budget, image.n, image.capacity)
        if self.spread == "joined" and len(image.crops) > 1:
            choice = self._pick(join(image.crops), query, total)
            return assemble(image, _split(choice, image.crops), choice, keep_newlines=self.keep_newlines)
        choices = [
            self._pick(crop, query, share) for crop, share in zip(image.crops, self.shares(image, total), strict=True)
        ]
        return self.arrange(image, choices)

    def shares(self, image: EncodedImage, total: int) -> list[int]:
        """How many tokens each crop keeps."""
        capacities = [int(crop.eligible.sum()) for crop in image.crops]
        weights = [Fraction(c) if self.spread == "proportional" else Fraction(1) for c in capacities]
        return apportion(total, weights, capacities)

    def arrange(self, image: EncodedImage, choices: Sequence[Choice]) -> Reduction:
        """The reduction made of every crop's choice; in the order of the unpruned image unless a method differs."""
        record = choices[0] if len(choices) == 1 else tuple(choices)
        return assemble(image, choices, record, keep_newlines=self.keep_newlines)

    def _pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        if k == 0 or k == int(crop.eligible.sum()):
            return Choice.of(np.flatnonzero(crop.eligible)[:k], crop.n)
        choice = self.pick(crop, query, k)
        if choice.k != k:
            raise ValueError(f"{type(self).__name__}.pick returned {choice.k} tokens where {k} were asked for")
        return choice


def as_crop(
    vision: Array,
    projected: Array,
    query: Array | None,
    eligible: Eligible,
    grid: tuple[int, int] | None = None,
    attention: TowerAttention | None = None,
) -> EncodedCrop:
    """A caller's features as a crop; without a grid, a square one where that fits, else a single line."""
    x, z, _ = check_features(vision, projected, query)
    n = len(z)
    if grid is None:
        side = round(n**0.5)
        grid = (side, side) if side * side == n else (1, n)
    if grid[0] * grid[1] != n:
        raise ValueError(f"grid={grid!r} holds {grid[0] * grid[1]} tokens and the features {n}; give rows and columns")
    return replace(single_crop(x, z, grid, eligible_mask(eligible, n)).crops[0], attention=attention)


def join(crops: Sequence[EncodedCrop]) -> EncodedCrop:
    """All crops as one set of tokens, in one line."""
    n = sum(crop.n for crop in crops)
    return EncodedCrop(
        vision=torch.cat([crop.vision for crop in crops]),
        projected=torch.cat([crop.projected for crop in crops]),
        grid=(1, n),
        eligible=np.concatenate([crop.eligible for crop in crops]),
        places=np.concatenate([crop.places for crop in crops]),
    )


def _split(choice: Choice, crops: Sequence[EncodedCrop]) -> list[Choice]:
    """The part of a joined choice that belongs to each crop."""
    parts, first = [], 0
    for crop in crops:
        own = choice.indices[(choice.indices >= first) & (choice.indices < first + crop.n)] - first
        parts.append(Choice.of(own, crop.n))
        first += crop.n
    return parts


def assemble(
    image: EncodedImage, choices: Sequence[Choice], record: object, *, keep_newlines: bool = False
) -> Reduction:
    """The reduction of an image from its crops' choices, in the order of the unpruned image; CLS is left out."""
    plain = image.keep([choice.indices for choice in choices], record=record, keep_newlines=keep_newlines)
    at = {pair: output for output, pair in enumerate(map(tuple, plain.anchors.tolist()))}
    embeddings, merged = {}, {}
    for c, choice in enumerate(choices):
        for token, embedding in choice.embeddings.items():
            embeddings[at[c, token]] = embedding
        for token, sources in choice.sources.items():
            merged[at[c, token]] = np.stack([np.full(len(sources), c), sources], axis=1).astype(np.int64)
    return replace(plain, embeddings=embeddings, merged=merged)
