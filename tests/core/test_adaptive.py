"""Budgets that adapt to the image: the smallest prefix that covers enough and whose relevance has saturated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stacktok import Coverage, StackTok, select_crops_from_affinities, select_from_affinities
from stacktok.core.budget import budget_share, parse_budget
from stacktok.methods import available
from stacktok.serving.settings import check_budget


def affinity(rows: int, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (rows, n)).astype(np.float32) / 64


def smallest(units: list[tuple[np.ndarray, np.ndarray]], share: float, at_most: int) -> int:
    """By trying every budget: coverage and relevance of the kept sets, from their definition."""

    def best(matrix: np.ndarray, kept: list[int]) -> float:
        return float(matrix[:, kept].max(1).sum()) if kept else 0.0

    whole = [list(range(a_vv.shape[1])) for _, a_vv in units]
    for k in range(at_most + 1):
        chosen = select_crops_from_affinities([(q, v, None) for q, v in units], k, swap_limit=0)
        kept = [own.tolist() for own in chosen.indices]
        covered, relevant = (
            [sum(best(unit[side], own) for unit, own in zip(units, sets, strict=True)) for sets in (kept, whole)]
            for side in (1, 0)
        )
        if covered[0] >= share * covered[1] and relevant[0] >= relevant[1]:
            return k
    return at_most


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("crops", [1, 3])
def test_it_is_the_smallest_prefix_that_is_enough(share: float, crops: int) -> None:
    for seed in range(5):
        units = [(affinity(3, 20, seed + 10 * c), affinity(20, 20, seed + 10 * c + 100)) for c in range(crops)]
        given = [(q, v, None) for q, v in units]
        found = select_crops_from_affinities(given, Coverage(share, 30), swap_limit=0)
        expected = smallest(units, share, min(30, 20 * crops))
        assert found == select_crops_from_affinities(given, expected, swap_limit=0)
        if crops == 1:
            single = select_from_affinities(*units[0], Coverage(share, 30))
            assert single == select_from_affinities(*units[0], expected)


def test_a_picture_with_more_in_it_keeps_more() -> None:
    flat = torch.ones(36, 8) + 0.01 * torch.randn(36, 8, generator=torch.Generator().manual_seed(0))
    rich = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    query = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    method = StackTok(budget=Coverage(0.9, at_most="50%"))
    kept = [method.select(features, rich, query).k for features in (flat, rich)]
    assert kept[0] < kept[1] <= 18


def test_the_text_form_is_the_same_budget() -> None:
    assert parse_budget("coverage 95%, at most 192") == Coverage(0.95, 192)
    assert parse_budget(str(Coverage(0.9, "20%"))) == Coverage(0.9, "20%")
    assert Coverage.of("coverage 0.5, at most 0.2") == Coverage(0.5, 0.2)


@pytest.mark.parametrize(
    ("share", "at_most", "message"),
    [
        (0, 64, "share=0 is not in"),
        (1.5, 64, "not in"),
        (True, 64, "not in"),
        (0.9, -1, "negative"),
        (0.9, "x", "percent"),
    ],
)
def test_mistakes_are_told(share: float, at_most: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Coverage(share, at_most)


def test_runs_that_depend_on_their_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="relevance_depth"):
        select_from_affinities(affinity(2, 9, 0), affinity(9, 9, 1), Coverage(0.5, 5), relevance_depth="auto")


def test_other_methods_and_vllm_refuse_it_with_the_reason() -> None:
    for name, kind in available().items():
        if not kind.adapts:
            with pytest.raises(ValueError, match="adapts to the image"):
                kind(budget=Coverage(0.9, 64))
            assert name != "stacktok"
    with pytest.raises(ValueError, match="before the encoder has seen it"):
        check_budget("coverage 95%, at most 192")
    with pytest.raises(ValueError, match="adapts"):
        budget_share(Coverage(0.9, 64))
