"""PixelPrune: cells by the authors' selections, and runs equal to cells that are deleted by hand in the stock model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stacktok.evaluation.cells import cells_of
from stacktok.evaluation.plan import MethodPart, load_plan
from stacktok.methods import (
    DART,
    AveragePool,
    DARTEmbeddings,
    FastV,
    PixelPrune,
    PyramidDrop,
    RandomTokens,
    SparseVLM,
    StackTok,
    VisionZip,
    settings,
)
from stacktok.serving.settings import Settings
from tests.methods import layer_by_layer
from tests.methods.seeded import FIXTURES, cell_cases, drawn_cells
from tests.models.by_hand import deepstack_rows, sequence, stock_arguments
from tests.models.test_pruned_models import greedy
from tests.tiny import build, picture

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.mark.parametrize("entry", cell_cases(FIXTURES / "pixelprune.json"), ids=lambda e: f"{e['seed']}")
def test_pixelprune_keeps_what_the_authors_code_keeps(entry: dict[str, Any]) -> None:
    cells = drawn_cells(entry["seed"], entry["h"], entry["w"], entry["colours"], entry["noise"])
    kept, source = PixelPrune(tau=entry["tau"]).keep(cells)
    assert np.flatnonzero(kept).tolist() == entry["kept"]
    # What stands for a cell is encoded, and no further from it than tau.
    assert kept[source].all()
    rows = cells.flatten(0, 1)
    assert float((rows - rows[torch.from_numpy(source)]).abs().max()) <= entry["tau"]


def screen(side: int, rows: int, columns: int, dark: list[tuple[int, int]], shade: int = 0) -> Image.Image:
    """A white picture of cells with a few dark ones."""
    pixels = np.full((rows * side, columns * side, 3), 255, dtype=np.uint8)
    for row, column in dark:
        pixels[row * side : (row + 1) * side, column * side : (column + 1) * side] = shade
    return Image.fromarray(pixels)


def side(family: str) -> int:
    return 28 if family in ("qwen2_vl", "qwen2_5_vl") else 32


# A lone dark cell is kept with its right and lower neighbours, which it predicts wrongly; the first cell always is.
SCREENS = [
    ((4, 6), [(1, 2)], [0, 8, 9, 14]),
    ((3, 4), [(0, 0), (2, 3)], [0, 1, 4, 11]),
    ((5, 5), [], [0]),
]


def screens(family: str) -> list[Image.Image]:
    return [screen(side(family), *size, dark) for size, dark, _ in SCREENS]


@torch.no_grad()
def tower_by_hand(tiny: Any, pixels: torch.Tensor, grid: list[int], kept: list[int]) -> tuple[Any, list[Any]]:
    """Tokens, (k, d), of the kept cells of one picture, and their DeepStack features: the stock tower's parts in order.

    Every block runs on one attention group at a time: the picture, or a window of it.
    """
    visual, config = tiny.model.model.visual, tiny.model.config.vision_config
    _, height, width = grid
    cells = [(r, c) for r in range(height // 2) for c in range(width // 2)]
    patches = [(2 * r + y, 2 * c + x) for r, c in cells for y in (0, 1) for x in (0, 1)]
    mine = [4 * token + i for token in kept for i in range(4)]
    entering: list[torch.Tensor] = []
    if tiny.family == "qwen2_5_vl":
        entering.append(visual.patch_embed(pixels))
    else:
        hook = visual.blocks[0].register_forward_pre_hook(lambda m, a: entering.append(a[0]))
        visual(pixels, grid_thw=torch.tensor([grid]))
        hook.remove()
    hidden = entering[0][mine]
    cos, sin = visual.rotary_pos_emb(hidden, torch.tensor([patches[i] for i in mine]))
    side = getattr(config, "window_size", 0) // 2 // config.patch_size
    deep = []
    for number, block in enumerate(visual.blocks):
        windows = tiny.family == "qwen2_5_vl" and number not in config.fullatt_block_indexes
        named = [(cells[i // 4][0] // side, cells[i // 4][1] // side) if windows else (0, 0) for i in mine]
        after = torch.empty_like(hidden)
        for name in set(named):
            group = [i for i, own in enumerate(named) if own == name]
            after[group] = block(
                hidden[group], cu_seqlens=torch.tensor([0, len(group)]), position_embeddings=(cos[group], sin[group])
            )
        hidden = after
        if number in getattr(visual, "deepstack_visual_indexes", ()):
            deep.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)](hidden))
    return visual.merger(hidden), deep


@torch.no_grad()
def steps_by_hand(tiny: Any, inputs: Any, kept: list[int], steps: int) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of every step for one prompt with one picture, and the columns that are left."""
    seen = stock_arguments(tiny, inputs)
    embeds, original, _ = sequence(seen, inputs)
    ids = inputs["input_ids"][0].tolist()
    image = [i for i, token in enumerate(ids) if token == tiny.model.config.image_token_id]
    tokens, deep = tower_by_hand(tiny, inputs["pixel_values"], inputs["image_grid_thw"][0].tolist(), kept)
    whole = embeds[0].clone()
    whole[[image[token] for token in kept]] = tokens
    left = [i for i in range(len(ids)) if i not in image or image.index(i) in kept]
    x, place, found = whole[left][None], original[:, 0, left][:, None], []
    for step in range(steps):
        more: dict[str, Any] = {}
        if deepstack_rows(seen):
            more["visual_pos_masks"] = torch.tensor([[i in image for i in left] + [False] * step])
            more["deepstack_visual_embeds"] = deep
        states = tiny.model.model.language_model(
            inputs_embeds=x, position_ids=place, attention_mask=torch.ones(x.shape[:2]).long(), use_cache=False, **more
        ).last_hidden_state
        found.append(tiny.model.lm_head(states)[0, -1])
        x = torch.cat([x, tiny.model.get_input_embeddings()(found[-1].argmax())[None, None]], dim=1)
        place = torch.cat([place, torch.full((3, 1, 1), int(original[..., -1].max()) + 1 + step)], dim=-1)
    return found, left


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(len(SCREENS)))
def test_a_run_equals_cells_deleted_by_hand_from_tower_and_sequence(family: str, number: int) -> None:
    tiny = build(family)
    size, _, kept = SCREENS[number]
    inputs = tiny.inputs(["Is there a dog?"], [[screens(family)[number]]])
    expected, left = steps_by_hand(tiny, inputs, kept, 3)
    entered: list[int] = []
    hook = tiny.model.model.visual.blocks[0].register_forward_pre_hook(lambda m, a: entered.append(len(a[0])))
    with PixelPrune()(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 3)
    hook.remove()
    assert entered == [4 * len(kept)]
    assert pruned.kept_positions[0].tolist() == left
    for a, b in zip(out.logits, expected, strict=True):
        torch.testing.assert_close(a[0], b, rtol=1e-4, atol=2e-5)
    result = pruned.last[0]
    total = size[0] * size[1]
    assert (result.before, result.after, result.not_encoded) == (total, len(kept), total - len(kept))
    assert list(result.removed.values()) == [total - len(kept), 0, 0]
    assert result.reduction.anchors[:, 1].tolist() == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_a_batch_are_pruned_each_by_its_own_pixels(family: str) -> None:
    tiny = build(family)
    images = [*screens(family), picture(side(family) * 4, side(family) * 3)]
    rows = [("Is there a dog?", images[:1]), ("How many cats are there?", images[1:3]), ("What is it?", images[3:])]
    with PixelPrune()(tiny.model, tiny.processor) as pruned:
        together = greedy(tiny.model, tiny.inputs([q for q, _ in rows], [i for _, i in rows]), 3)
        assert [result.after for result in pruned.last] == [4, 4, 1, 12]
        for row, (question, own) in enumerate(rows):
            single = greedy(tiny.model, tiny.inputs([question], [own]), 3)
            for a, b in zip(single.logits, together.logits, strict=True):
                torch.testing.assert_close(a[0], b[row], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_with_nothing_flat_and_a_bypass_change_no_bit(family: str) -> None:
    tiny = build(family)
    full = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    flat = tiny.inputs(["Is there a dog?"], [screens(family)[:1]])
    stock = [greedy(tiny.model, inputs, 3).logits for inputs in (full, flat)]
    with PixelPrune()(tiny.model, tiny.processor) as pruned:
        found = [greedy(tiny.model, full, 3).logits]
        assert list(pruned.last[0].removed.values()) == [0, 0, 0]
        pruned.budget = None
        found.append(greedy(tiny.model, flat, 3).logits)
    found.append(greedy(tiny.model, flat, 3).logits)
    for mine, theirs in zip(found, [*stock, stock[1]], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not tiny.model.model.visual._forward_pre_hooks


def test_tau_is_on_the_scale_of_pixels_and_differences_do_not_add_up() -> None:
    tiny = build("qwen2_vl")
    grey = screen(28, 4, 6, [(1, 2)], shade=250)
    with PixelPrune(tau=6 / 255)(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, tiny.inputs(["Is there a dog?"], [[grey]]), 1)
        assert pruned.last[0].after == 1
    with PixelPrune(tau=4 / 255)(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, tiny.inputs(["Is there a dog?"], [[grey]]), 1)
        assert pruned.last[0].after == 4
    with pytest.raises(ValueError, match=r"tau above 0 .* give the model's processor, or tau=0"):
        PixelPrune(tau=0.1)(tiny.model, None).__enter__()
    # A slope: neighbours are alike, the ends are not.
    slope = torch.arange(9.0)[None, :, None].expand(1, 9, 4) * 0.1
    assert np.flatnonzero(PixelPrune(tau=0.25).keep(slope)[0]).tolist() == [0, 3, 6]
    for wrong in (-0.1, 1.0, "0", True, float("nan")):
        with pytest.raises(ValueError, match="tau="):
            PixelPrune(tau=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", [StackTok, DARTEmbeddings, RandomTokens, VisionZip, AveragePool])
def test_a_method_that_follows_keeps_encoded_cells_only(family: str, kind: Any) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?", "What is it?"], [screens(family)[:1], [picture(160, 100)]])
    with kind(budget=3, before=PixelPrune())(tiny.model, tiny.processor) as pruned:
        greedy(tiny.model, inputs, 3)
        first, second = pruned.last
    assert list(first.removed.values()) == [20, 1, 0]
    assert second.not_encoded == 0
    assert (first.after, second.after) == (3, 3)
    if kind is not AveragePool:
        assert set(first.reduction.anchors[:, 1].tolist()) <= set(SCREENS[0][2])


LARGE = (28, 4, 6, [(1, 2), (3, 5), (2, 0)])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (FastV(budget=3, counting="kept", before=PixelPrune()), "fastv"),
        (DART(budget=6, counting="kept", before=PixelPrune()), "dart"),
        (PyramidDrop(budget=2, counting="kept", before=PixelPrune()), "pyramiddrop"),
        (SparseVLM(budget=4, before=PixelPrune()), "sparsevlm"),
    ],
)
def test_a_method_inside_the_language_model_starts_from_the_encoded_cells(
    family: str, method: Any, name: str, monkeypatch: Any
) -> None:
    tiny = build(family, 6)
    inputs = tiny.inputs(["Is there a dog?"], [[screen(*LARGE)]])
    with PixelPrune()(tiny.model, tiny.processor) as pruned:
        # Hooks run in order, so that this one sees what the language model gets of the encoded cells.
        seen = stock_arguments(tiny, inputs)
        left, n = pruned.kept_positions, pruned.after
    shorter = {"input_ids": inputs["input_ids"][:, left[0]], "attention_mask": torch.ones_like(left)}
    cuts = dict(zip(method.layers(6), method.keeps(6, n, method.budget), strict=True))
    with monkeypatch.context() as patched:
        patched.setattr(layer_by_layer, "stock_arguments", lambda *given: seen)
        expected, lengths, _ = layer_by_layer.run(
            tiny,
            shorter,
            cuts,
            method=name,
            positions="kept",
            steps=4,
            seed=method.__dict__.get("seed", 0),
            # Of 6 tokens the image's pivots are 4.
            shares=(1, 1, 0, 0, 0, 0, 0, 0),
        )
    with method(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 4)
        result, kept = pruned.last[0], pruned.kept_positions[0].tolist()
        batch = tiny.inputs(
            ["What is it, please, in the image?", "Is there a dog?"], [[picture(150, 90)], [screen(*LARGE)]]
        )
        together = greedy(tiny.model, batch, 4)
    for step in range(4):
        torch.testing.assert_close(out.logits[step][0], expected[step], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(together.logits[step][1], expected[step], rtol=1e-4, atol=2e-5)
    text = shorter["input_ids"].shape[1] - n
    assert result.per_layer == tuple(length - text for length in lengths)
    assert result.not_encoded == 24 - n
    assert result.before == 24
    assert set(kept) <= set(left[0].tolist())
    again = greedy(tiny.model, inputs, 1)
    assert not torch.equal(again.logits[0], out.logits[0])


@pytest.mark.parametrize("family", ["llava", "llava_next", "glm4v"])
def test_families_that_encode_pictures_whole_say_so(family: str) -> None:
    tiny = build(family)
    with pytest.raises(ValueError, match="encodes pictures whole: no cell can be left out before its vision tower"):
        PixelPrune()(tiny.model, tiny.processor).__enter__()


def test_before_takes_methods_of_that_stage() -> None:
    with pytest.raises(TypeError, match=r"before=FastV.* is not a method that works before the vision tower"):
        StackTok(budget=8, before=FastV(budget=8))  # type: ignore[arg-type]


def test_a_method_before_the_tower_is_named_in_settings_and_refused_where_it_cannot_work(tmp_path: Path) -> None:
    method = StackTok(budget=8, before="pixelprune")  # type: ignore[arg-type]
    assert method == StackTok(budget=8, before=PixelPrune())
    (tmp_path / "own.yaml").write_text(settings.settings_text(method))
    assert settings.load(tmp_path / "own.yaml") == method
    with pytest.raises(ValueError, match="before='x' is not known; give one of pixelprune"):
        StackTok(budget=8, before="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="before=PixelPrune cannot be served"):
        Settings.read({"method": "stacktok", "budget": 8, "parameters": {"before": "pixelprune"}})
    part = MethodPart(name="both", method="stacktok", settings={"before": "pixelprune"})
    plan = load_plan("embedded").model_copy(update={"methods": [part]})
    with pytest.raises(ValueError, match="method 'both' works before the vision tower, and the engine 'loop'"):
        cells_of(plan)
