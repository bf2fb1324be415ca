"""DivPrune: keep the tokens that are farthest from one another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stacktok.core.affinity import copies, row_norms, tie
from stacktok.core.tokens import EncodedCrop
from stacktok.methods.facts import Facts
from stacktok.methods.pick import Choice, PickMethod

# Rounding of a float32 product of two unit vectors of some thousand entries stays below this.
_ZERO = 2.0**-20


@dataclass(frozen=True)
class DivPrune(PickMethod):
    """Max-min diversity of the post-projector embeddings under d = 1 - cosine.

    All crops of an image are one set of candidates, as in the original.
    """

    facts = Facts(
        name="DivPrune",
        paper="DivPrune, CVPR 2025",
        query_aware=False,
        deviations=(
            "cosines in float32 whatever the model's type; the original stays in half precision",
            "distances below 1e-6, which float32 cannot tell from 0, are 0, so that equal tokens tie",
            "a token is never picked twice; the original has no such guard",
            "LLaVA-NeXT's newline embeddings are layout here, not candidates",
            "a fraction of the budget is rounded down, as everywhere here; the original rounds to nearest",
        ),
    )

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """The greedy max-min set."""
        # Compiled kernels load when they run: naming a method must not.
        from stacktok.kernels.diversity import max_min

        return Choice.of(max_min(cosine_distances(crop.projected), crop.eligible, k), crop.n)


def cosine_distances(features: torch.Tensor, norm_epsilon: float = 1e-8) -> NDArray[np.float32]:
    """1 - cosine of every pair of rows of (n, d), (n, n), in float32 on the host.

    Distances that float32 cannot tell from 0 are 0, equal tokens are equally far from every other, and a distance is
    the same both ways, so that ties are real ties and the lowest index decides.
    """
    norms = row_norms(features, "projected")
    unit = features.float() / norms.float().clamp_min(norm_epsilon)[:, None]
    cosines = unit @ unit.T
    equal = copies(features, norms)
    tie(cosines, equal)
    tie(cosines.T, equal)
    distances = 1 - torch.maximum(cosines, cosines.T)
    found: NDArray[np.float32] = distances.masked_fill_(distances < _ZERO, 0.0).cpu().numpy()
    return found
