"""SparseVLM: three cuts by the attention of the text tokens that look at the image; what goes is recycled."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.tokens import Ints
from stacktok.methods.base import Positions
from stacktok.methods.choice import MergedTokens
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView, top
from stacktok.methods.random_tokens import check_seed

# Of 576 tokens in a language model of 32 layers: what stays after layers 2, 6 and 15, by the layer average aimed at.
_DEPTH, _TOKENS, _LAYERS = 32, 576, (2, 6, 15)
_SCHEDULES: dict[str, dict[int, tuple[int, int, int]]] = {
    "v1.5": {192: (300, 200, 110), 128: (303, 110, 36), 96: (238, 48, 26), 64: (66, 30, 17)},
    "+": {192: (300, 200, 118), 128: (238, 108, 60), 96: (246, 54, 28), 64: (66, 34, 20)},
}
_HEADS = Fraction(14, 32)


@dataclass(frozen=True)
class SparseVLM(LayerMethod):
    """Progressive cuts with fixed schedules.

    Parameters
    ----------
    variant
        "v1.5": pruned tokens are clustered and go on as their means, positions are renumbered; "+": no recycling,
        positions are kept, attention is divided by what rotary positions alone give, and of the heads only those
        whose divided attention on the image is largest are counted.
    seed
        Decides ties of densities when tokens are recycled; the original draws without a seed.
    """

    query_aware = True
    merges = True
    info = MethodInfo(
        name="SparseVLM",
        paper="SparseVLM, ICML 2025 (v1.5 and +)",
        deviations=(
            "the raters' rows of three layers' attention are computed; the original computes dense maps",
            "the published schedules are for 576 tokens and 32 layers: counts scale with the number of tokens, layers "
            "2, 6 and 15 with the depth, the 14 heads of + with the number of heads, and budgets between the published "
            "ones are interpolated",
            "the noise that breaks ties of densities is seeded, and added in float64: float32 can round it away",
            "reported averages count what each layer really runs on; the published ones credit a pruning layer with "
            "the reduced count",
            "M-RoPE positions are kept, since renumbering them is not defined; a cluster takes its centre's",
            "a prompt none of whose text tokens rates above the mean is rated by all of them",
        ),
    )

    variant: Literal["v1.5", "+"] = "v1.5"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in _SCHEDULES:
            raise ValueError(f"variant={self.variant!r} is not known; use 'v1.5' or '+'")
        check_seed(self.seed)

    @property
    def default_positions(self) -> Positions:
        """Renumbered in v1.5, kept in +."""
        return "compact" if self.variant == "v1.5" else "kept"

    def layers(self, depth: int) -> tuple[int, ...]:
        """Layers 2, 6 and 15 of 32, scaled; cuts that fall on one layer of a shallow model are one."""
        return tuple(self._plan(depth, _SCHEDULES[self.variant][192]))

    def keeps(self, depth: int, tokens: int, budget: Budget) -> tuple[int, ...]:
        """The schedule, scaled; at least one token goes at every cut unless the budget keeps all."""
        asked = resolve_budget(budget, tokens, tokens)
        counts = tuple(self._plan(depth, self.schedule(tokens, asked)).values())
        if asked >= tokens:
            return (tokens,) * len(counts)
        present, found = tokens, []
        for count in counts:
            found.append(max(1, min(count, present - 1)))
            present = found[-1] + self._recycled(present - found[-1])
        return tuple(found)

    def _recycled(self, gone: int) -> int:
        """How many clusters are made of ``gone`` tokens."""
        return 0 if self.variant == "+" or not gone else (int(0.3 * gone) + 1) // 10 + 1

    def schedule(self, tokens: int, budget: int) -> tuple[int, int, int]:
        """How many of ``tokens`` tokens stay at each of the three cuts."""
        points = {0: (0, 0, 0), **dict(sorted(_SCHEDULES[self.variant].items())), _TOKENS: (_TOKENS,) * 3}
        scaled = Fraction(budget * _TOKENS, tokens)
        low = max(point for point in points if point <= scaled)
        high = min((point for point in points if point >= scaled), default=low)
        part = (scaled - low) / (high - low) if high > low else Fraction(0)
        first, second, third = (
            int((a + part * (b - a)) * tokens / _TOKENS + Fraction(1, 2))
            for a, b in zip(points[low], points[high], strict=True)
        )
        return first, second, third

    def _plan(self, depth: int, counts: tuple[int, int, int]) -> dict[int, int]:
        if depth < 2:
            raise ValueError(f"a language model of {depth} layers has no layer after a cut; SparseVLM needs at least 2")
        at = (min(int(Fraction(layer * depth, _DEPTH) + Fraction(1, 2)), depth - 2) for layer in _LAYERS)
        return dict(zip(at, counts, strict=True))

    def raters(self, view: LayerView) -> Ints:
        """Text tokens whose share of the image's interest is above the mean, the same at every cut."""
        interest = (view.embeddings.float() @ view.text_embeddings.float().T).softmax(1).mean(0)
        chosen = (interest > interest.mean()).nonzero()[:, 0].cpu().numpy()
        return chosen if len(chosen) else np.arange(len(interest), dtype=np.int64)

    def choose(self, view: LayerView, k: int) -> Ints | MergedTokens:
        """By the raters' attention, the mean over heads and raters; in v1.5 the rest is recycled."""
        raters = self.raters(view)
        attention = view.attention(raters)
        if self.variant == "+":
            attention = attention / view.rotation(raters)
            count = max(1, int(len(attention) * _HEADS + Fraction(1, 2)))
            attention = attention[torch.from_numpy(top(attention.sum((1, 2)), count)).to(attention.device)]
        scores = attention.mean(0).mean(0)
        kept = top(scores, k)
        return kept if self.variant == "+" else self.recycle(view.states, scores, kept)

    def recycle(self, states: torch.Tensor, scores: torch.Tensor, kept: Ints) -> MergedTokens:
        """Clusters of the best three tenths of what goes.

        Parameters
        ----------
        states
            Hidden states of all tokens, (n, d).
        scores
            Their scores, (n,).
        kept
            Those that stay.
        """
        gone = np.setdiff1d(np.arange(len(states)), kept)
        chosen = gone[top(scores[torch.from_numpy(gone).to(scores.device)], int(0.3 * len(gone)) + 1)]
        rows = states[torch.from_numpy(chosen).to(states.device)]
        centres, assigned = density_peaks(rows, len(chosen) // 10 + 1, self.seed)
        groups = [(assigned == c).nonzero()[:, 0] for c in range(len(centres))]
        made = torch.stack([rows[group].mean(0) for group in groups])
        return MergedTokens(kept, chosen[centres], made, [chosen[group.cpu().numpy()] for group in groups])


def density_peaks(rows: torch.Tensor, clusters: int, seed: int) -> tuple[Ints, torch.Tensor]:
    """Density-peak clustering by nearest neighbours.

    Parameters
    ----------
    rows
        (s, d).
    clusters
        Number of clusters, at most s, and of the neighbours that make a density.
    seed
        Of the noise that tells equal densities apart.

    Returns
    -------
    tuple
        Centres, (c,), and the cluster of every row, (s,).
    """
    x = rows.float()
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / x.shape[1] ** 0.5
    near = distance.topk(clusters, dim=1, largest=False).values
    noise = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    # In float32 noise this small would be rounded away against densities near 1.
    density = (-near.double().square().mean(1)).exp() + 1e-6 * noise.double()
    denser = density[None, :] > density[:, None]
    delta = distance.masked_fill(~denser, float("inf")).amin(1)
    delta = torch.where(delta.isinf(), distance.max(), delta)
    centres = torch.argsort(density * delta, descending=True, stable=True)[:clusters]
    assigned = distance[:, centres].argmin(1)
    assigned[centres] = torch.arange(clusters, device=assigned.device)
    found: Ints = centres.cpu().numpy()
    return found, assigned
