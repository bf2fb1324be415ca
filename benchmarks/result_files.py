"""The result files of `compare_selectors.py`, joined, with retention and its intervals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_selectors import BUDGETS, FULL
from stacktok.evaluation.retention import retention

Floats = NDArray[np.float64]
RESAMPLES = 4000


@dataclass(eq=False)
class Results:
    """All result files of one run, joined."""

    items: list[dict[str, Any]]
    cells: dict[str, Floats]
    gate: dict[str, list[dict[str, Any]]]
    tokens: dict[str, float]

    def __post_init__(self) -> None:
        self.families = list(dict.fromkeys(item["family"] for item in self.items))
        self.family = np.array([self.families.index(item["family"]) for item in self.items])
        _, self.scene = np.unique([item["scene"] for item in self.items], return_inverse=True)
        counts = np.random.default_rng(0).multinomial(
            self.scene.max() + 1, np.full(self.scene.max() + 1, 1 / (self.scene.max() + 1)), size=RESAMPLES
        )
        self._draws = counts.astype(np.float64)

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Join the chunks of a folder; only cells that every chunk has count."""
        chunks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        if not chunks:
            raise ValueError(f"{folder} holds no result files; run compare_selectors.py first")
        names = [name for name in chunks[0]["cells"] if all(name in chunk["cells"] for chunk in chunks)]
        return cls(
            items=[item for chunk in chunks for item in chunk["items"]],
            cells={
                name: np.array([digit == "1" for chunk in chunks for digit in chunk["cells"][name]], dtype=float)
                for name in names
            },
            gate={str(k): [fact for chunk in chunks for fact in chunk["gate"].get(str(k), [])] for k in BUDGETS},
            tokens={
                name: float(np.mean([chunk["tokens per layer"][name] for chunk in chunks]))
                for name in chunks[0]["tokens per layer"]
                if name in names
            },
        )

    def by_family(self, cell: str) -> dict[str, float]:
        """Accuracy per family."""
        right = self.cells[cell]
        return {name: float(right[self.family == f].mean()) for f, name in enumerate(self.families)}

    def retention(self, cell: str) -> tuple[float, float, float]:
        """Relative retention with its 95 % interval."""
        estimate = retention(self.by_family(cell), self.by_family(FULL), self.families)
        draws = 100 * (self._resampled(cell) / self._resampled(FULL)).mean(axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        return estimate, float(low), float(high)

    def retention_difference(self, cell: str, other: str) -> tuple[float, float, float]:
        """Difference of two retentions, resampled together."""
        estimate = self.retention(cell)[0] - self.retention(other)[0]
        full = self._resampled(FULL)
        draws = 100 * ((self._resampled(cell) - self._resampled(other)) / full).mean(axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        return estimate, float(low), float(high)

    def _resampled(self, cell: str) -> Floats:
        """Accuracy per family in every resample of the scenes, (resamples, families)."""
        shape = (self.scene.max() + 1, len(self.families))
        right, total = np.zeros(shape), np.zeros(shape)
        np.add.at(right, (self.scene, self.family), self.cells[cell])
        np.add.at(total, (self.scene, self.family), 1)
        accuracy: Floats = (self._draws @ right) / (self._draws @ total)
        return accuracy


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
