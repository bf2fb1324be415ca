"""Methods that read two layers of the vision tower, or its heads as one: authors' selections, and slow definitions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedImage, ImageLayout, TowerAttention
from stacktok.methods import HiPrune, PruMergePlus, VScan
from stacktok.models import adapter_for
from stacktok.runtime.tower import attention_layers, tapped_tower
from tests.methods.seeded import Case, fixture, joined, scores
from tests.tiny import build, picture


def square(case: Case, attention: list[TowerAttention]) -> EncodedImage:
    """The case's crops, each a square of tokens."""
    side = round(case.n**0.5)
    layout = ImageLayout.raster(*[(side, side)] * case.crops)
    image = EncodedImage.of(layout, case.vision().flatten(0, 1), case.projected().flatten(0, 1))
    return image.with_attention(attention)


def two_layers(case: Case) -> EncodedImage:
    """Scores of stream 0 in the early layer, of stream 1 in the late one."""
    pairs = zip(scores(case, 1), scores(case, 0), strict=True)
    return square(case, [TowerAttention(late, torch.zeros(case.n, 1), early=early) for late, early in pairs])


def kept_per_crop(method: Any, image: EncodedImage, budget: int) -> list[list[int]]:
    anchors = method.reduce(image, None, budget).anchors
    return [sorted(anchors[anchors[:, 0] == c, 1].tolist()) for c in range(len(image.crops))]


@pytest.mark.parametrize(("case", "entry"), fixture("hiprune"))
def test_hiprune_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    found = kept_per_crop(HiPrune(alpha=entry["alpha"]), two_layers(case), case.k * case.crops)
    assert found == entry["kept"]


@pytest.mark.parametrize(("case", "entry"), fixture("vscan"))
def test_vscan_keeps_and_merges_what_the_authors_code_does(case: Case, entry: dict[str, Any]) -> None:
    image = two_layers(case)
    found = kept_per_crop(VScan(), image, case.k * case.crops)
    even = case.k // 2 % 16 == 0
    for ours, theirs in zip(found, entry["kept"], strict=True):
        assert len(ours) == case.k
        # Where sixteen windows cannot share half of the budget, the original keeps fewer.
        assert (ours == theirs) if even else set(theirs) < set(ours)
    if even and entry["sums"]:
        record = VScan().reduce(image, None, case.k).record
        sums = record.gather(image.crops[0].projected).sum(1)
        torch.testing.assert_close(sums, torch.tensor(entry["sums"][0]), rtol=0, atol=0.01)


@pytest.mark.parametrize(("case", "entry"), fixture("prumerge"))
def test_prumerge_keeps_and_merges_what_the_authors_code_does(case: Case, entry: dict[str, Any]) -> None:
    attention = []
    for query, key in zip(*joined(case), strict=True):
        weights = (query[:1] @ key.T / query.shape[-1] ** 0.5).softmax(-1)[0, 1:]
        attention.append(TowerAttention(weights, key[1:], project=lambda rows: rows))
    record = PruMergePlus(adaptive=True).reduce(square(case, attention), None, "99%").record
    choices = (record,) if case.crops == 1 else record
    for choice, kept in zip(choices, entry["kept"], strict=True):
        # The last is made of all that go.
        assert choice.order[:-1].tolist() == kept
        extra = int(choice.order[-1])
        assert choice.sources[extra].tolist() == sorted(set(range(case.n)) - set(kept))
    for choice, sums in zip(choices, entry["sums"], strict=False):
        found = torch.stack([choice.embeddings[token] for token in choice.order.tolist()]).sum(1)
        torch.testing.assert_close(found, torch.tensor(sums), rtol=0, atol=0.01)


def draws(seed: int, n: int) -> tuple[Any, Any, Any]:
    """Features, and few levels of attention in two layers, so that tokens tie."""
    draw = np.random.RandomState(seed)
    return draw.standard_normal((n, 8)), draw.randint(1, 6, size=n) / 64, draw.randint(1, 6, size=n) / 64


