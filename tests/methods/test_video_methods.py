"""Methods for videos against their public code and against slow versions of their definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stacktok.methods import EVS, VidCom2
from tests.methods.seeded import Case, fixture, video
from tests.methods.test_authors import image_of
from tests.models.test_pruned_models import greedy
from tests.tiny import build, video_inputs


@pytest.mark.parametrize(("case", "entry"), fixture("evs"))
def test_evs_keeps_what_the_public_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    rows = video(case).flatten(0, 1)
    k = max(case.n, int(len(rows) * (1 - entry["q"])))
    assert EVS(budget=k).select(rows, rows, None, frames=case.crops).indices.tolist() == entry["kept"]


@pytest.mark.parametrize(("case", "entry"), fixture("vidcom2"))
def test_vidcom2_keeps_what_the_public_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    share = 1 - entry["q"]
    n = case.crops * case.n
    found = VidCom2().order(video(case), np.ones(n, dtype=np.bool_), max(case.crops, int(n * share)), share)
    assert sorted(found.tolist()) == entry["kept"]


def slow_evs(frames: Any, k: int) -> list[int]:
    """Every token against the one before it, the first frame before all others."""
    t, p, _ = frames.shape
    differences = {}
    for f in range(t):
        for i in range(p):
            a, b = frames[f, i], frames[f - 1, i]
            product = math.sqrt(float(a @ a) * float(b @ b))
            differences[f * p + i] = 255.0 if f == 0 else 1 - float(a @ b) / product
    return sorted(sorted(differences, key=lambda token: (-differences[token], token))[:k])


def slow_vidcom2(frames: Any, k: int) -> list[int]:
    """Shares of frames, the least similar tokens of each, then the exact count."""
    t, p, width = frames.shape
    variance = frames.reshape(t * p, width).var(0)
    quiet = sorted(range(width), key=lambda c: (variance[c], c))[: max(1, width // 2)]
    rows = frames[..., quiet]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)

    def g(x: Any, centre: Any) -> float:
        return sum(math.exp(-float(((x - centre) ** 2).sum()) / (2 * a)) for a in (1 / 8, 1 / 4, 1 / 2, 1, 2))

    whole = rows.reshape(t * p, -1).mean(0)
    to_video = np.array([[g(rows[f, i], whole) for i in range(p)] for f in range(t)])
    to_frame = np.array([[g(rows[f, i], rows[f].mean(0)) for i in range(p)] for f in range(t)])
    u = -to_video.mean(1)
    powers = np.exp((u - u.max()) / 0.01)
    weights = powers / powers.sum()
    similar = (to_video + to_frame).reshape(-1)
    chosen: set[int] = set()
    for f in range(t):
        rate = min(1.0, k / (t * p) * (1 + weights[f] - weights.mean()))
        share = min(p, max(1, round(rate * p)))
        chosen |= set(sorted(range(f * p, f * p + p), key=lambda i: (similar[i], i))[:share])
    ranked = sorted(range(t * p), key=lambda i: (similar[i], i))
    while len(chosen) > k:
        chosen.remove(next(i for i in reversed(ranked) if i in chosen))
    while len(chosen) < k:
        chosen.add(next(i for i in ranked if i not in chosen))
    return sorted(chosen)


@pytest.mark.parametrize(("t", "p"), [(1, 6), (3, 9), (6, 4)])
def test_they_are_their_definitions_ties_included(t: int, p: int) -> None:
    for seed in range(4):
        draw = np.random.RandomState(seed)
        frames = draw.randint(-2, 3, size=(t, p, 10)).astype(np.float64) + 0.5
        # Tokens that stand still, and tokens that are copies of others in their frame.
        frames[1:, 0] = frames[0, 0]
        frames[:, 1] = frames[:, 2]
        rows = torch.from_numpy(frames.reshape(t * p, 10))
        uneven = draw.standard_normal((t, p, 10))
        uneven[:, 1] = uneven[:, 2]
        others = torch.from_numpy(uneven.reshape(t * p, 10))
        for k in {1, t * p // 3, t * p - 1}:
            assert EVS(budget=k).select(rows, rows, None, frames=t).indices.tolist() == slow_evs(frames, k)
            found = VidCom2(budget=k).select(others, others, None, frames=t)
            assert found.indices.tolist() == slow_vidcom2(uneven, k)


@pytest.mark.parametrize("method", [EVS(budget=9), VidCom2(budget=9)])
def test_a_video_of_a_model_is_pruned_over_all_its_frames(method: Any) -> None:
    tiny = build("qwen2_5_vl")
    inputs = video_inputs(tiny, "Is there a dog?", [(3, 6, 4)])
    with method(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, inputs, 2)
    result = pruned.last[0]
    assert (result.modality, result.after) == ("video", 9)
    rows = np.stack([crop.projected.double().numpy() for crop in result.image.crops])
    slow = slow_evs if isinstance(method, EVS) else slow_vidcom2
    found = result.reduction.anchors
    assert (found[:, 0] * rows.shape[1] + found[:, 1]).tolist() == slow(rows, 9)


def test_images_and_uneven_frames_are_refused() -> None:
    case = Case(0, 3, 12, 0, 4)
    rows = case.projected().flatten(0, 1)
    for method in (EVS(), VidCom2()):
        with pytest.raises(ValueError, match="compares the frames of a video, and this is one image"):
            method.reduce(image_of(case), None, 4)
        with pytest.raises(ValueError, match="frames=5 does not divide the 36 tokens"):
            replace(method, budget=4).select(rows, rows, None, frames=5)
