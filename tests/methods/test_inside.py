"""Methods inside the language model against a layer-by-layer run of their definitions, and what a user's code sees."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stacktok.methods import DART, FastV, LayerMethod, LayerView, MergedTokens, PyramidDrop, SparseVLM
from tests.methods.given_view import GivenView
from tests.methods.layer_by_layer import corrected, run
from tests.models.by_hand import sequence, stock_arguments
from tests.models.test_pruned_models import greedy
from tests.tiny import MROPE, build, picture

DEPTH = 6
LLAMA = "llama.modeling_llama"
FAMILIES = ("llava", "llava_next", "llava_next_mistral", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
# Where a family has no attention to rank by, or still adds features: what says so.
REFUSED = {"qwen3_vl": "Qwen3-VL adds visual features", "qwen3_5": "of Qwen3.5 is recurrent"}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def one(tiny: Any) -> Any:
    return tiny.inputs(["Is there a dog on the blue field?"], [[picture(160, 100)]])


def cache_lengths(cache: Any) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")]


def can_cut(tiny: Any, method: Any) -> bool:
    """Whether the layers after which a method cuts are such that the tiny models of this depth allow it."""
    first, kinds = method.layers(DEPTH)[0], getattr(tiny.model.config.get_text_config(), "layer_types", None)
    if tiny.family == "qwen3_vl":
        return first >= 1
    return kinds is None or all(kinds[layer] != "linear_attention" for layer in method.layers(DEPTH))


CASES = {
    "fastv": (FastV(budget=9, counting="kept", full_layers=3), "kept"),
    "fastv, early": (FastV(budget=9, counting="kept", full_layers=2), "kept"),
    "fastv, compact": (FastV(budget=9, counting="kept", full_layers=2, positions="compact"), "compact"),
    "sparsevlm": (SparseVLM(budget=0.4, seed=5), "compact"),
    "sparsevlm, kept": (SparseVLM(budget=0.4, seed=5, positions="kept"), "kept"),
    "sparsevlm+": (SparseVLM(budget=0.3, variant="+"), "kept"),
    "dart": (DART(budget=14), "kept"),
    "dart, exact": (DART(budget=11, counting="kept", full_layers=4), "kept"),
    "pyramiddrop": (PyramidDrop(budget=0.5), "compact"),
    "pyramiddrop, kept": (PyramidDrop(budget=5, counting="kept", positions="kept"), "kept"),
}


# What the definitions say for six layers, worked out by hand where it does not depend on the number of tokens. DART's
# shares: 14 // 8 for each of eight pivots; of 11 tokens the image's pivots are 4, and seven of eight get one more.
SHARES = {"dart": (1,) * 8, "dart, exact": (1,) * 7 + (0,)}


def sparsevlm_cuts(n: int, share: float, plus: bool) -> dict[int, int]:
    """The published lists of 576 tokens and layers 2, 6, 15 of 32, brought to n tokens and six layers."""
    lists = {0: (0, 0, 0), 64: (66, 30, 17), 96: (238, 48, 26), 128: (303, 110, 36), 192: (300, 200, 110)}
    if plus:
        lists = {0: (0, 0, 0), 64: (66, 34, 20), 96: (246, 54, 28), 128: (238, 108, 60), 192: (300, 200, 118)}
    lists[576] = (576, 576, 576)
    asked = int(share * n) * 576 / n
    found = [np.interp(asked, list(lists), [own[stage] for own in lists.values()]) * n / 576 for stage in range(3)]
    return {layer: math.floor(count + 0.5) for layer, count in zip((0, 1, 3), found, strict=True)}


def pyramiddrop_cuts(n: int, ratio: float) -> dict[int, int]:
    """After layers 1, 3 and 4 of six: n r, n r^2 and n r^3, rounded down."""
    return {0: int(n * ratio + 1e-6), 2: int(n * ratio**2 + 1e-6), 3: int(n * ratio**3 + 1e-6)}


CUTS: dict[str, Callable[[int], dict[int, int]]] = {
    "fastv": lambda n: {2: 9},
    "fastv, early": lambda n: {1: 9},
    "fastv, compact": lambda n: {1: 9},
    "sparsevlm": lambda n: sparsevlm_cuts(n, 0.4, plus=False),
    "sparsevlm, kept": lambda n: sparsevlm_cuts(n, 0.4, plus=False),
    "sparsevlm+": lambda n: sparsevlm_cuts(n, 0.3, plus=True),
    "dart": lambda n: {1: 12},
    "dart, exact": lambda n: {3: 11},
    # The root of 1 + 2 r + r^2 + 2 r^3 = 3: one layer sees all, two n r, one n r^2, two n r^3, half of 6 n in all.
    "pyramiddrop": lambda n: pyramiddrop_cuts(n, max(r.real for r in np.roots([2, 1, 2, -2]) if abs(r.imag) < 1e-9)),
    "pyramiddrop, kept": lambda n: pyramiddrop_cuts(n, (5 / n) ** (1 / 3)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_generation_equals_the_definition_run_layer_by_layer(family: str, case: str) -> None:
    method, positions = CASES[case]
    tiny = build(family, DEPTH)
    if family in MROPE:
        if method.positions == "compact":
            with pytest.raises(ValueError, match="positions='compact' is not defined for"):
                method(tiny.model, tiny.processor)
            return
        positions = "kept"
    if not can_cut(tiny, method):
        with pytest.raises(ValueError, match=REFUSED[family]), method(tiny.model, tiny.processor):
            pass
        return
    inputs = one(tiny)
    n = int((inputs["input_ids"] == tiny.model.config.image_token_id).sum())
    cuts = CUTS[case](n)
    heads = tiny.model.config.get_text_config().num_attention_heads
    expected, lengths, left = run(
        tiny,
        inputs,
        cuts,
        method=case.split(",")[0],
        positions=positions,
        steps=4,
        seed=5,
        heads=max(1, round(14 / 32 * heads)),
        shares=SHARES.get(case, ()),
    )
    with method(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 4)
    for step in range(4):
        torch.testing.assert_close(out.logits[step][0], expected[step], **CLOSE)
    assert len(set(lengths)) == len(cuts) + 1
    # The layers hold the prompt as far as it entered them, and the three tokens generated from.
    caching = [hasattr(layer, "self_attn") for layer in tiny.model.model.language_model.layers]
    assert cache_lengths(out.past_key_values) == [n + 3 for n, caches in zip(lengths, caching, strict=True) if caches]
    text = inputs["input_ids"].shape[1] - n
    result = pruned.last[0]
    assert result.per_layer == pruned.per_layer == tuple(length - text for length in lengths)
    assert result.average == pytest.approx(sum(result.per_layer) / DEPTH)
    assert result.cache_entries == sum(cache_lengths(out.past_key_values)) - sum(caching) * (text + 3)
    assert (result.before, result.after) == (n, len(left))
    # What each output token came from, by its place among the image's rows.
    image = result.image
    places = [set(image.offsets_of(pairs).tolist()) for pairs in result.reduction.sources if len(pairs)]
    assert places == [token.made_of for token in left if image_token(image, token.made_of)]


def image_token(image: Any, places: set[int]) -> bool:
    """Whether a token is none of the layout's newlines."""
    return not places <= set(image.layout.separators.tolist())


