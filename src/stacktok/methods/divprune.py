"""DivPrune: keep the tokens that are farthest from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stacktok.core.affinity import all_copies, copies, norms_of, row_norms, tie
from stacktok.core.tokens import EncodedCrop
from stacktok.kernels.transfer import upload
from stacktok.methods.choice import Indices
from stacktok.methods.crop_methods import PickMethod
from stacktok.methods.info import MethodInfo

# Rows of a block of products: large enough for full speed, small enough that little is computed twice.
_ROWS = 512
# Rounding of a float32 product of two unit vectors of some thousand entries stays below this.
_ZERO = 2.0**-20


@dataclass(frozen=True)
class DivPrune(PickMethod):
    """Max-min diversity of the post-projector embeddings under d = 1 - cosine.

    All crops of an image are one set of candidates, as in the original.
    """

    nested = True
    info = MethodInfo(
        name="DivPrune",
        paper="DivPrune, CVPR 2025",
        deviations=(
            "cosines in float32 whatever the model's type; the original stays in half precision",
            "distances below 1e-6, which float32 cannot tell from 0, are 0, so that equal tokens tie",
            "a token is never picked twice; the original has no such guard",
            "LLaVA-NeXT's newline embeddings are layout here, not candidates",
            "a fraction of the budget is rounded down, as everywhere here; the original rounds to nearest",
        ),
    )

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Indices:
        """The greedy max-min set."""
        # Compiled kernels load when they run: naming a method must not.
        from stacktok.kernels.diversity import max_min

        return max_min(cosine_distances(crop.projected).cpu().numpy(), crop.eligible, k)

    def pick_on_device(
        self, sets: Sequence[EncodedCrop], queries: Sequence[torch.Tensor | None], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """The greedy max-min sets, in one launch."""
        from stacktok.kernels.triton import pick_max_min

        distances = [cosine_distances(crop.projected, host=False) for crop in sets]
        return pick_max_min(distances, [upload(crop.eligible, crop.projected.device) for crop in sets], sizes)


def cosine_distances(features: torch.Tensor, norm_epsilon: float = 1e-8, *, host: bool = True) -> torch.Tensor:
    """1 - cosine of every pair of rows of (n, d), (n, n), in float32.

    Distances that float32 cannot tell from 0 are 0, so that ties are real ties and the lowest index decides.
    """
    distances = cosines(features, "projected", norm_epsilon, host=host).neg_().add_(1)
    return distances.masked_fill_(distances < _ZERO, 0.0)


def cosines(features: torch.Tensor, name: str, norm_epsilon: float = 1e-8, *, host: bool = True) -> torch.Tensor:
    """The cosine of every pair of rows of (n, d), (n, n), in float32.

    Equal tokens are equally near to every other, and a cosine is the same both ways: it is computed once.

    Parameters
    ----------
    features
        The rows.
    name
        Their name in errors.
    norm_epsilon
        Lower bound of the norm that they are divided by.
    host
        Whether the host may wait for them: it then refuses rows without a finite norm.
    """
    norms = row_norms(features, name) if host else norms_of(features)
    unit = features.float() / norms.float().clamp_min(norm_epsilon)[:, None]
    found = unit.new_empty((len(unit), len(unit)))
    with torch.autocast(unit.device.type, enabled=False):
        for start in range(0, len(unit), _ROWS):
            rows = slice(start, start + _ROWS)
            block = unit[rows] @ unit[: rows.stop].T
            own = block[:, start:]
            own.copy_(torch.maximum(own, own.T))
            found[rows, : rows.stop], found[: rows.stop, rows] = block, block.T
    equal = (copies if host else all_copies)(features, norms)
    tie(found, equal)
    tie(found.T, equal)
    return found
