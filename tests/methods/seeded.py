"""Features made from a seed, for comparisons with selections that the authors' code made of the same features.

NumPy's `RandomState` is used because its streams are frozen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FIXTURES = Path(__file__).parent / "fixtures"


@dataclass(frozen=True)
class Case:
    """One input: crops of n tokens, uniform features or such around a few centres."""

    seed: int
    crops: int
    n: int
    clusters: int
    k: int

    def draw(self, number: int) -> np.random.RandomState:
        """The ``number``-th stream of this case."""
        return np.random.RandomState(1000 * self.seed + number)

    def vision(self, width: int = 96) -> torch.Tensor:
        """Pre-projector features, (crops, n, width)."""
        draw = self.draw(0)
        rows = draw.standard_normal((self.crops, self.n, width))
        if self.clusters:
            centres = draw.standard_normal((self.clusters, width))
            rows = centres[draw.randint(self.clusters, size=(self.crops, self.n))] + 0.4 * rows
        return torch.from_numpy(rows).float()

    def projected(self, width: int = 128) -> torch.Tensor:
        """Post-projector embeddings, (crops, n, width): two layers on `vision`."""
        vision = self.vision().double().numpy()
        draw = self.draw(1)
        first = draw.standard_normal((vision.shape[-1], width)) / vision.shape[-1] ** 0.5
        second = draw.standard_normal((width, width)) / width**0.5
        return torch.from_numpy(np.tanh(1.5 * vision @ first) @ second).float()

    def query(self, rows: int = 6) -> torch.Tensor:
        """Embeddings of the query, (rows, width): half of them near tokens of the image."""
        tokens = self.projected().flatten(0, 1).numpy()
        draw = self.draw(2)
        made = draw.standard_normal((rows, tokens.shape[-1])) * tokens.std()
        near = tokens[draw.randint(len(tokens), size=rows)]
        return torch.from_numpy(made + near * (np.arange(rows) % 2)[:, None]).float()


@dataclass(frozen=True, eq=False)
class Tower:
    """Attention and keys of a vision tower's layer, for every crop.

    Attributes
    ----------
    cls
        Features of CLS, (crops, d_v).
    attention
        Attention probabilities that CLS pays the patches, (crops, H, n).
    keys
        Keys of the patches, mean over heads, (crops, n, d_k).
    """

    cls: torch.Tensor
    attention: torch.Tensor
    keys: torch.Tensor


def tower(case: Case, heads: int = 16, size: int = 24) -> Tower:
    """Keys that follow the features, and a CLS whose heads look at different parts of them."""
    draw = case.draw(4)
    vision = case.vision().double().numpy()
    cls = draw.standard_normal((case.crops, vision.shape[-1]))
    keys = np.einsum("cnv,hvd->chnd", vision, draw.standard_normal((heads, vision.shape[-1], size)))
    keys /= vision.shape[-1] ** 0.5
    logits = 2 * np.einsum("chd,chnd->chn", draw.standard_normal((case.crops, heads, size)), keys) / size**0.5
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    # CLS keeps a part of its attention for itself.
    found = 0.9 * powers / powers.sum(-1, keepdims=True)
    return Tower(*(torch.from_numpy(value).float() for value in (cls, found, keys.mean(1))))


@dataclass(frozen=True, eq=False)
class Attending:
    """Text that looks at an image inside a language model: a few tokens, the image of N tokens, T text tokens.

    Attributes
    ----------
    start
        Tokens before the image.
    image
        Input embeddings of the image, (N, d).
    text
        Input embeddings of the text behind it, (T, d).
    probabilities
        Attention of the text tokens, causal, (H, T, start + N + T).
    """

    start: int
    image: torch.Tensor
    text: torch.Tensor
    probabilities: torch.Tensor


def attending(case: Case, heads: int = 32, size: int = 24, text: int = 12, start: int = 5) -> Attending:
    """All crops of a case as one run of image tokens, and a text whose heads look at different parts of them."""
    draw = case.draw(3)
    image = case.projected().flatten(0, 1).numpy().astype(np.float64)
    others = draw.standard_normal((start + text, image.shape[1])) * image.std()
    states = np.concatenate([others[:start], image, others[start:]])
    queries = draw.standard_normal((heads, text, size))
    keys = states @ draw.standard_normal((heads, image.shape[1], size)) / states.std() / image.shape[1] ** 0.5
    logits = 2 * np.einsum("htd,hsd->hts", queries, keys) / size**0.5
    later = np.arange(len(states)) > start + len(image) + np.arange(text)[:, None]
    powers = np.where(later, 0, np.exp(logits - logits.max(-1, keepdims=True)))
    found = powers / powers.sum(-1, keepdims=True)
    rows = (torch.from_numpy(value).float() for value in (image, others[start:], found))
    return Attending(start, *rows)


@dataclass(frozen=True, eq=False)
class LayerStates:
    """A prompt between two layers: a few tokens, the image, then text.

    Attributes
    ----------
    start, n
        Tokens before the image, and of it.
    states
        Hidden states, (S, d).
    queries, keys
        (H, S, d_k), not rotated.
    """

    start: int
    n: int
    states: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Queries or keys turned by their positions 0 to S - 1, as in Llama: number i goes with number i + d_k / 2."""
        size = rows.shape[-1]
        frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(rows.shape[1])[:, None] * frequencies
        a, b = rows.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def layer_states(case: Case, heads: int = 4, size: int = 16, text: int = 23) -> LayerStates:
    """All crops of a case as one run of image tokens, in prompts that begin with 5, 15 or 35 tokens."""
    draw, start = case.draw(5), (5, 15, 35)[case.seed % 3]
    image = case.projected().flatten(0, 1).numpy().astype(np.float64)
    others = draw.standard_normal((start + text, image.shape[1])) * image.std()
    states = np.concatenate([others[:start], image, others[start:]])
    made = states @ draw.standard_normal((2 * heads, image.shape[1], size)) / states.std() / image.shape[1] ** 0.5
    rows = (torch.from_numpy(value).float() for value in (states, made[:heads], made[heads:]))
    return LayerStates(start, len(image), *rows)


