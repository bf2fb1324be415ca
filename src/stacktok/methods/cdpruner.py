"""CDPruner: diversity given the question, as the most likely set of a determinantal point process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import row_norms
from stacktok.core.budget import Budget
from stacktok.core.greedy import choose_backend
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints, Reduction
from stacktok.methods.base import Prepared
from stacktok.methods.choice import Choice
from stacktok.methods.crop_methods import CropMethod, Crops
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

    def relevance(self, crops: Sequence[EncodedCrop], query: torch.Tensor | None) -> list[NDArray[np.float64]]:
        """The weights of every crop's tokens in the kernel, (n_c,) each."""
        if query is None or not len(query):
            return [np.ones(crop.n) for crop in crops]
        rows = query.float() / self.norms(query, "query")[:, None]
        products = [rows @ crop.projected.float().T / self.norms(crop.projected, "projected") for crop in crops]
        relevance = np.concatenate([found.double().mean(0).cpu().numpy() for found in products])
        weight = scaled(relevance, np.concatenate([crop.eligible for crop in crops]))
        if self.theta is not None:
            weight = np.exp(self.theta / (2 * (1 - self.theta)) * weight)
        return np.split(weight, np.cumsum([crop.n for crop in crops])[:-1])

    def norms(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Norms of rows, (n,), in float32 and not below the floor; ``name`` is what error messages call the rows."""
        return row_norms(rows, name).float().clamp_min(self.norm_epsilon)


class PreparedSimilarity(Prepared):
    """The similarities of an image's tokens, by crop."""

    def __init__(self, method: CDPruner, image: EncodedImage) -> None:
        super().__init__(image)
        self.method = method
        self.similarity = []
        for crop in image.crops:
            found = cosines(crop.projected, "projected", method.norm_epsilon)
            # Rounding must not rank tokens by their similarity to themselves; only a token of zeros has none.
            found.diagonal().copy_(found.diagonal() > 0.5)
            on_device = choose_backend("auto", found.device, crop.n) == "triton"
            self.similarity.append(found if on_device else found.cpu())

    @property
    def nbytes(self) -> int:
        """Bytes of the similarities."""
        return sum(similarity.nbytes for similarity in self.similarity)

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """The greedy maximum a posteriori set of every crop, with relevance on one scale."""
        crops, shares = self.image.crops, self.method.shares(self.image, budget)
        orders = greedy_sets(self.similarity, self.method.relevance(crops, query), [c.eligible for c in crops], shares)
        return self.method.arrange(
            self.image, [Choice.of(order, crop.n) for order, crop in zip(orders, crops, strict=True)]
        )


def greedy_sets(
    similarities: Sequence[torch.Tensor],
    weights: Sequence[NDArray[np.float64]],
    candidates: Sequence[Mask],
    sizes: Sequence[int],
) -> list[Ints]:
    """Greedy orders of several sets: of those on a GPU in one launch, of the others one by one.

    Parameters
    ----------
    similarities
        (n, n), float32, on the host or, where Triton runs, on its device.
    weights, candidates, sizes
        As in `stacktok.kernels.diversity.greedy_map`.
    """
    device = similarities[0].device
    # Compiled kernels load when they run: naming a method must not.
    if all(choose_backend("auto", one.device, len(one)) == "triton" for one in similarities):
        from stacktok.kernels.triton import pick_determinantal

        factors, masks = ([torch.from_numpy(one).to(device) for one in arrays] for arrays in (weights, candidates))
        return [order.cpu().numpy() for order in pick_determinantal(similarities, factors, masks, sizes, _ZERO)]
    from stacktok.kernels.diversity import greedy_map

    return [
        greedy_map(similarity.cpu().numpy(), weight, mask, k, _ZERO)
        for similarity, weight, mask, k in zip(similarities, weights, candidates, sizes, strict=True)
    ]


def scaled(relevance: NDArray[np.float64], eligible: Mask) -> NDArray[np.float64]:
    """Relevance brought to about [0, 1] by its least and largest value among eligible tokens; 1 where all are equal."""
    among = relevance[eligible]
    if not len(among) or among.max() == among.min():
        return np.ones_like(relevance)
    low, high = among.min(), among.max()
    found: NDArray[np.float64] = np.maximum(relevance - low + 1e-6, 0.0) / (high - low)
    return found
