"""Methods that rank tokens by the vision tower's attention, each against a slow version of its published definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stacktok.core.tokens import TowerAttention
from stacktok.methods import SCOPE, HoloV, VisPruner
from tests.methods.seeded import Case, fixture, tower
from tests.methods.test_authors import image_of


def attended(case: Case, padding: int = 0) -> Any:
    """The case's image with the attention of CLS, summed over heads."""
    seen = tower(case)
    pairs = zip(seen.attention, seen.keys, strict=True)
    return image_of(case, [TowerAttention(scores.sum(0), keys) for scores, keys in pairs], padding)


def kept_per_crop(method: Any, case: Case) -> list[list[int]]:
    anchors = method.reduce(attended(case), None, case.k * case.crops).anchors
    return [sorted(anchors[anchors[:, 0] == c, 1].tolist()) for c in range(case.crops)]


@pytest.mark.parametrize(("case", "entry"), fixture("vispruner"))
def test_vispruner_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    found = kept_per_crop(VisPruner(important_ratio=entry["important_ratio"]), case)
    for crop, (ours, theirs) in enumerate(zip(found, entry["kept"], strict=True)):
        # Two likenesses that are equal in float32 decide all later rounds, and the original's sort is not stable.
        assert ours == theirs or crop in entry.get("tied", [])


@pytest.mark.parametrize(("case", "entry"), fixture("fastervlm"))
def test_fastervlm_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    assert kept_per_crop(VisPruner(important_ratio=1), case) == entry["kept"]


@pytest.mark.parametrize(("case", "entry"), fixture("holov"))
def test_holov_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    found = HoloV(runs=entry["runs"]).reduce(attended(case), None, case.k * case.crops).record
    # The original is short of tokens where whole runs are kept; the rest of the budget is filled.
    assert set(entry["order"]) <= set(found.order.tolist())
    assert found.k == case.k * case.crops


@pytest.mark.parametrize(("case", "entry"), fixture("scope"))
def test_scope_picks_in_the_order_of_the_authors_code(case: Case, entry: dict[str, Any]) -> None:
    record = SCOPE().reduce(attended(case), None, case.k * case.crops).record
    choices = (record,) if case.crops == 1 else record
    assert [choice.order.tolist() for choice in choices] == entry["order"]


def cosine(a: Any, b: Any) -> float:
    # Integers, so that equal cosines are equal to the bit.
    return float((a * b).sum() / math.sqrt(int((a * a).sum()) * int((b * b).sum())))


def slow_vispruner(rows: list[Any], scores: list[int], k: int, ratio: float) -> list[int]:
    """Important tokens, then rounds that each drop at most eight doubles from the even places."""
    order = sorted(range(len(rows)), key=lambda i: (-scores[i], i))
    important, rest = order[: int(k * ratio)], order[int(k * ratio) :]
    if ratio == 1:
        return sorted(important)
    while len(rest) > k - len(important):
        alone = rest[-1:] if len(rest) % 2 else []
        paired = rest[: len(rest) - len(alone)]
        a, b = paired[::2], paired[1::2]
        likeness = [max(cosine(rows[i], rows[j]) for j in b) for i in a]
        ranked = sorted(range(len(a)), key=lambda place: (-likeness[place], place))
        gone = min(8, len(rest) - k + len(important), len(a))
        rest = [a[place] for place in ranked[gone:]] + b + alone
    return sorted(important + rest)


corners = st.lists(st.integers(0, 7), min_size=2, max_size=30)


@given(corners, st.data())
def test_vispruner_is_its_definition_ties_included(kinds: list[int], data: st.DataObject) -> None:
    rows = [np.array([4 * (kind >> b & 1) - 2 for b in range(3)] + [2]) for kind in kinds]
    scores = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    k = data.draw(st.integers(1, len(rows)))
    features = torch.tensor(np.array(rows)).float()
    attention = TowerAttention(torch.tensor(scores).float(), features)
    for ratio in (0.0, 0.5, 1.0):
        found = VisPruner(budget=k, important_ratio=ratio).select(features, features, None, attention=attention)
        expected = slow_vispruner(rows, scores, k, ratio)
        assert found.indices.tolist() == expected


