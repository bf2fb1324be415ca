"""The small vision-language models that ship with the package."""

from __future__ import annotations

from pathlib import Path

NAMES = ("llava",)
"""Models that `path` knows."""


def path(name: str = "llava") -> Path:
    """Folder of an embedded model, ready for ``from_pretrained``.

    Parameters
    ----------
    name : str
        Which model; "llava" has the LLaVA-1.5 architecture (336 px, 576 visual tokens).
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; the embedded models are {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / name
