"""Every method on every family, one picture and three: a new method adds one line to METHODS."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from stacktok.core.tokens import SEPARATOR
from stacktok.methods import (
    DART,
    EVS,
    SCOPE,
    AveragePool,
    CDPruner,
    DARTEmbeddings,
    DivPrune,
    FastV,
    HiPrune,
    HoloV,
    MMTok,
    PixelPrune,
    PruMergePlus,
    PyramidDrop,
    RandomTokens,
    SparseVLM,
    Spotlight,
    StackTok,
    UniformGrid,
    VidCom2,
    VisionZip,
    VisPruner,
    VScan,
    VScanTwoStage,
    ablation,
    available,
)
from tests.models.test_pruned_models import greedy
from tests.tiny import MROPE, build, picture
from tests.tiny_tiles import READY_MASKS, TILES

METHODS: dict[str, Any] = {
    "StackTok": StackTok(budget=8),
    "StackTok, depth 4": StackTok(budget=8, relevance_depth=4),
    "StackTok, uniform quotas": ablation("Uniform fixed quotas", 8),
    "Spotlight": Spotlight(budget=8),
    "MMTok": MMTok(budget=8),
    "MMTok, shared": MMTok(budget=8, allocation="shared"),
    "DivPrune": DivPrune(budget=8),
    "CDPruner": CDPruner(budget=8),
    "VisionZip": VisionZip(budget=8),
    "VisionZip, CLS": VisionZip(budget=8, signal="cls"),
    "VisionZip, received": VisionZip(budget=8, signal="received"),
    "VisPruner": VisPruner(budget=8),
    "FasterVLM": VisPruner(budget=8, important_ratio=1),
    "SCOPE": SCOPE(budget=8),
    "HoloV": HoloV(budget=8),
    "DART, embeddings": DARTEmbeddings(budget=8),
    "HiPrune": HiPrune(budget=8, alpha=0.7),
    "VScan": VScan(budget=8, window=2),
    "PruMerge+": PruMergePlus(budget=8),
    "EVS": EVS(budget=8),
    "VidCom2": VidCom2(budget=8),
    "RandomTokens": RandomTokens(budget=8),
    "UniformGrid": UniformGrid(budget=8),
    "AveragePool": AveragePool(budget=8),
    "FastV, kept": FastV(budget=8, counting="kept"),
    "FastV, average": FastV(budget="80%", full_layers=1),
    "FastV, too deep": FastV(budget=8, counting="kept", full_layers=3),
    "SparseVLM": SparseVLM(budget=8),
    "SparseVLM+": SparseVLM(budget=8, variant="+"),
    "DART": DART(budget=8),
    "DART, kept": DART(budget=8, counting="kept", pivot_order="ascending"),
    "StackTok after PixelPrune": StackTok(budget=8, before=PixelPrune()),
    "PyramidDrop": PyramidDrop(budget="60%"),
    "PyramidDrop, kept": PyramidDrop(budget=8, counting="kept"),
    "VScan, both stages": VScanTwoStage(budget=8, window=2),
}

FAMILIES = ("llava", "llava_next", "llava_next_mistral", *MROPE, *TILES)
WITHOUT_CLS = (*MROPE, *(family for family in TILES if family != "internvl"))

INSIDE = [name for name, method in METHODS.items() if method.stage == "inside" and name != "FastV, too deep"]

# Combinations that cannot be, each with the error that says so.
IMPOSSIBLE = {
    **{
        ("StackTok after PixelPrune", family): "encodes pictures whole: no cell can be left out before its vision tower"
        for family in FAMILIES
        if not family.startswith("qwen")
    },
    **{
        (name, family): f"{name} compares the frames of a video, and this is one image"
        for name in ("EVS", "VidCom2")
        for family in FAMILIES
    },
    **{
        ("VisionZip, CLS", family): "signal='cls' needs a CLS token, which the vision tower of"
        for family in WITHOUT_CLS
    },
    **{
        (
            name,
            family,
        ): "are given ready masks, of image tokens that see each other and of sliding windows, which cannot"
        for name in INSIDE
        for family in READY_MASKS
    },
    **{
        ("FastV, too deep", family): "full_layers=3 leaves nothing to prune in a language model of 3 layers"
        for family in FAMILIES
    },
    **{
        (name, family): why
        for name in (
            "FastV, average",
            "SparseVLM",
            "SparseVLM+",
            "PyramidDrop",
            "PyramidDrop, kept",
            "VScan, both stages",
        )
        for family, why in {
            "qwen3_vl": "Qwen3-VL adds visual features to the hidden states after layers 0 to 1, so no token can go",
            "qwen3_5": "layer 0 of Qwen3.5 is recurrent and has no attention to rank tokens by; cut after one of",
        }.items()
    },
}
ROWS = [
    ("What is in the image?", [picture(160, 100)]),
    ("How many cats are there in the picture, please?", [picture(60, 170, 1)]),
    ("Is there a dog?", [picture(120, 120, 2)]),
]


@functools.cache
def unpruned(family: str, batch: int) -> Any:
    tiny = build(family)
    return greedy(tiny.model, tiny.inputs([q for q, _ in ROWS[:batch]], [i for _, i in ROWS[:batch]]), 3)


# A batch of three holds a run of one row against it, so that a batch of one adds little.
@pytest.mark.parametrize(
    ("family", "batch"), [(family, batch) for family in FAMILIES for batch in (1, 3) if batch == 3 or family == "llava"]
)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_every_family(name: str, family: str, batch: int) -> None:
    tiny, method = build(family), METHODS[name]
    inputs = tiny.inputs([question for question, _ in ROWS[:batch]], [images for _, images in ROWS[:batch]])
    stock = unpruned(family, batch)
    if (name, family) in IMPOSSIBLE:
        with (
            pytest.raises(ValueError, match=IMPOSSIBLE[name, family].replace("(", r"\(")),
            method(tiny.model, tiny.processor),
        ):
            greedy(tiny.model, inputs, 3)
    else:
        with method(tiny.model, tiny.processor) as pruned:
            out = greedy(tiny.model, inputs, 3)
            results, kept = pruned.last, pruned.kept_positions
            single = greedy(tiny.model, tiny.inputs([ROWS[batch - 1][0]], [ROWS[batch - 1][1]]), 3)
        assert [result.row for result in results] == list(range(batch))
        for result in results:
            check_counts(method, result, tiny)
            check_provenance(method, result)
        for alone, together in zip(single.logits, out.logits, strict=True):
            torch.testing.assert_close(alone[0], together[batch - 1], rtol=0, atol=2e-5)
        # The columns that are left, and two tokens generated from them, in the last layer's cache.
        last = len(out.past_key_values.layers) - 1
        assert out.past_key_values.get_seq_length(last) == kept.shape[1] + 2
        assert not all(torch.equal(a, b) for a, b in zip(stock.logits, out.logits, strict=True))
        if method.stage == "inside":
            with method(tiny.model, tiny.processor), pytest.raises(ValueError, match="static cache"):
                greedy(tiny.model, inputs, 3, cache_implementation="static")
    again = greedy(tiny.model, inputs, 3)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, again.logits, strict=True))


def check_counts(method: Any, result: Any, tiny: Any) -> None:
    """One convention: tokens that enter each layer, their average, and what they leave in the cache."""
    assert len(result.per_layer) == 3
    assert result.per_layer[-1] == result.after == len(result.reduction)
    assert result.average == sum(result.per_layer) / 3
    kinds = getattr(tiny.model.config.get_text_config(), "layer_types", None) or [""] * 3
    caching = [layer for layer, kind in enumerate(kinds) if kind != "linear_attention"]
    if tiny.family == "gemma4":
        caching.pop()
    assert result.cache_entries == sum(result.per_layer[layer] for layer in caching)
    if method.stage == "before":
        assert result.per_layer == (8, 8, 8)
    elif isinstance(method, (DART, FastV)) and method.counting in ("kept", "published"):
        stay = 8 if method.counting == "kept" else 4 + 8 * (min(8, result.before - 4) // 8)
        assert result.per_layer == (result.before, result.before, stay)
    elif isinstance(method, VScanTwoStage):
        assert result.per_layer == (12, 6, 6)
    elif isinstance(method, FastV):
        assert abs(result.average - 0.8 * result.before) <= 0.5
    elif isinstance(method, PyramidDrop):
        assert abs(result.average - 0.6 * result.before) <= 1 or result.after == 8
    else:
        assert result.before == result.per_layer[0] > result.per_layer[1] > result.per_layer[2]


def check_provenance(method: Any, result: Any) -> None:
    """Sources of output tokens are tokens of the image, none of them twice."""
    reduction, image = result.reduction, result.image
    pairs = np.concatenate([source for source in reduction.sources if len(source)])
    # PruMerge+ adds a token to every kept one that it is like.
    assert len(np.unique(pairs, axis=0)) == len(pairs) or isinstance(method, PruMergePlus)
    for crop, token in pairs.tolist():
        assert crop == SEPARATOR or image.crops[crop].layout.offsets[token] >= 0
    if not method.merges:
        assert [len(source) for source in reduction.sources] == (reduction.anchors[:, 0] != SEPARATOR).tolist()
        assert not reduction.embeddings
    if isinstance(method, AveragePool):
        assert len(pairs) == image.capacity


def test_every_registered_method_is_in_the_matrix() -> None:
    assert set(available().values()) == {type(method) for method in METHODS.values()}


def test_per_crop_budgets_of_the_original_codes() -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(112, 112)]])
    for method in (MMTok(budget=3, allocation="per_crop"), VisionZip(budget=3, allocation="per_crop")):
        with method(tiny.model, tiny.processor) as pruned:
            greedy(tiny.model, inputs, 2)
        assert pruned.after == 3 * len(pruned.last[0].image.crops) == 15
    with MMTok(budget=10)(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, inputs, 2)
    assert [len(indices) for indices in pruned.last[0].selection.indices] == [2] * 5
    with DivPrune(budget=6, keep_newlines=True)(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, inputs, 2)
    assert pruned.last[0].reduction.tokens == 6 < pruned.after


def test_visionzip_refuses_features_that_were_encoded_without_it() -> None:
    tiny = build("llava")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(112, 112)]])
    with torch.no_grad():
        encoded = tiny.model.model.get_image_features(inputs["pixel_values"], output_hidden_states=True)
    given = {key: value for key, value in inputs.items() if key != "pixel_values"}
    with (
        VisionZip(budget=8)(tiny.model, tiny.processor),
        pytest.raises(ValueError, match="encode the image inside the with block"),
    ):
        tiny.model(**given, mm_encoder_outputs={"image": encoded})