MIXED = (
    FastV(budget=0.6, full_layers=2),
    FastV(budget=0.6, full_layers=1),
    SparseVLM(budget=0.4),
    SparseVLM(budget=0.4, variant="+"),
    DART(budget=0.4),
    PyramidDrop(budget=0.5),
)


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in FAMILIES for method in (MIXED[:1] if family in REFUSED else MIXED[1:])],
    ids=str,
)
def test_a_mixed_batch_equals_its_single_runs(family: str, method: Any) -> None:
    tiny = build(family, DEPTH)
    rows = [
        ("What is in the image?", [picture(160, 100)]),
        ("How many cats are there in these, and is there a dog?", [picture(60, 170, 1), picture(150, 150, 2)]),
        ("A question without a picture: is the answer two?", []),
        ("Describe it.", [picture(200, 60, 3)]),
    ]
    inputs = tiny.inputs([q for q, _ in rows], [i for _, i in rows])
    with method(tiny.model, tiny.processor) as pruned:
        together = greedy(tiny.model, inputs, 4)
        counts = [(result.row, result.per_layer) for result in pruned.last]
        # A plain forward counts padding among the positions, and the L1 norm of a rotated key depends on its position.
        counted = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        given = {"position_ids": counted} if isinstance(method, DART) and family not in MROPE else {}
        forward, kept = tiny.model(**inputs, **given), pruned.kept_positions
        for row, (question, images) in enumerate(rows):
            alone = tiny.inputs([question], [images])
            single = greedy(tiny.model, alone, 4)
            for a, b in zip(single.logits, together.logits, strict=True):
                torch.testing.assert_close(a[0], b[row], rtol=0, atol=2e-5)
            if images:
                assert [found for r, found in counts if r == row] == [result.per_layer for result in pruned.last]
            plain = tiny.model(**alone).logits[0]
            torch.testing.assert_close(forward.logits[row, kept[row] >= 0], plain, rtol=0, atol=2e-5)
    assert forward.logits.shape[1] == kept.shape[1] == max(int((k >= 0).sum()) for k in kept)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in ("llava", "llava_next", "qwen2_5_vl") for method in (FastV, SparseVLM)),
        ("qwen3_vl", FastV),
        ("qwen3_5", FastV),
        ("glm4v", SparseVLM),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keeping_everything_is_bit_identical(family: str, method: Any, attention: str) -> None:
    tiny = build(family, DEPTH)
    inputs = tiny.inputs(["Is there a dog?", "What is it?"], [[picture(160, 100)], [picture(60, 170, 1)]])
    tiny.model.set_attn_implementation(attention)
    try:
        stock = greedy(tiny.model, inputs, 4)
        for budget in (None, 1.0, 10_000):
            with method(budget=budget)(tiny.model, tiny.processor) as pruned:
                ours = greedy(tiny.model, inputs, 4)
            assert all(torch.equal(a, b) for a, b in zip(stock.logits, ours.logits, strict=True))
            assert cache_lengths(ours.past_key_values) == cache_lengths(stock.past_key_values)
            assert all(set(result.per_layer) == {result.before} for result in pruned.last)
            assert len(pruned.last) == (0 if budget is None else 2)
        again = greedy(tiny.model, inputs, 4)
        assert all(torch.equal(a, b) for a, b in zip(stock.logits, again.logits, strict=True))
    finally:
        tiny.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("method", [FastV(budget=0.7, full_layers=2), SparseVLM(budget=0.4)], ids=str)
