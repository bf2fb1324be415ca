"""Every method before the language model against a slow version of its published definition."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stacktok.core.tokens import EncodedCrop, EncodedImage, ImageLayout, TowerAttention, single_crop
from stacktok.methods import (
    ABLATIONS,
    AveragePool,
    CDPruner,
    DARTEmbeddings,
    DivPrune,
    FeatureMethod,
    MergedTokens,
    MergeMethod,
    MMTok,
    PickMethod,
    RandomTokens,
    ScoreMethod,
    StackTok,
    UniformGrid,
    VisionZip,
    ablation,
    at_depth,
    available,
    paper_budgets,
)
from stacktok.methods.cells import cells
from stacktok.methods.divprune import cosine_distances, cosines
from tests.models.by_hand import crops_of, query_rows
from tests.tiny import MROPE, build, picture

FAMILIES = ("llava", "llava_next", "qwen2_5_vl")
FEATURES = [method for method in available().values() if issubclass(method, FeatureMethod)]


def features(family: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Vision, projected and query features of one crop of a tiny model."""
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    crop = crops_of(tiny, inputs)[0][0][0]
    query = query_rows(tiny, "there dog on the blue field")
    assert query is not None
    return crop.vision, crop.projected, query


def unit(rows: Any) -> list[np.ndarray]:
    """Rows divided by their norms, one by one, so that equal rows stay equal to the bit."""
    rows = np.asarray(rows, dtype=np.float64)
    return [row / max(np.sqrt((row * row).sum()), 1e-8) for row in rows]


def slow_mmtok(
    vision: Any, projected: Any, query: Any, k: int, tau_query: float, tau_vision: float, alpha: float
) -> list[int]:
    """Stack [P ; alpha Q], start coverage at 0, and look at every gain again in every step."""
    x, z, q = unit(vision), unit(projected), unit(query)

    def rows(of: list[np.ndarray], against: list[np.ndarray], tau: float, weight: float) -> list[np.ndarray]:
        made = []
        for row in of:
            logits = np.array([(row * other).sum() for other in against]) / tau
            powers = np.exp(logits - logits.max())
            made.append(weight * powers / powers.sum() / len(of))
        return made

    matrix = np.array(rows(q, z, tau_query, 1.0) + rows(x, x, tau_vision, alpha))
    best, chosen = np.zeros(len(matrix)), []
    for _ in range(k):
        gains = np.array([np.maximum(matrix[:, j] - best, 0).sum() for j in range(matrix.shape[1])])
        gains[chosen] = -np.inf
        chosen.append(int(gains.argmax()))
        best = np.maximum(best, matrix[:, chosen[-1]])
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 5, 11])
def test_mmtok_is_greedy_coverage_of_the_stacked_matrix(family: str, k: int) -> None:
    vision, projected, query = features(family)
    for settings in ({}, {"alpha": 2.0, "tau_query": 0.1, "tau_vision": 0.05}):
        parameters = {"tau_query": 0.02, "tau_vision": 0.2, "alpha": 0.5, **settings}
        expected = slow_mmtok(vision, projected, query, k, **parameters)
        found = MMTok(budget=k, **settings).select(vision, projected, query)
        assert found.order.tolist() == expected
        assert found.indices.tolist() == sorted(expected)


def slow_divprune(projected: Any, k: int) -> list[int]:
    """Max-min by looking at all distances again in every step."""
    z = unit(projected)
    distance = np.array([[1 - (a * b).sum() for b in z] for a in z])
    distance[distance < 1e-12] = 0
    n = len(z)
    second = [sorted(distance[j, i] for j in range(n) if j != i)[0] for i in range(n)]
    chosen = [int(np.argmax(second))]
    while len(chosen) < k:
        nearest = np.array([min(distance[j, i] for j in chosen) for i in range(n)])
        nearest[chosen] = -np.inf
        chosen.append(int(nearest.argmax()))
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 2, 7, 13])
def test_divprune_is_max_min_diversity(family: str, k: int) -> None:
    vision, projected, query = features(family)
    found = DivPrune(budget=k).select(vision, projected, query)
    assert found.order.tolist() == slow_divprune(projected, k)


