"""Methods for videos: frames are compared with one another, and the frames of a video share its budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch

from stacktok.core.affinity import check_features
from stacktok.core.budget import Budget, budget_share, resolve_budget
from stacktok.core.inputs import Array, Eligible, Mask, eligible_mask
from stacktok.core.tokens import EncodedImage, ImageLayout, Ints, Reduction, TowerAttention
from stacktok.methods.base import Prepared
from stacktok.methods.choice import Choice
from stacktok.methods.crop_methods import CropMethod


@dataclass(frozen=True)
class VideoMethod(CropMethod):
    """A method that keeps tokens of all frames of a video together; an image is an error."""

    @abstractmethod
    def order(self, frames: torch.Tensor, eligible: Mask, k: int, share: float) -> Ints:
        """Indices of the ``k`` tokens to keep in order of choice, at least 1 and fewer than are eligible.

        Parameters
        ----------
        frames
            Post-projector embeddings, (t, p, d), in float32.
        eligible
            Tokens that may be kept, (t p,).
        k
            Number of tokens.
        share
            The budget as a share of all tokens, before rounding.
        """

    def select(
        self,
        vision: Array,
        projected: Array,
        query: Array | None,
        eligible: Eligible = None,
        *,
        grid: tuple[int, int] | None = None,
        attention: TowerAttention | None = None,
        frames: int = 1,
    ) -> Choice:
        """Select on the features of a video, without a model; see `CropMethod.select`.

        Parameters
        ----------
        vision, projected, query, eligible, attention
            As there; tokens frame after frame.
        grid
            Rows and columns of a frame; None for a single line.
        frames
            Number of frames.
        """
        if self.budget is None:
            name = type(self).__name__
            raise ValueError(f"budget=None keeps everything and selects nothing; give {name} a budget")
        x, z, _ = check_features(vision, projected, query)
        if frames < 1 or len(z) % frames:
            raise ValueError(f"frames={frames!r} does not divide the {len(z)} tokens; give the number of frames")
        rows, columns = grid or (1, len(z) // frames)
        layout = ImageLayout.raster(*[(rows, columns)] * frames).with_eligible(eligible_mask(eligible, len(z)))
        video = replace(EncodedImage.of(layout, x, z), modality="video")
        choice: Choice = self.prepare(video).reduce(None, self.budget).record
        return choice

    def prepare(self, image: EncodedImage) -> PreparedVideo:
        """Refuse what is not a video."""
        if image.modality != "video":
            raise ValueError(
                f"{type(self).__name__} compares the frames of a video, and this is one image; use it on videos, or "
                "a method for images"
            )
        if len({crop.n for crop in image.crops}) > 1:
            raise ValueError(
                f"{type(self).__name__} compares frames token by token, and these have "
                f"{[crop.n for crop in image.crops]} tokens; give frames of one size"
            )
        return PreparedVideo(self, image)


class PreparedVideo(Prepared):
    """A video whose frames are compared when the budget is known."""

    def __init__(self, method: VideoMethod, image: EncodedImage) -> None:
        super().__init__(image)
        self.method = method

    @property
    def nbytes(self) -> int:
        """Nothing is held."""
        return 0

    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """One choice over all frames."""
        image = self.image
        k = resolve_budget(budget, image.n, image.capacity)
        eligible = np.concatenate([crop.eligible for crop in image.crops])
        if k in (0, image.capacity):
            order = np.flatnonzero(eligible)[:k]
        else:
            frames = torch.stack([crop.projected for crop in image.crops]).float()
            asked = budget_share(budget)
            share = float(asked) if isinstance(asked, Fraction) else k / image.n
            order = self.method.order(frames, eligible, k, share)
        choice = Choice.of(order, image.n)
        return self.method.arrange(image, per_frame(choice.indices, image), choice)


def per_frame(indices: Ints, image: EncodedImage) -> Sequence[Choice]:
    """The kept tokens of every frame of a video, from ascending indices over all of them."""
    p = image.crops[0].n
    return [Choice.of(indices[indices // p == f] - f * p, p) for f in range(len(image.crops))]