def test_the_score_of_a_beam_is_that_of_its_words_one_by_one(method: Any) -> None:
    tiny = build("llava", DEPTH)
    questions, images = ["Is there a dog?", "What is it, please?"], [[picture(160, 100)], [picture(60, 170, 1)]]
    inputs = tiny.inputs(questions, images)
    with torch.no_grad(), method(tiny.model, tiny.processor) as pruned:
        out = tiny.model.generate(
            **inputs, max_new_tokens=4, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        assert [result.row for result in pruned.last] == [0, 1]
        # The score of a beam is the sum of its words' log-probabilities, taken here one word at a time by one row.
        for row in range(2):
            words = out.sequences[row, inputs["input_ids"].shape[1] :]
            total, cache = 0.0, None
            given = tiny.inputs([questions[row]], [images[row]])
            for word in words:
                step = tiny.model(**given, past_key_values=cache, use_cache=True)
                total += float(step.logits[0, -1].log_softmax(-1)[word])
                cache = step.past_key_values
                given = {"input_ids": word.view(1, 1)}
            assert total / 4 == pytest.approx(float(out.sequences_scores[row]), abs=2e-5)


def test_only_the_read_layer_is_touched_and_all_is_as_it_was_afterwards() -> None:
    tiny = build("llava", DEPTH)
    layers = tiny.model.model.language_model.layers
    config = layers[0].self_attn.config
    hooks = [len(layer._forward_pre_hooks) for layer in layers]
    with SparseVLM(budget=0.4)(tiny.model, tiny.processor):
        taken = [layer.self_attn.config is not config for layer in layers]
        assert [i for i, other in enumerate(taken) if other] == [0, 1, 3]
        assert tiny.model.config._attn_implementation == "sdpa"
        assert {layer.self_attn.config._attn_implementation for layer in layers} == {"sdpa", "stacktok_tap"}
        with pytest.raises(ValueError, match="already being pruned"), FastV(budget=3)(tiny.model, tiny.processor):
            pass
    assert all(layer.self_attn.config is config for layer in layers)
    assert [len(layer._forward_pre_hooks) for layer in layers] == hooks
    assert not any("_stacktok_tap" in vars(layer.self_attn) for layer in layers)


@pytest.mark.parametrize("method", [FastV(budget=9, counting="kept"), SparseVLM(budget=9)], ids=str)
def test_eager_attention_gives_the_same(method: Any) -> None:
    tiny = build("llava", DEPTH)
    inputs = tiny.inputs(["Is there a dog?", "What is it?"], [[picture(160, 100)], [picture(60, 170, 1)]])
    with method(tiny.model, tiny.processor):
        with_sdpa = greedy(tiny.model, inputs, 3)
        tiny.model.set_attn_implementation("eager")
        try:
            with_eager = greedy(tiny.model, inputs, 3)
        finally:
            tiny.model.set_attn_implementation("sdpa")
    for a, b in zip(with_sdpa.logits, with_eager.logits, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("method", [FastV(budget=9, counting="kept"), SparseVLM(budget=9)], ids=str)
def test_what_cannot_work_says_so(method: Any) -> None:
    tiny = build("llava", DEPTH)
    inputs = one(tiny)
    name = type(method).__name__
    with torch.no_grad(), method(tiny.model, tiny.processor):
        with pytest.raises(ValueError, match=f"{name} leaves caches of different lengths.*static cache"):
            greedy(tiny.model, inputs, 3, cache_implementation="static")
        first = tiny.model(**inputs, use_cache=True)
        word = torch.tensor([[7]])
        cropped = copy.deepcopy(first.past_key_values)
        cropped.layers[-1].keys = cropped.layers[-1].keys[:, :, :-1]
        cropped.layers[-1].values = cropped.layers[-1].values[:, :, :-1]
        with pytest.raises(ValueError, match="do not belong together"):
            tiny.model(input_ids=word, past_key_values=cropped)
        with pytest.raises(ValueError, match="without past_key_values"):
            tiny.model(**inputs, past_key_values=copy.deepcopy(first.past_key_values))
        # Without a cache the first step is the same, and nothing is refused.
        plain = greedy(tiny.model, inputs, 2, use_cache=False)
        torch.testing.assert_close(plain.logits[0][0], first.logits[0, -1], **CLOSE)


def test_several_tokens_at_once_continue_a_cut_cache() -> None:
    tiny = build("llava", DEPTH)
    inputs = one(tiny)
    words = torch.tensor([[7, 30, 12]])
    for method in (FastV(budget=9, counting="kept"), SparseVLM(budget=9)):
        with torch.no_grad(), method(tiny.model, tiny.processor):
            cache = tiny.model(**inputs, use_cache=True).past_key_values
            together = tiny.model(input_ids=words, past_key_values=copy.deepcopy(cache)).logits[0]
            for i in range(3):
                step = tiny.model(input_ids=words[:, i : i + 1], past_key_values=cache)
                torch.testing.assert_close(step.logits[0, -1], together[i], **CLOSE)


def test_a_loss_is_taken_over_what_is_left() -> None:
    tiny = build("llava", DEPTH)
    inputs = one(tiny)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == tiny.model.config.image_token_id, -100)
    with FastV(budget=9, counting="kept")(tiny.model, tiny.processor) as pruned:
        out = tiny.model(**inputs, labels=labels)
        kept = pruned.kept_positions[0]
    told = labels[0, kept][1:]
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1][told >= 0], told[told >= 0])
    torch.testing.assert_close(out.loss, expected)


