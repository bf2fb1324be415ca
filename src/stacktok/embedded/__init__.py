"""The small vision-language models that ship with the package."""

from __future__ import annotations

from pathlib import Path

NAMES = ("llava", "llava_next")
"""Models that `path` knows."""

PREFIX = "embedded/"
"""How a name says that it means one of them: ``embedded/llava``."""


def path(name: str = "llava") -> Path:
    """Folder of an embedded model, ready for ``from_pretrained``.

    Parameters
    ----------
    name : str
        Which model; "llava" has the LLaVA-1.5 architecture (336 px, 576 visual tokens), "llava_next" that of LLaVA-NeXT
        (a base view and tiles of 168 px, 720 visual tokens for a 336 px square).
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; the embedded models are {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / name


def resolve(name: str) -> str:
    """The argument of ``from_pretrained`` for a name: the folder of ``embedded/...``, any other name as it is."""
    return str(path(name.removeprefix(PREFIX))) if name.startswith(PREFIX) else name
