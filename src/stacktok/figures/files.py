"""Writing figures so that the same data give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without these a file would name the day and the version that made it, and its parts at random.
_METADATA = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
_SALT = "stacktok"


def save(figure: Figure, path: Path, *, dpi: int = 120) -> None:
    """Write a figure.

    Parameters
    ----------
    figure
        What to write.
    path
        Where; its ending, ``svg`` or ``png``, says in which form.
    dpi
        Resolution of a PNG, and of pictures inside an SVG.
    """
    from matplotlib import rc_context

    form = path.suffix.removeprefix(".")
    if form not in _METADATA:
        raise ValueError(f"path {path} ends in {path.suffix!r}; use .svg or .png")
    with rc_context({"svg.hashsalt": _SALT}):
        figure.savefig(path, format=form, dpi=dpi, metadata=_METADATA[form])