def scores(case: Case, layer: int) -> torch.Tensor:
    """Attention that a tower's layer pays each patch (from CLS, or received, mean over heads), (crops, n)."""
    logits = 1.5 * case.draw(10 + layer).standard_normal((case.crops, case.n))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return torch.from_numpy(0.9 * powers / powers.sum(-1, keepdims=True)).float()


def joined(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a layer with its heads as one, CLS first, (crops, n + 1, d_v); keys follow the features."""
    draw = case.draw(5)
    vision = case.vision().double().numpy()
    width = vision.shape[-1]
    keys = vision @ draw.standard_normal((width, width)) / width**0.5
    keys = np.concatenate([draw.standard_normal((case.crops, 1, width)), keys], 1)
    queries = draw.standard_normal(keys.shape)
    return torch.from_numpy(queries).float(), torch.from_numpy(keys).float()


def video(case: Case, width: int = 64) -> torch.Tensor:
    """Frames of n tokens that drift: (crops = frames, n, width)."""
    draw = case.draw(8)
    base = draw.standard_normal((case.n, width))
    if case.clusters:
        centres = draw.standard_normal((case.clusters, width))
        base = centres[draw.randint(case.clusters, size=case.n)] + 0.3 * base
    steps = draw.standard_normal((case.crops, case.n, width)) * (
        0.05 + draw.random_sample((case.crops, case.n, 1)) ** 4
    )
    return torch.from_numpy(base + np.cumsum(steps, 0)).float()


def drawn_cells(seed: int, h: int, w: int, colours: int, noise: float, size: int = 12) -> torch.Tensor:
    """A picture of rectangles in a few grey levels, as cells of pixels, (h, w, size), with noise."""
    draw = np.random.RandomState(7000 + seed)
    levels = draw.randint(0, 256, size=(colours, size)) / 255
    shown = np.zeros((h, w), dtype=np.int64)
    for _ in range(6):
        top, left = draw.randint(h), draw.randint(w)
        shown[top : top + 1 + draw.randint(h), left : left + 1 + draw.randint(w)] = draw.randint(colours)
    pixels = levels[shown] + noise * draw.uniform(-1, 1, size=(h, w, size))
    return torch.from_numpy(pixels).float()


def cell_cases(path: Path) -> list[dict[str, Any]]:
    """The recorded pictures of `drawn_cells`."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return found


def cases(sizes: tuple[tuple[int, int], ...], repeats: int = 2) -> list[Case]:
    """Uniform and clustered features, one and five crops, of every size (n, k)."""
    grid = [
        (crops, n, clusters, k) for crops in (1, 5) for clusters in (0, 9) for n, k in sizes for _ in range(repeats)
    ]
    return [Case(seed, *entry) for seed, entry in enumerate(grid)]


def fixture(name: str) -> list[tuple[Case, dict[str, Any]]]:
    """The recorded cases of a method, each with what the authors' code returned."""
    recorded = json.loads((FIXTURES / f"{name}.json").read_text())
    fields = ("seed", "crops", "n", "clusters", "k")
    return [(Case(*(entry[field] for field in fields)), entry) for entry in recorded["cases"]]
