"""PixelPrune: leave out cells that the predictor of JPEG-LS finds in their neighbours, before the vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints
from stacktok.methods.info import MethodInfo
from stacktok.methods.pixel_method import PixelMethod


@dataclass(frozen=True)
class PixelPrune(PixelMethod):
    """Predictive coding of cells (LOCO-I): a cell is encoded if it differs from the one that predicts it.

    With A to the left, B above and C above A: in the first row A predicts, in the first column B; elsewhere B if C is
    like A and not like B, else A. The first cell is always encoded. How many are follows from the pixels.

    Parameters
    ----------
    tau
        Largest difference of two pixels, on the scale from 0 to 1, at which cells are alike; 0 for equal pixels. Above
        0 a cell is compared with what stands for its neighbours, so that differences do not add up.
    """

    info = MethodInfo(
        name="PixelPrune",
        paper="PixelPrune, 2026",
        deviations=(
            "frames of a video are coded each by itself; the original takes images alone",
            "pixels that a processor or caller has cast to half precision are compared as such",
            "for a method that follows, a left-out cell has the features of the cell that stands for it, and cannot be "
            "kept",
        ),
    )

    tau: float = 0.0

    def __post_init__(self) -> None:
        given: Any = self.tau
        number = isinstance(given, Real) and not isinstance(given, bool)
        if not number or not 0 <= float(given) < 1:
            raise ValueError(f"tau={self.tau!r} is not a number in [0, 1); give 0 for equal pixels, or such as 0.02")

    @property
    def needs_levels(self) -> bool:
        """Equality needs no scale."""
        return self.tau > 0

    def keep(self, cells: torch.Tensor) -> tuple[Mask, Ints]:
        """Code the cells in raster order."""
        h, w, _ = cells.shape
        alike = _Alike(cells, self.tau)
        source: Ints = np.arange(h * w)
        for cell in range(1, h * w):
            row, column = divmod(cell, w)
            left, above = cell - 1, cell - w
            predicted = above if column == 0 else left
            if row and column:
                a, b, c = source[left], source[above], source[above - 1]
                if alike(c, a) and not alike(c, b):
                    predicted = above
            if alike(cell, source[predicted]):
                source[cell] = source[predicted]
        kept: Mask = source == np.arange(h * w)
        return kept, source


class _Alike:
    """Tells whether two cells, given by index, are alike.

    Parameters
    ----------
    cells
        (h, w, d).
    tau
        Largest difference of like ones; at 0 cells are sorted into classes of equal ones once.
    """

    def __init__(self, cells: torch.Tensor, tau: float) -> None:
        rows = cells.detach().flatten(0, 1).float().cpu().numpy()
        self.rows, self.tau = rows, tau
        # Adding 0 makes -0.0 and 0.0 the same bytes.
        self.classes = [row.tobytes() for row in rows + 0.0] if tau == 0 else None

    def __call__(self, one: int, other: int) -> bool:
        if one == other:
            return True
        if self.classes is not None:
            return bool(self.classes[one] == self.classes[other])
        return bool(np.abs(self.rows[one] - self.rows[other]).max() <= self.tau)