@given(st.lists(st.integers(0, 7), min_size=2, max_size=24), st.data())
def test_ties_go_to_the_lowest_index(corners: list[int], data: st.DataObject) -> None:
    # Corners of a cube: their cosines are few and exact, so that nearly every step is a tie.
    rows = torch.tensor([[4.0 * (c >> b & 1) - 2 for b in range(3)] + [2.0] for c in corners])
    k = data.draw(st.integers(1, len(corners)))
    assert DivPrune(budget=k).select(rows, rows, None).indices.tolist() == sorted(slow_divprune(rows, k))
    expected = slow_mmtok(rows, rows, rows[:2], k, 0.02, 0.2, 0.5)
    assert MMTok(budget=k).select(rows, rows, rows[:2]).indices.tolist() == sorted(expected)


@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(2, 60))
@example(seed=86, different=6, n=4)
def test_copies_of_tokens_tie_for_divprune_whatever_their_values(seed: int, different: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(different, 37, generator=generator)[torch.randint(different, (n,), generator=generator)]
    for k in {1, min(3, n), n // 2 + 1, n}:
        assert DivPrune(budget=k).select(rows, rows, None).indices.tolist() == sorted(slow_divprune(rows, k))


@given(st.integers(0, 10_000), st.integers(2, 60))
def test_distances_of_divprune_are_the_same_both_ways_and_for_copies(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(n, (n,), generator=generator)
    distances = cosine_distances(torch.randn(n, 37, generator=generator)[kinds]).numpy()
    assert np.array_equal(distances, distances.T)
    first = np.array([kinds.tolist().index(kind) for kind in kinds.tolist()])
    assert np.array_equal(distances, distances[first][:, first])


def test_cosines_of_a_large_image_are_those_of_its_pairs() -> None:
    """Larger than the blocks in which they are computed."""
    rows = torch.randn(1100, 9, generator=torch.Generator().manual_seed(0))
    rows[1000] = rows[3]
    found, z = cosines(rows, "rows"), torch.from_numpy(np.array(unit(rows)))
    torch.testing.assert_close(found.double(), z @ z.T, rtol=0, atol=1e-6)
    assert torch.equal(found, found.T)
    assert torch.equal(found[1000], found[3])


def slow_dart(projected: Any, query: Any, k: int) -> list[int]:
    """Four pivots of the image and four of the question; each takes its share of the least similar."""
    tokens, words = np.asarray(projected, dtype=np.float64), np.asarray(query, dtype=np.float64)

    def largest(rows: np.ndarray, count: int) -> list[int]:
        return sorted(range(len(rows)), key=lambda i: (-np.abs(rows[i]).sum(), i))[:count]

    kept = largest(tokens, min(4, k))
    pivots = [tokens[i] for i in kept] + [words[i] for i in largest(words, 4)]
    for turn, pivot in enumerate(pivots):
        near = [(unit([pivot])[0] * token).sum() for token in unit(tokens)]
        left = sorted((i for i in range(len(tokens)) if i not in kept), key=lambda i: (near[i], i))
        kept += left[: -(-(k - len(kept)) // (len(pivots) - turn))]
    return kept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [2, 7, 13])
def test_dart_on_embeddings_grows_from_pivots_of_image_and_question(family: str, k: int) -> None:
    vision, projected, query = features(family)
    found = DARTEmbeddings(budget=k).select(vision, projected, query)
    assert found.order.tolist() == slow_dart(projected, query, k)
    # Equal tokens: the lowest index first. Without a question the image's pivots share the turns.
    alike = torch.ones(9, 4)
    assert DARTEmbeddings(budget=6).select(alike, alike, alike[:2]).order.tolist() == [0, 1, 2, 3, 4, 5]
    plain = DARTEmbeddings(budget=k).select(vision, projected, None)
    assert plain.order.tolist() == slow_dart(projected, projected[:0], k)


def slow_cdpruner(crops: list[Any], query: Any, k: int, theta: float | None) -> list[list[int]]:
    """Per crop the token that makes the determinant largest, step by step; relevance scaled over all crops."""
    z, q = [np.array(unit(crop)) for crop in crops], np.array(unit(query))
    relevance = [(q @ tokens.T).mean(0) for tokens in z]
    low, high = min(r.min() for r in relevance), max(r.max() for r in relevance)
    chosen: list[list[int]] = []
    for tokens, raw in zip(z, relevance, strict=True):
        r = (raw - low + 1e-6) / (high - low)
        if theta is not None:
            r = np.exp(theta / (2 * (1 - theta)) * r)
        similarity = tokens @ tokens.T
        np.fill_diagonal(similarity, 1)
        kernel = np.diag(r) @ similarity @ np.diag(r)
        picks: list[int] = []
        for _ in range(k):
            left = [j for j in range(len(tokens)) if j not in picks]
            volume = {j: np.linalg.slogdet(kernel[np.ix_([*picks, j], [*picks, j])])[1] for j in left}
            picks.append(max(left, key=lambda j: (volume[j], -j)))
        chosen.append(picks)
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("theta", [None, 0, 0.5, 0.9])
def test_cdpruner_takes_the_largest_determinant_at_every_step(family: str, theta: float | None) -> None:
    vision, projected, query = features(family)
    method = CDPruner(budget=7, theta=theta)
    found = method.select(vision, projected, query)
    assert [found.order.tolist()] == slow_cdpruner([projected], query, 7, theta)
    assert method.select(vision, projected, query, found.order[1:]).k == 6


def test_cdpruner_scales_relevance_over_all_crops_and_keeps_an_equal_share_of_each() -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(112, 112)]])
    crops = [crop.projected for crop in crops_of(tiny, inputs)[0][0]]
    _, pruned = given_to_language_model(tiny, inputs, CDPruner(budget=20))
    anchors = pruned.last[0].reduction.anchors
    expected = slow_cdpruner(crops, query_rows(tiny, "there dog"), 4, None)
    assert [sorted(anchors[anchors[:, 0] == c, 1].tolist()) for c in range(5)] == [sorted(c) for c in expected]


def test_ties_and_the_end_of_the_span_go_to_the_lowest_index_for_cdpruner() -> None:
    few = torch.eye(3)[[0, 0, 1, 1, 2, 2]]
    assert CDPruner(budget=5).select(few, few, None).order.tolist() == [0, 2, 4, 1, 3]
    # Copies of random directions, whose products float32 rounds: a copy of a kept token adds nothing.
    generator = torch.Generator().manual_seed(7)
    kinds = [3, 0, 3, 1, 0, 2, 2, 1, 3]
    copied = torch.randn(4, 50, generator=generator)[kinds]
    order = CDPruner(budget=7).select(copied, copied, None).order.tolist()
    assert {kinds[i] for i in order[:4]} == {0, 1, 2, 3}
    assert order[4:] == [i for i in range(9) if i not in order[:4]][:3]
    # Relevance near 0 is still relevance: a token that nothing spans comes before all that are spanned.
    rows = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    query = torch.tensor([[1.0, 0.5, 0]])
    assert CDPruner(budget=3).select(rows, rows, query).order.tolist() == [0, 2, 3]
    for theta in (-0.1, 1, True):
        with pytest.raises(ValueError, match=f"theta={theta}"):
            CDPruner(theta=theta)


def test_tokens_that_may_not_be_kept_do_not_exist_for_divprune_but_are_covered_by_mmtok() -> None:
    vision, projected, query = features("llava")
    eligible = np.arange(len(vision)) % 3 != 0
    own = np.flatnonzero(eligible)
    found = DivPrune(budget=9).select(vision, projected, query, eligible)
    assert found.order.tolist() == own[slow_divprune(projected[own], 9)].tolist()
    picks = MMTok(budget=9).select(vision, projected, query, eligible)
    assert set(picks.indices) <= set(own)
    assert picks.n == len(vision)
    assert set(MMTok(budget=9).select(vision[own], projected[own], query).indices) != set(picks.indices)


def test_mmtok_without_a_query_covers_the_image() -> None:
    vision, projected, _ = features("llava")
    found = MMTok(budget=6).select(vision, projected, None)
    assert found.indices.tolist() == ablation("Coverage only", 6).select(vision, projected, None).indices.tolist()


def slow_visionzip(
    scores: Any, keys: Any, hidden: Any, k: int, *, cls: bool, share: float = 10 / 64
) -> tuple[list[int], list[int], list[np.ndarray], list[set[int]]]:
    """Dominant tokens, contextual targets, contextual hidden states, and what each was made of."""
    scores, keys, hidden = (np.asarray(value, dtype=np.float64) for value in (scores, keys, hidden))
    count = int(k * share + 0.5)
    count = count if cls else max(1, count)
    dominant = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: k - count - cls])
    rest = [i for i in range(len(scores)) if i not in dominant]
    step = max(1, len(rest) // count)
    targets = [rest[c * step] for c in range(count)]
    groups: list[list[int]] = [[] for _ in targets]
    z = unit(keys)
    for i in rest:
        if i not in targets:
            groups[int(np.argmax([(z[i] * z[t]).sum() for t in targets]))].append(i)
    states = [hidden[t] + (hidden[g].mean(0) if g else 0) for t, g in zip(targets, groups, strict=True)]
    return dominant, targets, states, [{t, *g} for t, g in zip(targets, groups, strict=True)]


def eager_tower(tiny: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (V, n + 1, d), attention (V, H, n + 1, n + 1) and keys (V, n + 1, d_k) of the feature layer."""
    tower = tiny.model.model.vision_tower
    seen: list[torch.Tensor] = []
    layer = tower.encoder.layers[-2].self_attn
    handle = layer.k_proj.register_forward_hook(lambda m, a, out: seen.append(out))
    tower.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = tower(pixels, output_hidden_states=True, output_attentions=True)
    finally:
        tower.set_attn_implementation("sdpa")
        handle.remove()
    keys = seen[0].unflatten(-1, (layer.num_heads, -1)).mean(2)
    return out.hidden_states[-2], out.attentions[-2], keys


def given_to_language_model(tiny: Any, inputs: Any, method: Any) -> tuple[Any, Any]:
    seen: dict[str, Any] = {}
    with method(tiny.model, tiny.processor) as pruned:
        hook = tiny.model.model.language_model.register_forward_pre_hook(
            lambda m, a, k: seen.update(k), with_kwargs=True
        )
        with torch.no_grad():
            tiny.model(**inputs)
        hook.remove()
    return seen["inputs_embeds"], pruned


@pytest.mark.parametrize("signal", ["cls", "received"])
@pytest.mark.parametrize("k", [1, 6, 13])
def test_visionzip_on_llava_is_cls_dominant_and_contextual(signal: Any, k: int) -> None:
    tiny = build("llava")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    hidden, attention, keys = eager_tower(tiny, inputs["pixel_values"])
    scores = attention[0, :, 0].sum(0)[1:] if signal == "cls" else attention[0].mean(0)[1:].sum(0)[1:]
    share = 0.3
    count = int(k * share + 0.5)
    embeds, pruned = given_to_language_model(tiny, inputs, VisionZip(budget=k, signal=signal, contextual_share=share))
    at = int((inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[0])
    got = embeds[0, at : at + k]
    project = tiny.model.model.multi_modal_projector
    if count:
        dominant, targets, states, groups = slow_visionzip(scores, keys[0, 1:], hidden[0, 1:], k, cls=True, share=share)
    else:
        dominant, targets, states, groups = [], [], [], []
    rows = torch.cat([hidden[0, :1], hidden[0, 1:][dominant], torch.tensor(np.array(states)).float().view(-1, 32)])
    with torch.no_grad():
        torch.testing.assert_close(got, project(rows), rtol=1e-4, atol=1e-5)
    reduction = pruned.last[0].reduction
    assert pruned.last[0].after == k
    assert [pair[1] for pair in reduction.anchors.tolist()] == [0, *dominant, *targets]
    sources = [{int(token) for _, token in source} for source in reduction.sources]
    assert sources == [set(), *({d} for d in dominant), *groups]


def test_visionzip_on_llava_next_takes_every_crop_by_itself_and_puts_the_tiles_together() -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(112, 112)]])
    views = inputs["pixel_values"][0]
    hidden, attention, keys = eager_tower(tiny, views)
    k, share = 8, 0.25
    embeds, pruned = given_to_language_model(
        tiny, inputs, VisionZip(budget=k, allocation="per_crop", contextual_share=share)
    )
    assert pruned.last[0].after == k * len(views) == 40
    at = int((inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[0])
    parts = [
        slow_visionzip(attention[v, :, 0].sum(0)[1:], keys[v, 1:], hidden[v, 1:], k, cls=True, share=share)
        for v in range(len(views))
    ]
    side = 4

    def canvas(view: int, token: int) -> tuple[int, int]:
        tile = view - 1
        return (tile // 2 * side + token // side, tile % 2 * side + token % side)

    base = [hidden[0, 0], *hidden[0, 1:][parts[0][0]], *torch.tensor(np.array(parts[0][2])).float()]
    tiles = sorted(((v, d) for v in range(1, 5) for d in parts[v][0]), key=lambda pair: canvas(*pair))
    rows = [*base, *(hidden[v, 1 + d] for v, d in tiles), *(hidden[v, 0] for v in range(1, 5))]
    rows += [state for v in range(1, 5) for state in torch.tensor(np.array(parts[v][2])).float()]
    with torch.no_grad():
        expected = tiny.model.model.multi_modal_projector(torch.stack(rows))
    torch.testing.assert_close(embeds[0, at : at + 40], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MROPE)
def test_visionzip_on_merged_patches_ranks_by_received_attention_and_merges_embeddings(family: str) -> None:
    """Merging happens on what the language model would get."""
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    visual = tiny.model.model.visual
    # Block 1 is the one of Qwen2.5-VL that attends over the whole image.
    block = visual.blocks[1 if family == "qwen2_5_vl" else -1].attn
    rotate = sys.modules[type(block).__module__].apply_rotary_pos_emb_vision
    seen: dict[str, Any] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda m, a, k: seen.update(k, x=a[0] if a else k["hidden_states"]), with_kwargs=True
        ),
        visual.merger.register_forward_hook(lambda m, a, out: seen.update(merged=out)),
    ]
    with torch.no_grad():
        rows = tiny.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output[0]
        q, key, _ = block.qkv(seen["x"]).reshape(len(seen["x"]), 3, block.num_heads, -1).permute(1, 0, 2, 3)
        if hasattr(block, "q_norm"):
            q, key = block.q_norm(q), block.k_norm(key)
        q, key = rotate(q, key, *seen["position_embeddings"])
    for handle in handles:
        handle.remove()
    attention = (torch.einsum("ihd,jhd->hij", q, key) * block.scaling).softmax(-1)
    raster = [int((seen["merged"] == row).all(1).nonzero()[0]) for row in rows]
    scores = attention.mean(0).sum(0).view(-1, 4).mean(1)[raster]
    keys = key.view(len(scores), 4, block.num_heads, -1).mean(1).mean(1)[raster]
    k = 7
    dominant, targets, states, groups = slow_visionzip(scores, keys, rows, k, cls=False)
    embeds, pruned = given_to_language_model(tiny, inputs, VisionZip(budget=k))
    at = int((inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[0])
    made = dict(zip(targets, states, strict=True))
    expected = torch.stack(
        [torch.as_tensor(made[i]).float() if i in made else rows[i] for i in sorted([*dominant, *targets])]
    )
    torch.testing.assert_close(embeds[0, at : at + k], expected, rtol=1e-4, atol=1e-5)
    reduction = pruned.last[0].reduction
    merged = [{int(t) for _, t in reduction.merged[i]} for i in sorted(reduction.merged)]
    assert merged == groups


def test_visionzip_selects_on_given_attention_without_a_model() -> None:
    generator = torch.Generator().manual_seed(3)
    vision, projected = torch.randn(40, 8, generator=generator), torch.randn(40, 12, generator=generator)
    attention = TowerAttention(torch.rand(40, generator=generator), torch.randn(40, 4, generator=generator))
    eligible = np.arange(40) >= 4
    found = VisionZip(budget=13).select(vision, projected, None, eligible, attention=attention)
    dominant, targets, states, groups = slow_visionzip(
        attention.scores[4:], attention.keys[4:], projected[4:], 13, cls=False
    )
    assert found.indices.tolist() == sorted(4 + i for i in [*dominant, *targets])
    for target, state, group in zip(targets, states, groups, strict=True):
        torch.testing.assert_close(found.embeddings[4 + target].double(), torch.as_tensor(state), rtol=1e-5, atol=1e-6)
        assert {i - 4 for i in found.sources[4 + target].tolist()} == group
    gathered = found.gather(projected)
    assert torch.equal(gathered[found.indices.tolist().index(4 + dominant[0])], projected[4 + dominant[0]])
    # The published splits: CLS is one of the dominant tokens.
    for budget, contextual in ((192, 30), (128, 20), (64, 10), (32, 5)):
        rows = torch.randn(576, 4, generator=generator)
        picked = VisionZip(budget=budget).select(rows, rows, None)
        assert (len(picked.indices), len(picked.sources)) == (budget, contextual)


@pytest.mark.parametrize("method", FEATURES)
@pytest.mark.parametrize("budget", [1, 7, "20%", 0.5, 36, 99])
def test_select_needs_no_model_and_returns_sorted_distinct_eligible_indices(method: Any, budget: Any) -> None:
    vision, projected, query = features("llava")
    eligible = np.arange(36) % 5 != 0
    for allowed in (None, eligible, np.flatnonzero(eligible)):
        found = method(budget=budget).select(vision, projected, query, allowed)
        capacity = 36 if allowed is None else int(eligible.sum())
        asked = budget if isinstance(budget, int) else {"20%": 7, 0.5: 18}[budget]
        assert len(found.indices) == min(asked, capacity)
        assert (np.diff(found.indices) > 0).all()
        assert allowed is None or eligible[found.indices].all()
        assert found.gather(projected).shape == (len(found.indices), projected.shape[1])
        arrays = [value.numpy() for value in (vision, projected, query)]
        assert method(budget=budget).select(*arrays, allowed).indices.tolist() == found.indices.tolist()


@pytest.mark.parametrize("method", FEATURES)
def test_select_refuses_what_it_cannot_use(method: Any) -> None:
    vision, projected, query = features("llava")
    with pytest.raises(ValueError, match="budget"):
        method().select(vision, projected, query)
    with pytest.raises(ValueError, match="rows"):
        method(budget=3).select(vision[1:], projected, query)
    with pytest.raises(ValueError, match="columns"):
        method(budget=3).select(vision, projected, query[:, 1:])
    with pytest.raises(ValueError, match="eligible"):
        method(budget=3).select(vision, projected, query, [0, 36])
    with pytest.raises(ValueError, match=r"-1.*negative"):
        method(budget=-1)


def test_random_tokens_follow_their_seed() -> None:
    vision, projected, query = features("llava")
    draws = [RandomTokens(budget=6, seed=seed).select(vision, projected, query).indices.tolist() for seed in range(200)]
    assert draws[3] == RandomTokens(budget=6, seed=3).select(projected, vision, None).indices.tolist()
    counts = np.bincount(np.concatenate(draws), minlength=36)
    # 200 draws of 6 out of 36: 33 expected, with a standard deviation of 5.3.
    assert counts.min() > 10
    assert counts.max() < 60
    with pytest.raises(ValueError, match="seed=-1"):
        RandomTokens(budget=6, seed=-1)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_cells_are_an_even_partition(rows: int, columns: int, data: st.DataObject) -> None:
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    eligible = np.zeros((rows, columns), dtype=np.bool_)
    eligible[top:, left:] = True
    k = data.draw(st.integers(1, int(eligible.sum())))
    found = cells((rows, columns), eligible.reshape(-1), k)
    assert len(found) == k
    assert all(len(cell) for cell in found)
    assert sorted(np.concatenate(found).tolist()) == np.flatnonzero(eligible).tolist()
    for cell in found:
        r, c = np.divmod(cell, columns)
        assert len(cell) == (np.ptp(r) + 1) * (np.ptp(c) + 1)
    sizes = [len(cell) for cell in found]
    # Bands and columns are each cut evenly: a cell is at most twice as high and twice as wide as another.
    assert max(sizes) <= 4 * min(sizes)


def test_average_pooling_is_the_mean_of_square_windows() -> None:
    vision, projected, query = features("llava")
    pooled = AveragePool(budget=9).select(vision, projected, query)
    image = projected.T.reshape(1, -1, 6, 6)
    expected = torch.nn.functional.avg_pool2d(image, 2)[0].flatten(1).T
    torch.testing.assert_close(pooled.gather(projected), expected, rtol=1e-5, atol=1e-6)
    assert pooled.sources[0].tolist() == [0, 1, 6, 7]
    wide = AveragePool(budget=6).select(vision, projected, query, grid=(4, 9))
    assert wide.sources[1].tolist() == [0, 1, 2, 9, 10, 11]
    grid = UniformGrid(budget=4).select(vision, projected, query)
    assert grid.indices.tolist() == [7, 10, 25, 28]
    with pytest.raises(ValueError, match=r"grid=\(5, 5\)"):
        UniformGrid(budget=4).select(vision, projected, query, grid=(5, 5))


def test_ablations_of_the_paper_are_named_and_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(9, 16, generator=generator)
    vision = centres[torch.arange(120) % 9] + 0.3 * torch.randn(120, 16, generator=generator)
    query = torch.randn(4, 16, generator=generator)
    rows = {}
    for name in ABLATIONS:
        method = ablation(name, 12)
        assert method.budget == 12
        rows[name] = tuple(method.select(vision, vision, query, tau_query=0.1).order.tolist())
    full = rows["StackTok (full)"]
    for name in ("Final-budget target", "Relevance only", "Coverage only", "Fixed scalarization, alpha 4"):
        assert rows[name] != full, name
    assert rows["Relevance only"] != rows["Relevance only, coverage fill"]
    assert rows["Shared-budget allocation"] == rows["Strictness range [0.3, 0.9]"] == full
    assert ablation("Fixed-strictness control").strictness == 0.5
    assert ablation("Without refinement", 8).swap_limit == 0
    assert ablation("Initial-h-proportional quotas").allocation == "proportional"
    with pytest.raises(ValueError, match="no ablation is called 'x'"):
        ablation("x")


def test_depth_is_a_row_of_its_own() -> None:
    vision, projected, query = features("llava")
    name, method = at_depth(4, 9)
    assert name == "StackTok, depth 4"
    paper = StackTok(budget=9).select(vision, projected, query, tau_query=0.2)
    assert method.select(vision, projected, query, tau_query=0.2).order.tolist() != paper.order.tolist()
    assert at_depth(None)[0] == "StackTok, depth infinity"
    assert at_depth("auto")[1].relevance_depth == "auto"
    with pytest.raises(ValueError, match="depth=1"):
        at_depth(1)


def test_budgets_of_the_paper() -> None:
    assert paper_budgets("llava") == (192, 128, 64)
    assert paper_budgets("llava_next") == (640, 320, 160)
    assert paper_budgets("qwen2_5_vl") == ("20%", "10%", "5%")
    with pytest.raises(ValueError, match="gemma"):
        paper_budgets("gemma")


@pytest.mark.parametrize("method", FEATURES)
@pytest.mark.parametrize("crops", [1, 3])
def test_a_prepared_image_answers_every_question_as_if_it_were_the_first(method: Any, crops: int) -> None:
    generator = torch.Generator().manual_seed(crops)
    vision, projected = torch.randn(crops, 20, 6, generator=generator), torch.randn(crops, 20, 9, generator=generator)
    scores, keys = torch.rand(2, 20, generator=generator), torch.randn(20, 4, generator=generator)
    attention = TowerAttention(scores[0], keys, early=scores[1])
    layout = ImageLayout.raster(*[(4, 5)] * crops).with_eligible(np.arange(20 * crops) % 20 > 2)
    image = EncodedImage.of(layout, vision.flatten(0, 1), projected.flatten(0, 1)).with_attention([attention] * crops)
    image = replace(image, modality="video")
    queries = [torch.randn(2, 9, generator=generator), None, torch.randn(3, 9, generator=generator)]
    asked = [(query, budget) for budget in (7, 1, 19, 0, "50%", 99) for query in queries]
    prepared = method().prepare(image)
    assert prepared.image is image
    nbytes = prepared.nbytes
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda question: prepared.reduce(*question), asked))
    for (query, budget), reduction in zip(asked, found, strict=True):
        fresh = method().reduce(image, query, budget)
        assert reduction.anchors.tolist() == fresh.anchors.tolist()
        assert [source.tolist() for source in reduction.sources] == [source.tolist() for source in fresh.sources]
        assert reduction.embeddings.keys() == fresh.embeddings.keys()
        assert all(torch.equal(reduction.embeddings[i], fresh.embeddings[i]) for i in fresh.embeddings)
    if not method.query_aware:
        assert found[0].anchors.tolist() == found[1].anchors.tolist() == found[2].anchors.tolist()
    assert prepared.nbytes >= nbytes >= (crops * 20 * 20 * 4 if method in (StackTok, MMTok) else 0)


def test_a_ranking_that_no_question_changes_is_made_once() -> None:
    vision, projected, query = features("llava")
    calls = []

    class Norms(ScoreMethod):
        def score(self, crop: EncodedCrop, query: torch.Tensor | None) -> torch.Tensor:
            calls.append(query)
            return crop.projected.square().sum(1)

    class First(PickMethod):
        nested = True

        def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Any:
            calls.append(query)
            return np.flatnonzero(crop.eligible)[:k]

    image = single_crop(vision, projected, (6, 6))
    for method in (Norms, First):
        for kind in (method, type("Asking", (method,), {"query_aware": True})):
            calls.clear()
            prepared = kind().prepare(image)
            kept = [prepared.reduce(query, k).record.order.tolist() for k in (3, 9, 3)]
            assert kept[0] == kept[1][:3] == kept[2]
            assert len(calls) == (3 if kind.query_aware else 1)
            assert all((asked is not None) == kind.query_aware for asked in calls)


def test_scores_rank_eligible_tokens_stably() -> None:
    values = [3.0, 5.0, 5.0, float("nan"), 5.0, -1.0, 3.0, float("inf")]
    rows = torch.ones(8, 2)
    eligible = [0, 1, 2, 4, 5, 6]

    class Column(ScoreMethod):
        def score(self, crop: EncodedCrop, query: torch.Tensor | None) -> torch.Tensor:
            return torch.tensor(values)

    expected = sorted(eligible, key=lambda i: (-values[i], i))
    for k in range(1, 6):
        assert Column(budget=k).select(rows, rows, None, eligible).order.tolist() == expected[:k]
    with pytest.raises(ValueError, match=r"Column.score returned NaN; give a number for every eligible token"):
        Column(budget=2).select(rows, rows, None)


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        ([0, 1], "returned 2 tokens where 3 were asked for"),
        ([1, 4, 1], "returned token 1 more than once"),
        ([0, 1, 9], "returned token 9; give indices from 0 to 7"),
        ([-1, 1, 2], "returned token -1; give indices from 0 to 7"),
        ([0, 1, 5], "returned token 5, which may not be kept"),
        ([0.0, 1.0, 2.0], "returned shape .* type float64; give token indices"),
    ],
)
def test_wrong_picks_are_refused_by_name(picks: Any, message: str) -> None:
    class Picks(PickMethod):
        def pick(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> Any:
            return picks

    class Merges(MergeMethod):
        def merge(self, crop: EncodedCrop, query: torch.Tensor | None, k: int) -> MergedTokens:
            return MergedTokens(picks[:1], picks[1:], crop.projected[:2][: len(picks) - 1], [np.array([4])] * 2)

    rows = torch.ones(8, 2)
    with pytest.raises((ValueError, TypeError), match=f"Picks.pick {message}"):
        Picks(budget=3).select(rows, rows, None, [0, 1, 2, 3, 4])
    message = "returned 1 anchors, 1 made tokens and 2 sources" if len(picks) == 2 else message
    with pytest.raises((ValueError, TypeError), match=f"Merges.merge {message}"):
        Merges(budget=3).select(rows, rows, None, [0, 1, 2, 3, 4])