def slow_scope(rows: list[Any], weights: list[int], k: int) -> list[int]:
    """Argmax of saliency times what a token adds to sum_i max(0, max over the kept of cos_ij)."""

    def covered(kept: list[int]) -> float:
        return sum(max([0.0, *(cosine(row, rows[j]) for j in kept)]) for row in rows)

    kept: list[int] = []
    for _ in range(k):
        left = [j for j in range(len(rows)) if j not in kept]
        score = {j: weights[j] * (covered([*kept, j]) - covered(kept)) for j in left}
        kept.append(max(left, key=lambda j: (score[j], -j)))
    return kept


@given(st.lists(st.integers(0, 7), min_size=2, max_size=12), st.data())
def test_scope_is_its_definition_ties_included(kinds: list[int], data: st.DataObject) -> None:
    rows = [np.array([4 * (kind >> b & 1) - 2 for b in range(3)] + [2]) for kind in kinds]
    scores = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    k = data.draw(st.integers(1, len(rows)))
    features = torch.tensor(np.array(rows)).float()
    attention = TowerAttention(torch.tensor(scores).float(), features)
    for alpha in (0, 1, 2):
        found = SCOPE(budget=k, alpha=alpha).select(features, features, None, attention=attention)
        weights = [score**alpha for score in scores]
        # A budget of all tokens keeps them without a choice.
        expected = slow_scope(rows, weights, k) if k < len(rows) else list(range(k))
        assert found.order.tolist() == expected


def slow_holov(rows: Any, scores: Any, k: int, runs: int) -> set[int]:
    """Shares of raster runs by their mean score; inside a run the tokens with most attention."""
    n, parts, first = len(rows), [], 0
    for number in range(min(runs, n)):
        length = n // runs + (number < n % runs)
        parts.append(list(range(first, first + length)))
        first += length
    unit = [row / (np.linalg.norm(row) + 1e-6) for row in rows]
    weights = []
    for part in parts:
        attention, variance = [1000 * scores[i] for i in part], []
        for i in part:
            others = [float(unit[i] @ unit[j]) if j != i else 0.0 for j in part]
            mean = sum(others) / max(1, len(part) - 1)
            variance.append(sum((value - mean) ** 2 for value in others) / max(1, len(part) - 1))
        scale = np.mean(np.abs(attention)) / (np.mean(np.abs(variance)) + 1e-6)
        weights.append(np.mean([a + 0.09 * v * scale for a, v in zip(attention, variance, strict=True)]))
    shares = [math.floor(k * weight / sum(weights)) for weight in weights]
    for number in sorted(range(len(parts)), key=lambda r: -weights[r])[: k - sum(shares)]:
        shares[number] += 1
    kept: set[int] = set()
    for part, share in zip(parts, shares, strict=True):
        kept |= set(sorted(part, key=lambda i: (-scores[i], i))[:share])
    for i in sorted(range(n), key=lambda i: (-scores[i], i)):
        if len(kept) < k:
            kept.add(i)
    return kept


@pytest.mark.parametrize(("n", "k", "runs"), [(30, 7, 4), (33, 20, 16), (9, 4, 16), (64, 60, 16), (10, 3, 1)])
def test_holov_is_its_definition(n: int, k: int, runs: int) -> None:
    for seed in range(5):
        draw = np.random.RandomState(seed)
        # Few levels of attention, so that tokens tie.
        rows, scores = draw.standard_normal((n, 12)), draw.randint(1, 5, size=n) / 64
        attention = TowerAttention(torch.from_numpy(scores).float(), torch.zeros(n, 4))
        features = torch.from_numpy(rows)
        found = HoloV(budget=k, runs=runs).select(features, features, None, attention=attention)
        assert set(found.indices.tolist()) == slow_holov(rows, scores, k, runs)


@pytest.mark.parametrize("method", [VisPruner(), VisPruner(important_ratio=1), SCOPE(), HoloV()])
def test_tokens_that_may_not_be_kept_are_not(method: Any) -> None:
    case = Case(3, 5, 20, 0, 6)
    found = method.reduce(attended(case, padding=4), None, 30).anchors
    assert len(found) == 30
    assert set(found[:, 1].tolist()) <= set(range(4, 16))


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="important_ratio=2 must lie in"):
        VisPruner(important_ratio=2)
    with pytest.raises(ValueError, match="signal='most' is not known"):
        VisPruner(signal="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha=-1 must be finite"):
        SCOPE(alpha=-1)
    with pytest.raises(ValueError, match="runs=0 is not a number of runs"):
        HoloV(runs=0)
