"""VidCom2: frames that are unlike the video get more tokens, and tokens stay that are unlike video and frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints
from stacktok.methods.info import MethodInfo
from stacktok.methods.video_method import VideoMethod

# Squared widths of the Gaussians that are summed, and the temperature of the softmax over frames.
_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)
_TEMPERATURE = 0.01


@dataclass(frozen=True)
class VidCom2(VideoMethod):
    """Shares of the frames by how unlike the video's mean they are; tokens by similarity to both means, least first."""

    info = MethodInfo(
        name="VidCom2",
        paper="VidCom2, EMNLP 2025",
        deviations=(
            "the budget is met exactly, as vLLM does it; the authors' own counts drift with the rounding of shares",
            "features are compared in float32 whatever the model's type",
            "images are refused; the original leaves them as they are",
        ),
    )

    def order(self, frames: torch.Tensor, eligible: Mask, k: int, share: float) -> Ints:
        """Tokens by share, then added or dropped by similarity until the budget is met."""
        t, p, _ = frames.shape
        to_video, to_frame = similarities(frames)
        shares = frame_shares(-to_video.mean(1), share, p)
        scores = (to_video + to_frame).cpu().numpy()
        scores[~eligible.reshape(t, p)] = np.inf
        kept = np.zeros((t, p), dtype=np.bool_)
        for frame, count in enumerate(shares.tolist()):
            kept[frame, np.argsort(scores[frame], kind="stable")[:count]] = True
        chosen, flat = kept.reshape(-1) & eligible, scores.reshape(-1)
        ranked = np.argsort(flat, kind="stable")
        inside, outside = ranked[chosen[ranked]], ranked[~chosen[ranked]]
        return np.concatenate([inside, outside])[:k]


def similarities(frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Similarity of every token to the mean of the video and to that of its frame, (t, p) each.

    Only the half of the channels with the lowest variance counts.
    """
    variance = frames.flatten(0, 1).var(0, unbiased=False)
    quiet = torch.argsort(variance, stable=True)[: max(1, frames.shape[-1] // 2)]
    rows = torch.nn.functional.normalize(frames[..., quiet], dim=-1)

    def to(centre: torch.Tensor) -> torch.Tensor:
        distance = (rows - centre).square().sum(-1)
        return torch.stack([torch.exp(-distance / (2 * width)) for width in _WIDTHS]).sum(0)

    return to(rows.mean((0, 1))), to(rows.mean(1, keepdim=True))


def frame_shares(unlikeness: torch.Tensor, rate: float, p: int) -> torch.Tensor:
    """Tokens of every frame, (t,), between 1 and p.

    Parameters
    ----------
    unlikeness
        Of every frame, (t,).
    rate
        Share of all tokens that stays.
    p
        Tokens of a frame.
    """
    weight = ((unlikeness - unlikeness.max()) / _TEMPERATURE).softmax(0)
    rates = (rate * (1 + weight - weight.mean())).clamp(max=1.0)
    return (rates * p).round().clamp(1, p).long()
