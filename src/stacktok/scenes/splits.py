"""Seed ranges of the train, dev and test splits, disjoint by construction."""

from __future__ import annotations

from typing import Final, Literal

Split = Literal["train", "dev", "test"]

RANGES: Final[dict[Split, range]] = {
    "train": range(1_000_000_000),
    "dev": range(1_000_000_000, 1_100_000_000),
    "test": range(1_100_000_000, 1_200_000_000),
}


def seed_for(split: Split, index: int) -> int:
    """Seed of the `index`-th scene of a split.

    Parameters
    ----------
    split : {"train", "dev", "test"}
        Which range to take the seed from.
    index : int
        Position in that range, from 0.
    """
    if split not in RANGES:
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(RANGES)}")
    seeds = RANGES[split]
    if not 0 <= index < len(seeds):
        raise ValueError(f"index is {index}; split {split!r} has indices 0 to {len(seeds) - 1}")
    return seeds[index]


def split_of(seed: int) -> Split:
    """Which split a seed belongs to."""
    for split, seeds in RANGES.items():
        if seed in seeds:
            return split
    raise ValueError(f"seed is {seed}; seeds of scenes lie between 0 and {RANGES['test'].stop - 1}")


def require_split(seed: int, split: Split) -> int:
    """Return the seed if it belongs to the split, and raise if it does not."""
    found = split_of(seed)
    if found != split:
        raise ValueError(
            f"seed {seed} belongs to split {found!r}, not {split!r}; take it from seed_for({split!r}, index)"
        )
    return seed
