"""The shortest ways to write a method: score every token, pick some, or merge.

Such a method is given one set of tokens (a crop, or all crops of an image pooled), the query and a count. Budgets,
crops, eligible tokens, ties, order and provenance are done here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import torch

from stacktok.core.affinity import check_features, row_norms
from stacktok.core.attention import received_attention
from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.crops import apportion
from stacktok.core.greedy import choose_backend
from stacktok.core.inputs import Array, Eligible, Mask, eligible_mask
from stacktok.core.tokens import (
    CropLayout,
    EncodedCrop,
    EncodedImage,
    Ints,
    KeptOnDevice,
    Reduction,
    TowerAttention,
    single_crop,
)
from stacktok.methods.base import Asked, FeatureMethod, Prepared, reduce_on_device
from stacktok.methods.choice import Choice, Indices, MergedTokens, checked_indices

Crops = Literal["pooled", "uniform", "proportional"]


@dataclass(frozen=True)
class CropMethod(FeatureMethod):
    """A method that keeps a number of tokens of every crop, or of all crops pooled.

    Attributes
    ----------
    crops
        What a set is where an image has several crops: "pooled", all crops are one set; "uniform", each crop is a set
        with an equal share of the budget; "proportional", shares go by the number of eligible tokens.
    """

    crops: ClassVar[Crops] = "pooled"

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        grid: tuple[int, int] | None = None,
        attention: TowerAttention | None = None,
    ) -> Choice:
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
        grid
            Rows and columns of tokens; None for a square where n is one, else a single line.
        attention
            The vision tower's attention, for a method that reads it; None for the features' own similarity.
        """
        if self.budget is None:
            name = type(self).__name__
            raise ValueError(f"budget=None keeps everything and selects nothing; give {name} a budget")
        x, z, q = check_features(vision, projected, query)
        image = single_crop(x, z, _grid(grid, len(z)), eligible_mask(eligible, len(z)))
        if self.reads_tower:
            image = image.with_attention([attention or own_attention(x)])
        choice: Choice = self.prepare(image).reduce(None if query is None else q, self.budget).record
        return choice

    def shares(self, image: EncodedImage, budget: Budget) -> list[int]:
        """How many tokens each crop keeps."""
        capacities = [int(crop.eligible.sum()) for crop in image.crops]
        weights = [Fraction(c) if self.crops == "proportional" else Fraction(1) for c in capacities]
        return apportion(resolve_budget(budget, image.n, image.capacity), weights, capacities)

    def arrange(self, image: EncodedImage, choices: Sequence[Choice], pooled: Choice | None = None) -> Reduction:
        """The reduction made of every crop's choice; in the order of the unpruned image unless a method differs.

        Parameters
        ----------
        image
            The encoded image.
        choices
            One per crop.
        pooled
            The choice over all crops that they were split from, which then is the record.
        """
        record = pooled or (choices[0] if len(choices) == 1 else tuple(choices))
        plain = image.keep([choice.indices for choice in choices], record=record, keep_newlines=self.keep_newlines)
        at = {pair: output for output, pair in enumerate(map(tuple, plain.anchors.tolist()))}
        embeddings, merged = {}, {}
        for c, choice in enumerate(choices):
            for token, sources in choice.sources.items():
                embeddings[at[c, token]] = choice.embeddings[token]
                merged[at[c, token]] = of_crop(c, sources)
        return replace(plain, embeddings=embeddings, merged=merged)


