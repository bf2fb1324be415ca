"""CDPruner: diversity given the question, as the most likely set of a determinantal point process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stacktok.core.affinity import norms_of, row_norms
from stacktok.core.budget import Budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedCrop, EncodedImage, KeptOnDevice, Reduction
from stacktok.kernels.transfer import upload
from stacktok.methods.base import Asked, Prepared, reduce_on_device
from stacktok.methods.choice import Choice
from stacktok.methods.crop_methods import CropMethod, Crops, kept_picks, picks_there
from stacktok.methods.divprune import cosines
from stacktok.methods.info import MethodInfo

# Of a token's own entry in the kernel: a factor below this is rounding of 0, the set already spans the token.
_ZERO = 2.0**-20


@dataclass(frozen=True)
class CDPruner(CropMethod):
    """Greedy maximisation of the determinant of relevance x similarity x relevance over the kept tokens.

    Similarity is the cosine of post-projector embeddings. Every crop is a set of its own with an equal share of the
    budget; relevance is scaled by its extremes over all crops together.

    Parameters
    ----------
    theta
        Weight of the relevance in [0, 1), 0 for diversity alone: the kernel takes exp(alpha r) with
        alpha = theta / (2 (1 - theta)) in place of the relevance r. None takes r itself, as the original does.
    norm_epsilon
        Lower bound of the norm that features are divided by.
    """

    query_aware = True
    info = MethodInfo(
        name="CDPruner",
        paper="CDPruner, NeurIPS 2025",
        deviations=(
            "relevance is the cosine of query rows and projected tokens in the language model's embedding space, not "
            "negated; the original needs CLIP's text tower, which Hugging Face models do not carry",
            "LLaVA-NeXT: the budget is the image's and split evenly over its crops; the original's is per crop",
            "LLaVA-NeXT: tokens of the letterbox, which the model itself drops, do not exist for it",
            "a token is never picked twice: once the kept tokens span the features, the lowest index fills the budget",
            "where all tokens are equally relevant, diversity alone decides; the original divides by zero",
        ),
    )
    revision = 2
    crops: ClassVar[Crops] = "uniform"

    theta: float | None = None
    norm_epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta is not None and (isinstance(self.theta, bool) or not 0 <= self.theta < 1):
            raise ValueError(f"theta={self.theta!r} must lie in [0, 1); give None for the relevance itself")
        if isinstance(self.norm_epsilon, bool) or not 0 < self.norm_epsilon < float("inf"):
            raise ValueError(f"norm_epsilon={self.norm_epsilon!r} must be a finite number greater than 0")

    def prepare(self, image: EncodedImage) -> PreparedSimilarity:
        """The cosines among the tokens of every crop."""
        return PreparedSimilarity(self, image)

    def relevance(
        self, crops: Sequence[EncodedCrop], query: torch.Tensor | None, *, host: bool = True
    ) -> list[torch.Tensor]:
        """The weights of every crop's tokens in the kernel, (n_c,) each, where the crops are.

        Parameters
        ----------
        crops
            The crops of an image.
        query
            Embeddings of the query's tokens, (m, d), or None.
        host
            Whether the host may wait for them, and refuse rows without a finite norm.
        """
        sizes = [crop.n for crop in crops]
        if query is None or not len(query):
            ones = torch.ones(sum(sizes), dtype=torch.float64, device=crops[0].projected.device)
            return list(torch.split(ones, sizes))
        rows = query.float() / self.norms(query, "query", host)[:, None]
        products = [rows @ crop.projected.float().T / self.norms(crop.projected, "projected", host) for crop in crops]
        relevance = torch.cat([found.double().mean(0) for found in products])
        weight = scaled(relevance, np.concatenate([crop.eligible for crop in crops]))
        if self.theta is not None:
            weight = (self.theta / (2 * (1 - self.theta)) * weight).exp()
        return list(torch.split(weight, sizes))

    def norms(self, rows: torch.Tensor, name: str, host: bool) -> torch.Tensor:
        """Norms of rows, (n,), in float32 and not below the floor; ``name`` is what error messages call the rows."""
        return (row_norms(rows, name) if host else norms_of(rows)).float().clamp_min(self.norm_epsilon)


class PreparedSimilarity(Prepared):
    """The similarities of an image's tokens, by crop."""

    def __init__(self, method: CDPruner, image: EncodedImage) -> None:
        super().__init__(image)
        self.method = method
        device = image.crops[0].projected.device
        self._runs_there = all(picks_there(device, crop.n) for crop in image.crops)
        self.similarity = []
        for crop in image.crops:
            found = cosines(crop.projected, "projected", method.norm_epsilon, host=not self._runs_there)
            # Rounding must not rank tokens by their similarity to themselves; only a token of zeros has none.
            found.diagonal().copy_(found.diagonal() > 0.5)
            self.similarity.append(found if self._runs_there else found.cpu())

    @property
    def nbytes(self) -> int:
        """Bytes of the similarities."""
        return sum(similarity.nbytes for similarity in self.similarity)

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """The greedy maximum a posteriori set of every crop, with relevance on one scale."""
        if self.on_device(budget):
            return reduce_on_device([Asked(self, query, budget)])[0]
        # Compiled kernels load when they run: naming a method must not.
        from stacktok.kernels.diversity import greedy_map

        crops, choices = self.image.crops, []
        weights, shares = self.method.relevance(crops, query), self.method.shares(self.image, budget)
        for crop, similarity, weight, k in zip(crops, self.similarity, weights, shares, strict=True):
            order = greedy_map(similarity.cpu().numpy(), weight.cpu().numpy(), crop.eligible, k, _ZERO)
            choices.append(Choice.of(order, crop.n))
        return self.method.arrange(self.image, choices)

    def on_device(self, budget: Budget) -> bool:
        """Where the similarities are on a GPU."""
        return self._runs_there and not self.method.keep_newlines

    @classmethod
    def keep_on_device(cls, questions: Sequence[Asked]) -> list[KeptOnDevice]:
        """The sets of all crops of all images, in one launch."""
        from stacktok.kernels.triton import pick_determinantal

        similarities, weights, candidates, sizes = [], [], [], []
        for prepared, query, budget in questions:
            crops = prepared.image.crops
            similarities += prepared.similarity
            weights += prepared.method.relevance(crops, query, host=False)
            candidates += [upload(crop.eligible, crop.projected.device) for crop in crops]
            sizes += prepared.method.shares(prepared.image, budget)
        orders = iter(pick_determinantal(similarities, weights, candidates, sizes, _ZERO))
        images = [one.prepared.image for one in questions]
        return [kept_picks(image, [next(orders) for _ in image.crops]) for image in images]


def scaled(relevance: torch.Tensor, eligible: Mask) -> torch.Tensor:
    """Relevance brought to about [0, 1] by its least and largest value among eligible tokens; 1 where all are equal."""
    ones = torch.ones_like(relevance)
    if not eligible.any():
        return ones
    among = relevance[upload(np.flatnonzero(eligible), relevance.device)]
    low, high = among.min(), among.max()
    return torch.where(high == low, ones, (relevance - low + 1e-6).clamp_min(0.0) / (high - low))