@dataclass(frozen=True)
class Probe(LayerMethod):
    """Keeps the tokens that it is told, and shows its views to a function."""

    result: Any = None
    look: Any = None
    after: int = 2

    def layers(self, depth: int) -> tuple[int, ...]:
        return (self.after,)

    def keeps(self, depth: int, tokens: int, budget: Any) -> tuple[int, ...]:
        return (3,)

    def choose(self, view: LayerView, k: int) -> Any:
        if self.look is not None:
            self.look(view)
        return self.result if self.result is not None else torch.arange(k)


@pytest.mark.parametrize("family", ["llava", "llava_next_mistral", "qwen2_5_vl", "glm4v"])
def test_a_view_shows_what_the_stock_model_computes(family: str) -> None:
    tiny = build(family, DEPTH)
    inputs = tiny.inputs(
        ["Is there a dog?", "What is it, please, in the image?"], [[picture(160, 100)], [picture(60, 170, 1)]]
    )
    language_model, cut = tiny.model.model.language_model, 2
    rotate = importlib.import_module(f"transformers.models.{'glm4v.modeling_glm4v' if family == 'glm4v' else LLAMA}")
    embeds, _, mask = sequence(stock_arguments(tiny, inputs), inputs)
    rotated: list[torch.Tensor] = []
    seen: dict[str, Any] = {}
    handles = [
        language_model.layers[cut].self_attn.k_proj.register_forward_hook(lambda m, a, out: rotated.append(out)),
        language_model.layers[cut].self_attn.register_forward_pre_hook(
            lambda m, a, k: seen.update(k), with_kwargs=True
        ),
    ]
    tiny.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            stock = tiny.model(**inputs, output_hidden_states=True, output_attentions=True)
    finally:
        tiny.model.set_attn_implementation("sdpa")
        for handle in handles:
            handle.remove()
    cos, sin = seen["position_embeddings"]
    heads = rotated[0].unflatten(-1, (-1, language_model.layers[cut].self_attn.head_dim)).transpose(1, 2)
    keys = rotate.apply_rotary_pos_emb(heads, heads, cos, sin)[1].transpose(1, 2).flatten(2)
    ones = rotate.apply_rotary_pos_emb(torch.ones_like(heads), heads, cos, sin)[0][:, 0]

    views: list[dict[str, Any]] = []

    def look(view: LayerView) -> None:
        names = ("embeddings", "text_embeddings", "entering", "states", "text_states", "keys", "text_keys")
        views.append({name: getattr(view, name).clone() for name in names})
        views[-1] |= {"attention": view.attention(), "next": view.next_attention([-1, 0]), "one": view.attention([1])}
        views[-1] |= {"norm": view.norm(view.states), "rotation": view.rotation([0, -1])}

    with torch.no_grad(), Probe(budget=3, look=look)(tiny.model, tiny.processor):
        tiny.model(**inputs)
    assert len(views) == 2
    for row, view in enumerate(views):
        image = (inputs["input_ids"][row] == tiny.model.config.image_token_id).nonzero()[:, 0]
        text = torch.arange(int(image[-1]) + 1, mask.shape[1])
        hidden = [states[row] for states in stock.hidden_states]
        now, following = (stock.attentions[layer][row][:, text][..., image] for layer in (cut, cut + 1))
        expected = {
            "embeddings": embeds[row, image],
            "text_embeddings": embeds[row, text],
            "entering": hidden[cut][image],
            "states": hidden[cut + 1][image],
            "text_states": hidden[cut + 1][text],
            "keys": keys[row, image],
            "text_keys": keys[row, text],
            "attention": now,
            "one": now[:, [1]],
            "next": following[:, [-1, 0]],
            "norm": language_model.norm(hidden[cut + 1][image]),
            "rotation": ones[row, text[[0, -1]]] @ ones[row, image].T,
        }
        assert view.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(view[name], value, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([0, 1], "returned 2 tokens where 3 were asked for; give exactly k"),
        ([0, 1, 1], "returned token 1 more than once"),
        ([0, 1, 36], "returned token 36; give indices from 0 to 35"),
        (torch.tensor([0.5, 1, 2]), "returned shape .* give token indices"),
        (MergedTokens([0, 1, 2], [2], torch.ones(1, 32), [np.array([2])]), "returned token 2 more than once"),
        (MergedTokens([0, 1, 2], [5], torch.ones(2, 32), [np.array([5])]), "1 anchors, 2 made tokens and 1 sources"),
    ],
)
def test_wrong_choices_are_refused_by_name(result: Any, message: str) -> None:
    tiny = build("llava", DEPTH)
    with (
        Probe(budget=3, result=result)(tiny.model, tiny.processor),
        pytest.raises((ValueError, TypeError), match=rf"Probe.choose {message}|Probe.choose returned {message}"),
    ):
        tiny.model(**one(tiny))


