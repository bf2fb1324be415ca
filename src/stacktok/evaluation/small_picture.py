"""A control for towers of a fixed size: the picture down-sampled, positions of the tower interpolated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.tokens import EncodedImage, Ints, Reduction
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.methods.downsample import grid_within

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class SmallPicture(FeatureMethod):
    """The picture resized bicubically to as many patches as the budget allows, in one view without tiles.

    A CLIP tower has learned positions of one grid; on a smaller one they are interpolated, as transformers does it. So
    the tower runs on as many patches as the language model gets tokens. A view is never larger than the tower's own.
    """

    plan_name: ClassVar[str] = "small-picture"

    def prepare(self, image: EncodedImage) -> Prepared:
        """Refused: features do not hold the picture."""
        raise ValueError("SmallPicture needs the picture itself; run it through plans of the engine loop on a CPU")

    def prepare_picture(self, picture: Image.Image, image: EncodedImage, model: Any, processor: Any) -> Prepared:
        """Nothing is done before the budget is known.

        Parameters
        ----------
        picture, image
            The picture, and how it is encoded whole.
        model, processor
            With a CLIP tower and a projector of single features.
        """
        return _Picture(picture, image, model, processor)


class _Picture(Prepared):
    nbytes = 0

    def __init__(self, picture: Image.Image, image: EncodedImage, model: Any, processor: Any) -> None:
        super().__init__(image)
        self.picture, self.model, self.worker = picture, model.model, processor.image_processor

    @torch.inference_mode()
    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Encode the smaller picture; its tokens stand where their middles lie in the view of the whole picture."""
        view = self.image.layout.base or 0
        rows, columns = self.image.crops[view].grid
        allowed = max(1, resolve_budget(budget, self.image.n, self.image.capacity))
        across, down = grid_within(self.picture.width, self.picture.height, min(allowed, rows * columns))
        across, down = min(across, columns), min(down, rows)
        tokens = self._encode(down, across)
        middles = _middles(down, rows)[:, None] * columns + _middles(across, columns)
        anchors = np.stack([np.full(down * across, view), middles.reshape(-1)], axis=1)
        return Reduction(anchors, dict(enumerate(tokens)))

    def _encode(self, rows: int, columns: int) -> torch.Tensor:
        """Projected tokens of the picture at this many patches, (rows columns, d)."""
        from PIL import Image

        config = self.model.config
        if config.vision_feature_select_strategy != "default" or not isinstance(config.vision_feature_layer, int):
            raise ValueError("SmallPicture needs a tower of which one layer's patches are read, as in LLaVA")
        side = config.vision_config.patch_size
        small = self.picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
        mean, std = (np.asarray(values) for values in (self.worker.image_mean, self.worker.image_std))
        pixels = (np.asarray(small.convert("RGB")) / 255 - mean) / std
        given = torch.from_numpy(pixels).permute(2, 0, 1)[None].to(self.model.dtype)
        states = self.model.vision_tower(
            given, interpolate_pos_encoding=True, output_hidden_states=True, return_dict=True
        ).hidden_states
        tokens: torch.Tensor = self.model.multi_modal_projector(states[config.vision_feature_layer][:, 1:])[0]
        return tokens


def _middles(count: int, size: int) -> Ints:
    """Where the middles of ``count`` even parts of ``size`` lie."""
    found: Ints = ((np.arange(count) + 0.5) * size / count).astype(np.int64)
    return found
