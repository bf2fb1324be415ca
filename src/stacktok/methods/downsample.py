"""Down-sampling of the picture to a budget of tokens: the control that saves the vision tower too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stacktok.core.budget import resolve_budget
from stacktok.methods.info import MethodInfo
from stacktok.methods.pixel_method import AllTokens

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class DownSample(AllTokens):
    """Resize a picture bicubically, so that it yields at most ``budget`` tokens, in families with dynamic resolution.

    The work is done on the picture, before the processor: ``processor(images=DownSample(budget=64).apply(picture,
    processor), ...)``. Attached to a model it keeps every token of such a picture.
    """

    stage = "picture"
    info = MethodInfo(
        name="Down-sampling",
        paper="control",
        deviations=("sides are whole numbers of tokens, so that as many as fit the budget are made, not always all",),
    )

    def apply(self, picture: Image.Image, processor: Any) -> Image.Image:
        """The picture, no larger than the budget allows; unchanged where it has no more tokens as it is.

        Parameters
        ----------
        picture
            In RGB.
        processor
            The model's, whose image processor says how many pixels make a token.
        """
        worker = getattr(processor, "image_processor", processor)
        count = getattr(worker, "get_number_of_image_patches", None)
        patch, merge = getattr(worker, "patch_size", None), getattr(worker, "merge_size", None)
        if count is None or not isinstance(patch, int) or not isinstance(merge, int):
            raise ValueError(
                f"{type(worker).__name__} brings pictures to a fixed size or to tiles, so that a smaller picture has "
                "no fewer tokens; down-sample for a family with dynamic resolution (Qwen2-VL and later, GLM-4V)"
            )
        if self.budget is None:
            return picture
        side = patch * merge

        def tokens(width: int, height: int) -> int:
            return int(count(height, width, {})) // merge**2

        whole = tokens(picture.width, picture.height)
        allowed = max(1, resolve_budget(self.budget, whole, whole))
        if whole <= allowed:
            return picture
        columns, rows = grid_within(picture.width, picture.height, allowed)
        if tokens(columns * side, rows * side) != rows * columns:
            raise ValueError(
                f"budget={self.budget!r} makes a picture of {columns * side} x {rows * side} pixels, which the "
                "processor scales again; give a larger budget, or a processor with a smaller least size (min_pixels)"
            )
        from PIL import Image

        return picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)


def grid_within(width: int, height: int, allowed: int) -> tuple[int, int]:
    """Columns and rows of at most ``allowed`` tokens for a picture of some size.

    Of all grids the one nearest to the picture's shape at ``allowed`` tokens: least squared error of the logarithms of
    its sides; ties to more tokens.
    """
    across, down = math.sqrt(allowed * width / height), math.sqrt(allowed * height / width)

    def error(columns: int) -> tuple[float, int]:
        rows = max(1, min(allowed // columns, math.ceil(down)))
        return math.log(columns / across) ** 2 + math.log(rows / down) ** 2, -rows * columns

    columns = min(range(1, allowed + 1), key=error)
    return columns, max(1, min(allowed // columns, math.ceil(down)))
