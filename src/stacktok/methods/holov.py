"""HoloV: the image in runs of tokens that share the budget by the attention that they get."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from stacktok.core.tokens import EncodedCrop, Ints
from stacktok.methods.crop_methods import PickMethod
from stacktok.methods.info import MethodInfo
from stacktok.methods.tower_method import TowerMethod

# The original's weights of attention and of the variance of cosines.
_ATTENTION, _VARIANCE = 1000.0, 0.09


@dataclass(frozen=True)
class HoloV(TowerMethod, PickMethod):
    """Runs of tokens in the order of the image get shares by their mean score; attention decides inside a run.

    All crops of an image are one sequence, as in the original.

    Parameters
    ----------
    runs
        Number of runs.
    """

    info = MethodInfo(
        name="HoloV",
        paper="HoloV, NeurIPS 2025",
        deviations=(
            "kept tokens stay in the order of the image; the original hands a run over by descending attention",
            "where whole runs are kept and tokens are left over, attention fills the budget; the original appends "
            "vectors of zeros",
            "a run of one token is scored like any other; the original leaves out the factor of its attention",
            "16 runs on every family; the authors' code for Qwen2.5-VL takes 16 n / (9 budget)",
            "towers without CLS: the attention that a token receives from all",
        ),
    )

    runs: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_runs(self.runs)

    def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Ints:
        """Shares by the runs' scores, then the tokens with most attention of each run."""
        ranked = self.by_attention(crop)
        place = np.empty(crop.n, dtype=np.int64)
        place[ranked] = np.arange(len(ranked))
        eligible = np.flatnonzero(crop.eligible)
        eligible = eligible[np.argsort(crop.layout.offsets[eligible], kind="stable")]
        runs = np.array_split(eligible, min(self.runs, len(eligible)))
        weights = np.array([self.run_score(crop, run) for run in runs])
        exact = k * weights / weights.sum()
        shares = np.floor(exact).astype(np.int64)
        shares[np.argsort(-weights, kind="stable")[: k - shares.sum()]] += 1
        picks = np.concatenate(
            [run[np.argsort(place[run])[:share]] for run, share in zip(runs, shares.tolist(), strict=True)]
        )
        left = ranked[~np.isin(ranked, picks)]
        return np.concatenate([picks, left[: k - len(picks)]])

    def run_score(self, crop: EncodedCrop, run: Ints) -> float:
        """The mean over a run of attention and of the variance of its tokens' cosines, on one scale."""
        at, scores = torch.from_numpy(run), self.attention_of(crop).scores
        attention = _ATTENTION * scores[at.to(scores.device)].double()
        rows = crop.projected[at.to(crop.projected.device)].float()
        unit = (rows / (rows.norm(dim=-1, keepdim=True) + 1e-6)).double()
        cosines = (unit @ unit.T).fill_diagonal_(0)
        others = max(1, len(run) - 1)
        means = cosines.sum(1, keepdim=True) / others
        variance = (cosines - means).square().sum(1) / others
        scale = attention.abs().mean() / (variance.abs().mean() + 1e-6).to(attention.device)
        return float(attention.mean() + _VARIANCE * variance.mean().to(attention.device) * scale)


def _check_runs(runs: object) -> None:
    if isinstance(runs, bool) or not isinstance(runs, Integral) or runs < 1:
        raise ValueError(f"runs={runs!r} is not a number of runs; give an integer of at least 1")