def most(values: Any, tokens: list[int], count: int) -> list[int]:
    return sorted(tokens, key=lambda i: (-values[i], i))[:count]


@pytest.mark.parametrize(("rows", "columns", "k"), [(6, 6, 12), (4, 9, 20), (5, 5, 24), (8, 3, 3)])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_hiprune_is_its_definition_ties_included(rows: int, columns: int, k: int, alpha: float) -> None:
    for seed in range(4):
        features, late, early = draws(seed, rows * columns)
        anchors = most(early, list(range(rows * columns)), round(k * alpha / 5))
        kept = set()
        for anchor in anchors:
            for neighbour in (anchor, anchor - 1, anchor + 1, anchor - columns, anchor + columns):
                kept.add(min(max(neighbour, 0), rows * columns - 1))
        kept = set(sorted(kept)[:k])
        kept |= set(most(late, [i for i in range(rows * columns) if i not in kept], k - len(kept)))
        x = torch.from_numpy(features)
        attention = TowerAttention(torch.from_numpy(late), x, early=torch.from_numpy(early))
        found = HiPrune(budget=k, alpha=alpha).select(x, x, None, grid=(rows, columns), attention=attention)
        assert set(found.indices.tolist()) == kept


@pytest.mark.parametrize(("rows", "columns", "window", "k"), [(6, 6, 3, 16), (5, 7, 3, 20), (4, 4, 4, 3), (6, 4, 2, 1)])
def test_vscan_is_its_definition_ties_included(rows: int, columns: int, window: int, k: int) -> None:
    for seed in range(4):
        features, late, early = draws(seed, rows * columns)
        windows: dict[tuple[int, int], list[int]] = {}
        for i in range(rows * columns):
            windows.setdefault((i // columns // window, i % columns // window), []).append(i)
        kept = [i for own in windows.values() for i in most(early, own, int(k / 2) // len(windows))]
        kept += most(late, [i for i in range(rows * columns) if i not in kept], k - len(kept))
        groups: dict[int, list[int]] = {i: [i] for i in kept}
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        for i in sorted(set(range(rows * columns)) - set(kept)):
            groups[max(kept, key=lambda j: unit[i] @ unit[j])].append(i)
        x = torch.from_numpy(features)
        attention = TowerAttention(torch.from_numpy(late), x, early=torch.from_numpy(early))
        found = VScan(budget=k, window=window).select(x, x, None, grid=(rows, columns), attention=attention)
        assert found.indices.tolist() == sorted(kept)
        expected = np.stack([features[groups[i]].mean(0) for i in sorted(kept)])
        torch.testing.assert_close(found.gather(x), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "k"), [(50, 13), (50, 49), (20, 1), (40, 2)])
def test_prumerge_meets_a_budget_as_stated(n: int, k: int) -> None:
    for seed in range(4):
        features, late, _ = draws(seed, n)
        kept = most(late, list(range(n)), round((k - 1) / 4))
        left = [i for i in range(n) if i not in kept]
        spaced = k - 1 - len(kept)
        kept += [left[place * len(left) // spaced] for place in range(spaced)]
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        made = []
        for i in kept:
            likes = sorted((j for j in range(n) if j != i), key=lambda j: -(unit[i] @ unit[j]))[:32]
            made.append(features[i] + sum(late[j] * features[j] for j in likes))
        made.append(sum(late[j] * features[j] for j in range(n) if j not in kept))
        x = torch.from_numpy(features)
        found = PruMergePlus(budget=k).select(x, x, None, attention=TowerAttention(torch.from_numpy(late), x))
        assert found.k == k
        assert found.order[:-1].tolist() == kept
        ours = torch.stack([found.embeddings[token] for token in found.order.tolist()])
        torch.testing.assert_close(ours.double(), torch.from_numpy(np.stack(made)), rtol=1e-5, atol=1e-5)


def test_adaptive_prumerge_keeps_at_most_the_budget_and_less_where_attention_is_sharp() -> None:
    features, late, _ = draws(0, 100)
    late[[7, 30, 61, 80, 90]] = 2.0
    x, attention = torch.from_numpy(features), TowerAttention(torch.from_numpy(late), torch.from_numpy(features))
    found = PruMergePlus(budget=99, adaptive=True).select(x, x, None, attention=attention)
    # Five outliers of 100, the grid 0, 6, 12, ... 96 less the two outliers on it, and the extra token.
    assert found.order.tolist()[:5] == [7, 30, 61, 80, 90]
    assert found.order.tolist()[5:-1] == [i for i in range(0, 99, 6) if i not in (30, 90)]
    assert PruMergePlus(budget=9, adaptive=True).select(x, x, None, attention=attention).k == 9
    flat = TowerAttention(torch.ones(100), x)
    assert PruMergePlus(budget=9, adaptive=True).select(x, x, None, attention=flat).k == 2


@pytest.mark.parametrize("method", [HiPrune(alpha=0.8), VScan(window=3), PruMergePlus(), PruMergePlus(adaptive=True)])
def test_tokens_that_may_not_be_kept_are_neither_kept_nor_merged(method: Any) -> None:
    case = Case(3, 5, 36, 0, 6)
    image = two_layers(case)
    eligible = np.tile(np.arange(36) % 6 < 4, 5)
    layout = image.layout.with_eligible(eligible)
    image = EncodedImage.of(layout, case.vision().flatten(0, 1), case.projected().flatten(0, 1)).with_attention(
        [crop.attention for crop in image.crops if crop.attention is not None]
    )
    found = method.reduce(image, None, 30)
    assert len(found) == 30 or (method.adaptive and len(found) < 30)
    for source in found.sources:
        assert eligible[source[:, 1]].all()


def test_the_layers_of_a_tower_that_a_method_names_are_read() -> None:
    tiny = build("llava")
    adapter = adapter_for(tiny.model)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(112, 112)]])
    tower, module, _ = adapter.tower_attention(tiny.model)
    layers = attention_layers(tower, module)
    assert module in layers
    seen: dict[int, torch.Tensor] = {}

    def note(number: int, own: Any, args: Any, kwargs: Any) -> None:
        seen[number] = args[0] if args else kwargs["hidden_states"]

    hooks = [
        layer.register_forward_pre_hook(functools.partial(note, number), with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    depth = len(layers)
    for signal, number in (
        (TowerSignal("received", early=1 / depth), 0),
        (TowerSignal("cls", early=1.0), depth - 1),
        (TowerSignal("cls", joined=True), depth - 1),
    ):
        with tapped_tower(adapter, tiny.model, signal) as tap, torch.no_grad():
            tiny.model.model.get_image_features(inputs["pixel_values"])
        reading: Any = tap.take()
        layer: Any = layers[number]
        heads = 1 if signal.joined else layer.num_heads
        with torch.no_grad():
            query, key = (
                project(seen[number])[0].unflatten(-1, (heads, -1)).transpose(0, 1)
                for project in (layer.q_proj, layer.k_proj)
            )
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        expected = weights[:, 0, 1:].sum(0) if signal.rows == "cls" else weights.mean(0)[1:, 1:].sum(0)
        found = reading.scores if signal.joined else reading.early.scores
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)
    for hook in hooks:
        hook.remove()


def test_wrong_parameters_and_readings_are_named() -> None:
    with pytest.raises(ValueError, match="alpha=2 is not a share"):
        HiPrune(alpha=2)
    with pytest.raises(ValueError, match="object_depth=-1 is not a share"):
        HiPrune(object_depth=-1)
    with pytest.raises(ValueError, match="window=0 is not a number of tokens"):
        VScan(window=0)
    with pytest.raises(ValueError, match="local_ratio=3 is not a share"):
        VScan(local_ratio=3)
    with pytest.raises(TypeError, match="adaptive=1 is not a bool"):
        PruMergePlus(adaptive=1)  # type: ignore[arg-type]
    x = torch.randn(9, 4)
    with pytest.raises(ValueError, match="HiPrune needs the attention of two layers"):
        HiPrune(budget=3).select(x, x, None, attention=TowerAttention(x[:, 0], x))
