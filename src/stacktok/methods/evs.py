"""EVS, efficient video sampling: tokens that differ from the same place in the frame before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints
from stacktok.methods.info import MethodInfo
from stacktok.methods.video_method import VideoMethod


@dataclass(frozen=True)
class EVS(VideoMethod):
    """The first frame whole, then the tokens of any frame with the largest 1 - cosine to their predecessor."""

    info = MethodInfo(
        name="EVS",
        paper="Efficient Video Sampling, 2025, as in vLLM",
        deviations=(
            "a budget below one frame keeps the first tokens of the first frame; the original keeps that frame whole",
            "cosines in float32 whatever the model's type",
            "images are refused; vLLM leaves them as they are",
        ),
    )

    def order(self, frames: torch.Tensor, eligible: Mask, k: int, share: float) -> Ints:
        """By difference; ties to the lowest index."""
        change = 1 - torch.cosine_similarity(frames[1:], frames[:-1], dim=-1)
        # No cosine distance comes near this value, so that the first frame is first.
        scores = torch.cat([change.new_full((1, frames.shape[1]), 255.0), change]).flatten().cpu().numpy()
        among = np.flatnonzero(eligible)
        order: Ints = among[np.argsort(-scores[among], kind="stable")[:k]]
        return order
