"""VisionZip: dominant tokens by the vision tower's attention, the rest merged into contextual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stacktok.core.attention import received_attention
from stacktok.core.budget import Budget
from stacktok.core.inputs import Array, Eligible
from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints, Reduction, TowerAttention
from stacktok.methods.facts import Facts
from stacktok.methods.pick import Choice, PickMethod, as_crop


@dataclass(frozen=True)
class VisionZip(PickMethod):
    """The training-free version: CLS (counted), dominant tokens, and contextual tokens made of all others.

    Parameters
    ----------
    signal
        What ranks tokens: "cls", the attention that CLS pays them; "received", the attention that all tokens pay them;
        None follows the tower: CLS where it has one.
    contextual_share
        Share of the budget that goes to merged tokens; 10 of 64, 20 of 128 and 30 of 192 as published.
    allocation
        How crops share a budget: "uniform" gives each an equal share; "per_crop" gives each the whole budget, as the
        original's parameters do.
    """

    facts = Facts(
        name="VisionZip",
        paper="VisionZip, CVPR 2025",
        query_aware=False,
        attention="vision tower",
        merges=True,
        deviations=(
            "one layer's attention is computed, for the rows that are needed; the original runs every layer eagerly",
            "LLaVA-NeXT: the budget is the image's and split evenly over its crops; the original's is per crop "
            "(allocation='per_crop' with 128, 64, 32)",
            "tokens that may not be kept (padding, letterbox) take no part in merging either",
            "Qwen2.5-VL, where no official code exists: attention received in the last full-attention block, merging "
            "on the embeddings that the language model would get",
            "select() without attention uses the features' own similarity in its place",
        ),
    )
    spread = "uniform"

    signal: Literal["cls", "received"] | None = None
    contextual_share: float = 10 / 64
    allocation: Literal["uniform", "per_crop"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal not in (None, "cls", "received"):
            raise ValueError(f"signal={self.signal!r} is not known; use 'cls', 'received' or None")
        if isinstance(self.contextual_share, bool) or not 0 <= self.contextual_share < 1:
            raise ValueError(f"contextual_share={self.contextual_share!r} must lie in [0, 1)")
        if self.allocation not in ("uniform", "per_crop"):
            raise ValueError(f"allocation={self.allocation!r} is not known; use 'uniform' or 'per_crop'")

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        attention: TowerAttention | None = None,
    ) -> Choice:
        """Select on features; without ``attention`` their own similarity stands in for the tower's."""
        return self.select_crop(as_crop(vision, projected, query, eligible, attention=attention), query)

    def reduce(self, image: EncodedImage, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Every crop by itself."""
        if any(crop.attention is None for crop in image.crops):
            raise ValueError(
                "VisionZip needs the vision tower's attention, and these features were computed without it; "
                "encode the image inside the with block"
            )
        if self.allocation == "per_crop" and len(image.crops) > 1:
            one = VisionZip(budget, signal=self.signal, contextual_share=self.contextual_share)
            return self.arrange(image, [one.select_crop(crop, None) for crop in image.crops])
        return super().reduce(image, query, budget)

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Choice:
        """Dominant tokens as they are, contextual ones merged."""
        attention = crop.attention or own_attention(crop.vision)
        has_cls = attention.cls is not None and attention.project is not None
        contextual = int(k * self.contextual_share + 0.5)
        if not has_cls and self.contextual_share:
            contextual = max(1, contextual)
        contextual = min(contextual, k - 1)
        dominant = k - contextual - has_cls

        eligible = torch.from_numpy(np.flatnonzero(crop.eligible)).to(attention.scores.device)
        ranked = torch.argsort(attention.scores[eligible], descending=True, stable=True)
        kept = eligible[ranked[:dominant]].sort().values
        rest = eligible[ranked[dominant:]].sort().values
        embeddings, sources = self._merge(crop, attention, rest, contextual)
        targets = np.array(sorted(sources), dtype=np.int64)
        cls = None
        if attention.cls is not None and attention.project is not None:
            cls = attention.project(attention.cls[None])[0]
        order = np.concatenate([kept.cpu().numpy(), targets])
        return Choice(crop.n, np.sort(order), order, embeddings, sources, cls)

    @staticmethod
    def _merge(
        crop: EncodedCrop, attention: TowerAttention, rest: torch.Tensor, count: int
    ) -> tuple[dict[int, torch.Tensor], dict[int, Ints]]:
        """Contextual tokens: evenly spaced targets, each plus the mean of the tokens most similar to it."""
        if count == 0:
            return {}, {}
        step = max(1, len(rest) // count)
        is_target = torch.zeros(len(rest), dtype=torch.bool, device=rest.device)
        is_target[torch.arange(count, device=rest.device) * step] = True
        targets, others = rest[is_target], rest[~is_target]
        keys = torch.nn.functional.normalize(attention.keys.float(), dim=-1)
        nearest = (keys[others] @ keys[targets].T).argmax(1)
        # The projector decides where merging happens: before it, where a token is the projection of one vector.
        rows = crop.projected if attention.project is None else crop.vision
        assigned = torch.nn.functional.one_hot(nearest, count).to(rows).T
        means = assigned @ rows[others.to(rows.device)] / assigned.sum(1, keepdim=True).clamp_min(1)
        merged = rows[targets.to(rows.device)] + means
        if attention.project is not None:
            merged = attention.project(merged)
        embeddings, sources = {}, {}
        for c, target in enumerate(targets.tolist()):
            embeddings[target] = merged[c]
            sources[target] = np.sort(np.append(others[nearest == c].cpu().numpy(), target)).astype(np.int64)
        return embeddings, sources

    def arrange(self, image: EncodedImage, choices: Sequence[Choice]) -> Reduction:
        """With CLS the original's order: per view CLS, dominant, contextual; tiles together, dominant first."""
        if all(choice.cls is None for choice in choices):
            return super().arrange(image, choices)
        anchors: list[tuple[int, int]] = []
        embeddings: dict[int, torch.Tensor] = {}
        merged: dict[int, Ints] = {}
        base, tiles = [0], list(range(1, len(choices)))

        def dominant(crops: list[int]) -> list[tuple[int, int]]:
            pairs = [(c, int(i)) for c in crops for i in choices[c].indices if int(i) not in choices[c].sources]
            return sorted(pairs, key=lambda pair: int(image.crops[pair[0]].places[pair[1]]))

        def add_cls(c: int) -> None:
            cls = choices[c].cls
            if cls is not None:
                embeddings[len(anchors)] = cls
                merged[len(anchors)] = np.empty((0, 2), dtype=np.int64)
                # CLS has no place of its own and takes that of its view's first token.
                anchors.append((c, int(np.flatnonzero(image.crops[c].eligible)[0])))

        def add_contextual(c: int) -> None:
            for target, sources in sorted(choices[c].sources.items()):
                embeddings[len(anchors)] = choices[c].embeddings[target]
                merged[len(anchors)] = np.stack([np.full(len(sources), c), sources], axis=1)
                anchors.append((c, target))

        add_cls(0)
        anchors.extend(dominant(base))
        add_contextual(0)
        anchors.extend(dominant(tiles))
        for c in tiles:
            add_cls(c)
        for c in tiles:
            add_contextual(c)
        record = choices[0] if len(choices) == 1 else tuple(choices)
        return Reduction(np.array(anchors, dtype=np.int64).reshape(-1, 2), embeddings, merged, record)


def own_attention(vision: torch.Tensor) -> TowerAttention:
    """The attention of features to one another, as queries and keys of one head."""
    x = vision.float()[None]
    return TowerAttention(received_attention(x, x, float(vision.shape[1]) ** -0.5), vision)
