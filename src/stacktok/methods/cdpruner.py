"""CDPruner: diversity given the question, as the most likely set of a determinantal point process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import row_norms
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.facts import Facts
from stacktok.methods.pick import Choice, PickMethod

# A determinant's factor below this is rounding of 0: the set already spans the token.
_ZERO = 1e-9


@dataclass(frozen=True)
class CDPruner(PickMethod):
    """Greedy maximisation of the determinant of relevance x similarity x relevance over the kept tokens.

    Parameters
    ----------
    relevance_weight
        Exponent of the relevance; 0 is diversity alone.
    norm_epsilon
        Lower bound of the norm that features are divided by.
    """

    facts = Facts(
        name="CDPruner",
        paper="CDPruner, NeurIPS 2025",
        query_aware=True,
        deviations=(
            "relevance is the cosine of query rows and projected tokens in the language model's embedding space, not "
            "negated; the original needs CLIP's text tower, which Hugging Face models do not carry",
            "all crops of an image are one set, and a token is never picked twice",
        ),
    )

    relevance_weight: float = 1.0
    norm_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.relevance_weight, bool) or not 0 <= self.relevance_weight < float("inf"):
            raise ValueError(f"relevance_weight={self.relevance_weight!r} must be a finite number of at least 0")
        if isinstance(self.norm_epsilon, bool) or not 0 < self.norm_epsilon < float("inf"):
            raise ValueError(f"norm_epsilon={self.norm_epsilon!r} must be a finite number greater than 0")

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """The greedy maximum a posteriori set."""
        unit = self._unit(crop.vision, "vision")
        similarity = (unit @ unit.T).double().cpu().numpy()
        # Rounding must not rank tokens by their similarity to themselves; only a token of zeros has none.
        np.fill_diagonal(similarity, np.diag(similarity) > 0.5)
        relevance = np.ones(crop.n)
        if query is not None and len(query):
            cosines = self._unit(query, "query") @ self._unit(crop.projected, "projected").T
            relevance = scaled(cosines.double().mean(0).cpu().numpy(), crop.eligible) ** self.relevance_weight
        return Choice.of(greedy_map(relevance[:, None] * similarity * relevance, crop.eligible, k), crop.n)

    def _unit(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows.float() / row_norms(rows, name).float().clamp_min(self.norm_epsilon)[:, None]


def scaled(relevance: NDArray[np.float64], eligible: Mask) -> NDArray[np.float64]:
    """Relevance brought to about [0, 1] by its least and largest value among eligible tokens; 1 where all are equal."""
    low, high = relevance[eligible].min(), relevance[eligible].max()
    if high == low:
        return np.ones_like(relevance)
    found: NDArray[np.float64] = np.maximum(relevance - low + 1e-6, 0.0) / (high - low)
    return found


def greedy_map(kernel: NDArray[np.float64], candidates: Mask, k: int) -> Ints:
    """Greedy order, (k,), by the factor that each token brings to the determinant; ties to the lowest index.

    Parameters
    ----------
    kernel
        Positive semidefinite, (n, n).
    candidates
        Which tokens may be picked, (n,).
    k
        Number of picks, at most the number of candidates.
    """
    factor = np.diag(kernel).copy()
    rows = np.zeros((k, len(kernel)))
    order = np.empty(k, dtype=np.int64)
    left = candidates.copy()
    for step in range(k):
        gains = np.where(left, np.where(factor > _ZERO, factor, 0.0), -1.0)
        token = int(gains.argmax())
        order[step] = token
        left[token] = False
        if gains[token] > 0:
            rows[step] = (kernel[token] - rows[:step, token] @ rows[:step]) / np.sqrt(factor[token])
            factor -= rows[step] ** 2
    return order
