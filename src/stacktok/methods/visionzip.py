"""VisionZip: dominant tokens by the vision tower's attention, the rest merged into contextual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.tokens import EncodedCrop, EncodedImage, Ints, Reduction, TowerAttention
from stacktok.methods.choice import Choice, MergedTokens
from stacktok.methods.crop_methods import MergeMethod, of_crop
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod


@dataclass(frozen=True)
class VisionZip(TowerMethod, MergeMethod):
    """The training-free version: CLS (counted), dominant tokens, and contextual tokens made of all others.

    Parameters
    ----------
    contextual_share
        Share of the budget that goes to merged tokens; 10 of 64, 20 of 128 and 30 of 192 as published.
    allocation
        How crops share a budget: "uniform" gives each an equal share; "per_crop" gives each the whole budget, as the
        original's parameters do.
    """

    info = MethodInfo(
        name="VisionZip",
        paper="VisionZip, CVPR 2025",
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

    contextual_share: float = 10 / 64
    allocation: Literal["uniform", "per_crop"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.contextual_share, bool) or not 0 <= self.contextual_share < 1:
            raise ValueError(f"contextual_share={self.contextual_share!r} must lie in [0, 1)")
        if self.allocation not in ("uniform", "per_crop"):
            raise ValueError(f"allocation={self.allocation!r} is not known; use 'uniform' or 'per_crop'")

    def shares(self, image: EncodedImage, budget: Budget) -> list[int]:
        """An equal share each, or the whole budget."""
        if self.allocation == "uniform":
            return super().shares(image, budget)
        return [resolve_budget(budget, crop.n, int(crop.eligible.sum())) for crop in image.crops]

    def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
        """Dominant tokens as they are, contextual ones merged."""
        attention = self.attention_of(crop)
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
        targets, made, sources = merge_rest(crop, attention, rest, contextual)
        cls = None
        if attention.cls is not None and attention.project is not None:
            cls = attention.project(attention.cls[None])[0]
        return MergedTokens(kept, targets, made, sources, cls)

    def arrange(self, image: EncodedImage, choices: Sequence[Choice], pooled: Choice | None = None) -> Reduction:
        """With CLS the original's order: per view CLS, dominant, contextual; tiles together, dominant first."""
        if all(choice.cls is None for choice in choices):
            return super().arrange(image, choices, pooled)
        outputs: list[tuple[tuple[int, ...], int, int, torch.Tensor | None, Ints]] = []
        for c, choice in enumerate(choices):
            # Sort keys: base view 0 to 2; of the tiles dominant tokens 3, CLS 4, contextual tokens 5.
            cls, dominant, contextual = ((4, c), 3, (5, c)) if c else ((0,), 1, (2,))
            if choice.cls is not None:
                # CLS has no place of its own and takes that of its view's first token.
                first = int(np.flatnonzero(image.crops[c].eligible)[0])
                outputs.append((cls, c, first, choice.cls, np.empty(0, dtype=np.int64)))
            for token in choice.indices.tolist():
                if token in choice.sources:
                    made = choice.embeddings[token], choice.sources[token]
                    outputs.append(((*contextual, token), c, token, *made))
                else:
                    offset = int(image.layout.crops[c].offsets[token])
                    outputs.append(((dominant, offset), c, token, None, choice.indices[:0]))
        outputs.sort(key=lambda output: output[0])
        made_of = {i: (c, made, sources) for i, (_, c, _, made, sources) in enumerate(outputs) if made is not None}
        return Reduction(
            anchors=np.array([output[1:3] for output in outputs], dtype=np.int64).reshape(-1, 2),
            embeddings={i: made for i, (_, made, _) in made_of.items()},
            merged={i: of_crop(c, sources) for i, (c, _, sources) in made_of.items()},
            record=choices[0] if len(choices) == 1 else tuple(choices),
        )


def merge_rest(
    crop: EncodedCrop, attention: TowerAttention, rest: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, list[Ints]]:
    """Contextual tokens: evenly spaced targets, each plus the mean of the tokens most similar to it.

    Returns
    -------
    tuple
        Targets, (count,); embeddings, (count, d); and for each the tokens that it was made of.
    """
    if count == 0:
        return rest[:0], crop.projected[:0], []
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
    sources = [
        np.sort(np.append(others[nearest == c].cpu().numpy(), target)) for c, target in enumerate(targets.tolist())
    ]
    return targets, merged, sources
