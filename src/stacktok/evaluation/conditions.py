"""Stress conditions: images and queries as a disturbed selector sees them; see `ConditionPart` for the kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stacktok.core.tokens import EncodedImage
from stacktok.evaluation.plan import ConditionPart


def disturb_image(condition: ConditionPart, image: EncodedImage, scene: int) -> EncodedImage:
    """The image as a selector sees it; ``scene`` is the scene's seed."""
    strength = condition.strength
    if condition.kind == "token-noise":
        draw = _generator(condition, scene)

        def noisy(features: torch.Tensor) -> torch.Tensor:
            spread = (features - features.mean(dim=0)).square().mean().sqrt()
            return features + strength * spread * _normal(features, draw)

        crops = [replace(crop, vision=noisy(crop.vision), projected=noisy(crop.projected)) for crop in image.crops]
    elif condition.kind == "modality-gap":
        # The gap is a fact of a model, so it is the same for all scenes.
        direction = _normal(image.crops[0].projected[0], _generator(condition, 0))
        length = torch.cat([crop.projected for crop in image.crops]).norm(dim=1).mean()
        gap = strength * length * direction / direction.norm()
        crops = [replace(crop, projected=crop.projected + gap) for crop in image.crops]
    else:
        return image
    return replace(image, crops=tuple(crops))


def disturb_query(condition: ConditionPart, query: torch.Tensor, words: torch.Tensor, item: int) -> torch.Tensor:
    """The query as a selector sees it, (m, d).

    Parameters
    ----------
    condition
        What to do.
    query
        Input embeddings of the question, (m, d).
    words
        Input embeddings of the vocabulary, (V, d).
    item
        Number of the question.
    """
    draw = _generator(condition, item)
    if condition.kind == "query-noise":
        return query + condition.strength * query.square().mean().sqrt() * _normal(query, draw)
    if condition.kind == "random-question":
        return words[torch.from_numpy(draw.integers(len(words), size=len(query)))]
    return query


def asked_instead(condition: ConditionPart, item: int, scenes: Sequence[int]) -> int:
    """Number of the question that a selector is told in place of another; ``scenes`` has the scene of every one."""
    if condition.kind != "other-question":
        return item
    others = [number for number, scene in enumerate(scenes) if scene != scenes[item]]
    if not others:
        raise ValueError(f"condition {condition.name!r} needs questions about two scenes; give more scenes")
    return others[int(_generator(condition, item).integers(len(others)))]


def _generator(condition: ConditionPart, number: int) -> np.random.Generator:
    return np.random.default_rng((condition.seed, number))


def _normal(like: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(draw.standard_normal(like.shape)).to(like)