def test_made_tokens_stand_behind_those_that_stay() -> None:
    tiny = build("llava", DEPTH)
    inputs = one(tiny)
    made = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    result = MergedTokens([30, 4, 8], [20, 10], made, [np.array([20, 21]), np.array([10, 12, 11])])
    states: list[torch.Tensor] = []
    with Probe(budget=3, result=result)(tiny.model, tiny.processor) as pruned:
        layer = tiny.model.model.language_model.layers[3]
        hook = layer.register_forward_pre_hook(lambda m, a, k: states.append(a[0]), with_kwargs=True)
        tiny.model(**inputs)
        hook.remove()
    first = int((inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[0])
    kept = pruned.kept_positions[0].tolist()
    assert kept[first : first + 5] == [first + i for i in (4, 8, 30, 20, 10)]
    assert torch.equal(states[0][0, first + 3 : first + 5], made)
    sources = [pairs[:, 1].tolist() for pairs in pruned.last[0].reduction.sources]
    assert sources == [[4], [8], [30], [20, 21], [10, 11, 12]]


def test_published_settings_of_fastv() -> None:
    # Tokens that stay for averages of 192, 128 and 64 over the layers.
    for depth, full, expected in ((32, 2, (166, 98, 30)), (32, 3, (152, 82, 11)), (40, 2, (172, 104, 37))):
        for budget, count in zip((192, 128, 64), expected, strict=True):
            assert FastV(full_layers=full).keeps(depth, 576, budget) == (count,)
            assert abs((full * 576 + (depth - full) * count) / depth - budget) < 0.5
    for budget in (192, 128, 64):
        assert FastV(counting="kept").keeps(32, 576, budget) == (budget,)
    assert FastV(counting="kept").keeps(32, 300, "20%") == (60,)
    assert FastV().keeps(32, 300, 1.0) == (300,)
    assert FastV().layers(32) == (1,)
    with pytest.raises(ValueError, match=r"budget=20 as an average over 32 layers.*at least 37 of 576"):
        FastV().keeps(32, 576, 20)
    assert FastV().keeps(32, 576, 37) == (1,)
    with pytest.raises(ValueError, match="full_layers=3 leaves nothing to prune in a language model of 3 layers"):
        FastV(full_layers=3).layers(3)
    with pytest.raises(ValueError, match="full_layers=0"):
        FastV(full_layers=0)
    with pytest.raises(ValueError, match="counting='x'"):
        FastV(counting="x")  # type: ignore[arg-type]


def test_published_settings_of_dart() -> None:
    # A pivot takes T // 8 tokens, and the image's four pivots come on top.
    assert [DART().keeps(32, 576, budget) for budget in (192, 128, 64)] == [(196,), (132,), (68,)]
    assert [DART(counting="kept").keeps(32, 576, budget) for budget in (192, 130, 1)] == [(192,), (130,), (1,)]
    # LLaVA-NeXT: no more than leaves room for the pivots.
    assert DART().keeps(32, 200, 198) == (4 + 8 * (196 // 8),)
    assert DART().keeps(32, 576, 1.0) == (576,)
    assert DART().keeps(32, 3, 2) == (3,)
    assert DART().layers(32) == (1,)
    with pytest.raises(ValueError, match="full_layers=3 leaves nothing to prune in a language model of 3 layers"):
        DART(full_layers=3).layers(3)
    with pytest.raises(ValueError, match="counting='average' is not known; use 'published' or 'kept'"):
        DART(counting="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pivot_order='x' is not known"):
        DART(pivot_order="x")  # type: ignore[arg-type]


def test_published_settings_of_pyramiddrop() -> None:
    method = PyramidDrop()
    assert method.layers(32) == (7, 15, 23)
    assert method.layers(28) == (6, 13, 20)
    assert method.layers(2) == (0,)
    for tokens in (576, 577, 2880):
        expected = tuple(int(tokens * ratio) for ratio in (0.5, 0.25, 0.125))
        assert method.keeps(32, tokens, "46.875%") == expected
        assert PyramidDrop(counting="kept").keeps(32, tokens, "12.5%") == expected
    counts = method.keeps(32, 576, 192)
    assert 190 < (576 + sum(counts)) / 4 <= 192
    assert counts[1] == pytest.approx(counts[0] ** 2 / 576, abs=1)
    assert method.keeps(32, 576, 576) == (576,) * 3
    assert PyramidDrop(counting="kept").keeps(32, 576, 64)[-1] == 64
    with pytest.raises(ValueError, match=r"budget=128 as an average over 32 layers cannot be met.* alone take 144"):
        method.keeps(32, 576, 128)
    with pytest.raises(ValueError, match="counting='published' is not known"):
        PyramidDrop(counting="published")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 layers"):
        method.layers(1)


def test_published_settings_of_sparsevlm() -> None:
    method, plus = SparseVLM(), SparseVLM(variant="+")
    assert method.layers(32) == plus.layers(32) == (2, 6, 15)
    assert method.layers(28) == (2, 5, 13)
    assert method.layers(40) == (3, 8, 19)
    assert method.layers(3) == (0, 1)
    expected = {192: ((300, 200, 110), 192.0, 113), 128: ((303, 110, 36), 128.6, 39)}
    expected |= {96: ((238, 48, 26), 96.9, 27), 64: ((66, 30, 17), 64.8, 18)}
    for budget, (counts, average, tail) in expected.items():
        assert method.keeps(32, 576, budget) == counts
        present, per_layer = 576, [576] * 2
        for count, layers in zip(counts, (4, 9, 17), strict=True):
            left = method.choose(
                GivenView(
                    torch.randn(present, 4), torch.randn(3, 4), torch.rand(2, 3, present), torch.ones(3, present)
                ),
                count,
            )
            present = count + len(left.made)
            per_layer += [present] * layers
        # The published way of counting credits a pruning layer with what it leaves.
        assert sum(per_layer) / 32 == pytest.approx(average, abs=0.05)
        assert present == tail
    assert plus.keeps(32, 576, 192) == (300, 200, 118)
    assert plus.keeps(32, 576, "50%") != plus.keeps(32, 576, 192)
    assert method.keeps(32, 1152, 128) == (132, 60, 34)
    assert method.keeps(32, 100, 1.0) == (100, 100, 100)
    with pytest.raises(ValueError, match="variant='2'"):
        SparseVLM(variant="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 layers"):
        method.layers(1)


def test_sparsevlm_plus_picks_heads_on_the_attention_that_is_divided_already() -> None:
    # By attention alone the 18 heads lead, and token 1 with them; by attention / weights the 14 do.
    attention = torch.tensor([[[0.0, 0.9]]] * 18 + [[[0.5, 0.0]]] * 14)
    weights = torch.tensor([[1.0, 10.0]])
    assert corrected(attention, weights, 14).mean((0, 1)).argmax() == 0
    view = GivenView(torch.ones(2, 4), torch.ones(1, 4), attention, weights)
    assert SparseVLM(variant="+").choose(view, 1).tolist() == [0]


@given(st.integers(2, 3000), st.integers(1, 3000), st.sampled_from(["v1.5", "+"]), st.integers(2, 48))
def test_schedules_are_possible_for_any_image(tokens: int, budget: int, variant: Any, depth: int) -> None:
    method = SparseVLM(variant=variant)
    counts, layers = method.keeps(depth, tokens, budget), method.layers(depth)
    assert len(counts) == len(layers)
    assert list(layers) == sorted(set(layers))
    assert layers[-1] <= depth - 2
    assert all(1 <= count <= tokens for count in counts)
    assert budget < tokens or set(counts) == {tokens}
    assert budget >= tokens or counts[0] < tokens