@dataclass(frozen=True)
class SetMethod(CropMethod):
    """A method that looks at one set of tokens at a time; write a `ScoreMethod`, a `PickMethod` or a `MergeMethod`.

    Their functions are given ``crop``, the set: features, grid and eligible tokens; ``query``, the input embeddings of
    the query's tokens, (m, d), or None; and ``k``, the number of output tokens, at least 1 and fewer than are eligible.
    """

    @abstractmethod
    def choose(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """Keep ``k`` tokens of a set."""

    def ranking(self, crop: EncodedCrop) -> Ints | None:
        """Tokens of a set, best first, of which every budget keeps the first whatever the question; None if not so."""
        return None

    def prepare(self, image: EncodedImage) -> PreparedSets:
        """Find the sets, and rank their tokens where no question changes that."""
        return PreparedSets(self, image)

    def attention_of(self, crop: EncodedCrop) -> TowerAttention:
        """The vision tower's attention, for a method that reads it."""
        if crop.attention is None:
            raise ValueError(
                f"{type(self).__name__} needs the vision tower's attention, and these features were computed without "
                "it; encode the image inside the with block"
            )
        return crop.attention


class PreparedSets(Prepared):
    """The sets of an image, each with its ranking where the method has one."""

    def __init__(self, method: SetMethod, image: EncodedImage) -> None:
        super().__init__(image)
        self.method = method
        self.pooled = method.crops == "pooled" and len(image.crops) > 1
        # Pooled features are copies, which are not held. A kernel on a GPU picks no more than it is asked for.
        sets = () if self._runs_there else (pool(image.crops),) if self.pooled else image.crops
        self.rankings = [method.ranking(crop) if crop.eligible.sum() > 1 else None for crop in sets]

    @property
    def _runs_there(self) -> bool:
        method, crops = self.method, self.image.crops
        if not isinstance(method, PickMethod) or type(method).pick_on_device is PickMethod.pick_on_device:
            return False
        largest = self.image.n if self.pooled else max(crop.n for crop in crops)
        return picks_there(crops[0].projected.device, largest)

    def on_device(self, budget: Budget) -> bool:
        """Where the method has a kernel for the image's device."""
        return self._runs_there and not self.method.keep_newlines

    @classmethod
    def keep_on_device(cls, questions: Sequence[Asked]) -> list[KeptOnDevice]:
        """The picks of all sets of all images, in one launch."""
        sets: list[EncodedCrop] = []
        queries: list[torch.Tensor | None] = []
        sizes, counts = [], []
        for prepared, query, budget in questions:
            image, method = prepared.image, prepared.method
            own = method.shares(image, budget)
            if prepared.pooled:
                own = [resolve_budget(budget, image.n, image.capacity)]
            found = [pool(image.crops)] if prepared.pooled else image.crops
            sets += found
            queries += [query] * len(found)
            sizes += own
            counts.append(len(found))
        orders = iter(method.pick_on_device(sets, queries, sizes))
        return [
            kept_picks(one.prepared.image, [next(orders) for _ in range(count)])
            for one, count in zip(questions, counts, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the rankings."""
        return sum(ranking.nbytes for ranking in self.rankings if ranking is not None)

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Choose in every set."""
        if self.on_device(budget):
            return reduce_on_device([Asked(self, query, budget)])[0]
        image, method = self.image, self.method
        if self.pooled:
            k = resolve_budget(budget, image.n, image.capacity)
            choice = self._ranked(0, np.concatenate([crop.eligible for crop in image.crops]), k)
            choice = choice or method.choose(pool(image.crops), query, k)
            ends = np.cumsum([crop.n for crop in image.crops])
            parts = np.split(choice.indices, np.searchsorted(choice.indices, ends[:-1]))
            own = zip(parts, image.crops, ends.tolist(), strict=True)
            return method.arrange(image, [Choice.of(part - end + crop.n, crop.n) for part, crop, end in own], choice)
        choices = [
            self._ranked(c, crop.eligible, k) or method.choose(crop, query, k)
            for c, (crop, k) in enumerate(zip(image.crops, method.shares(image, budget), strict=True))
        ]
        return method.arrange(image, choices)

    def _ranked(self, number: int, eligible: Mask, k: int) -> Choice | None:
        """The choice in a set that needs no look at its tokens."""
        ranking = np.flatnonzero(eligible) if k in (0, int(eligible.sum())) else self.rankings[number]
        return None if ranking is None else Choice.of(ranking[:k], len(eligible))


@dataclass(frozen=True)
class ScoreMethod(SetMethod):
    """A method that keeps the tokens of the highest score; ties go to the lowest index."""

    @abstractmethod
    def score(self, crop: EncodedCrop, query: torch.Tensor | None) -> torch.Tensor:
        """The score of every token, (n,); those of tokens that may not be kept do not matter."""

    def choose(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """The first of the ranking."""
        return Choice.of(self._ranking(crop, query)[:k], crop.n)

    def ranking(self, crop: EncodedCrop) -> Ints | None:
        """By score, where no question changes it."""
        return None if self.query_aware else self._ranking(crop, None)

    def _ranking(self, crop: EncodedCrop, query: torch.Tensor | None) -> Ints:
        scores = torch.as_tensor(self.score(crop, query))
        if scores.shape != (crop.n,):
            raise ValueError(
                f"{type(self).__name__}.score returned shape {tuple(scores.shape)}; give one score per token"
            )
        eligible = np.flatnonzero(crop.eligible)
        own = scores.detach()[torch.from_numpy(eligible).to(scores.device)]
        if own.isnan().any():
            raise ValueError(f"{type(self).__name__}.score returned NaN; give a number for every eligible token")
        order: Ints = eligible[torch.argsort(own, descending=True, stable=True).cpu().numpy()]
        return order


@dataclass(frozen=True)
class PickMethod(SetMethod):
    """A method that picks tokens.

    Attributes
    ----------
    nested
        Whether the picks of a budget are the first picks of every larger one. Where no question changes them either,
        an image's tokens are then ranked once.
    """

    nested: ClassVar[bool] = False

    @abstractmethod
    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Indices:
        """Indices of ``k`` eligible tokens in order of choice."""

    def pick_on_device(
        self, sets: Sequence[EncodedCrop], queries: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """The picks of several sets, (k,) each, on their device, without waiting for it; for methods with a kernel.

        Sizes may be 0 or all eligible tokens.
        """
        raise NotImplementedError

    def choose(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """The picks, checked."""
        picks = MergedTokens(self.pick(crop, query, k), [], crop.projected[:0], [])
        return _checked(self, "pick", crop, picks, k)

    def ranking(self, crop: EncodedCrop) -> Ints | None:
        """All tokens but the last, in order of choice."""
        if self.query_aware or not self.nested:
            return None
        return self.choose(crop, None, int(crop.eligible.sum()) - 1).order


@dataclass(frozen=True)
class MergeMethod(SetMethod):
    """A method that makes tokens of several; each belongs to one crop, so that crops are not pooled."""

    merges = True
    crops: ClassVar[Crops] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crops == "pooled":
            raise TypeError(f"{type(self).__name__}.crops is 'pooled'; give 'uniform' or 'proportional' for merging")

    @abstractmethod
    def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
        """The ``k`` output tokens of a set, CLS counted."""

    def choose(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """The merged tokens, checked."""
        return _checked(self, "merge", crop, self.merge(crop, query, k), k)


def picks_there(device: torch.device, n: int) -> bool:
    """Whether a set of ``n`` tokens on a device is picked from there."""
    return choose_backend("auto", device, n) == "triton"


def kept_picks(image: EncodedImage, orders: Sequence[torch.Tensor]) -> KeptOnDevice:
    """Picks of an image on a device.

    Parameters
    ----------
    image
        The image.
    orders
        Picks of every crop in order of choice, (k,) each, or of all crops pooled.
    """
    sizes = [crop.n for crop in image.crops]
    eligible = [crop.eligible for crop in image.crops]
    if len(orders) < len(sizes):
        eligible = [np.concatenate(eligible)]
    masks = [
        torch.zeros(len(own), dtype=torch.bool, device=order.device).scatter_(0, order, True)
        for own, order in zip(eligible, orders, strict=True)
    ]

    def record() -> Choice | tuple[Choice, ...]:
        for c, crop in enumerate(image.crops):
            where = f"crop {c}: " if len(image.crops) > 1 else ""
            row_norms(crop.vision, f"{where}vision")
            row_norms(crop.projected, f"{where}projected")
        found = []
        for own, order in zip(eligible, orders, strict=True):
            # A set that is kept whole has no order of choice.
            whole = len(order) == own.sum()
            found.append(Choice.of(np.flatnonzero(own) if whole else order.cpu().numpy(), len(own)))
        return found[0] if len(found) == 1 else tuple(found)

    parts = torch.split(masks[0], sizes) if len(orders) < len(sizes) else masks
    return KeptOnDevice(parts, sum(len(order) for order in orders), record)


def pool(crops: Sequence[EncodedCrop]) -> EncodedCrop:
    """All crops as one set of tokens, in one line."""
    n = sum(crop.n for crop in crops)
    return EncodedCrop(
        vision=torch.cat([crop.vision for crop in crops]),
        projected=torch.cat([crop.projected for crop in crops]),
        layout=CropLayout(
            grid=(1, n),
            eligible=np.concatenate([crop.eligible for crop in crops]),
            offsets=np.concatenate([crop.layout.offsets for crop in crops]),
        ),
        attention=pool_attention([crop.attention for crop in crops]),
    )


def own_attention(vision: torch.Tensor) -> TowerAttention:
    """The attention of features to one another, as queries and keys of one head."""
    x = vision.float()[None]
    scores = received_attention(x, x, float(vision.shape[1]) ** -0.5)
    return TowerAttention(scores, vision, early=scores)


def of_crop(crop: int, tokens: Ints) -> Ints:
    """Tokens of a crop as pairs, (s, 2)."""
    return np.stack([np.full(len(tokens), crop), tokens], axis=1)


def pool_attention(attention: Sequence[TowerAttention | None]) -> TowerAttention | None:
    """The tower's attention to the tokens of all crops; CLS and the projector are left out."""
    found = [own for own in attention if own is not None]
    if len(found) < len(attention):
        return None
    return TowerAttention(torch.cat([own.scores for own in found]), torch.cat([own.keys for own in found]))


def _grid(grid: tuple[int, int] | None, n: int) -> tuple[int, int]:
    side = round(n**0.5)
    rows, columns = grid or ((side, side) if side * side == n else (1, n))
    if rows * columns != n:
        raise ValueError(f"grid={grid!r} holds {rows * columns} tokens and the features {n}; give rows and columns")
    return rows, columns


def _checked(method: SetMethod, function: str, crop: EncodedCrop, tokens: MergedTokens, k: int) -> Choice:
    name = f"{type(method).__name__}.{function}"
    kept, anchors = checked_indices(tokens, crop.eligible, name)
    order = np.concatenate([kept, anchors])
    embeddings = dict(zip(anchors.tolist(), tokens.made, strict=True))
    sources = dict(zip(anchors.tolist(), tokens.sources, strict=True))
    choice = Choice(crop.n, np.sort(order), order, embeddings, sources, tokens.cls)
    if choice.k != k:
        raise ValueError(f"{name} returned {choice.k} tokens where {k} were asked for; give exactly k")
    return choice
