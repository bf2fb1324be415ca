"""How each family lays an image out, and what a reduction makes of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stacktok import Parameters, StackTok, select
from stacktok.core.tokens import SEPARATOR, EncodedImage, ImageLayout, Reduction, single_crop
from stacktok.methods.base import FeatureMethod, Prepared
from stacktok.models.base import ModelAdapter
from stacktok.models.llava import LlavaAdapter
from stacktok.models.llava_next import canvas_layout
from stacktok.runtime.compaction import Span, compact, padding_of
from tests.models.by_hand import crops_of, pruned_by_hand
from tests.models.test_pruned_models import LOOSE
from tests.tiny import MROPE, build, picture

# Tile shapes 1x1, 1x2, 2x1, 2x2, 3x1 and 1x3, square, wide, tall, and extreme ratios.
SIZES = [(50, 50), (112, 50), (50, 112), (110, 112), (400, 30), (30, 400), (1000, 9), (168, 56), (57, 171), (83, 71)]


def encoded(tiny: Any, inputs: Any, **settings: Any) -> tuple[Any, Any]:
    with StackTok(budget=1, **settings)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    return pruned, [result.image for result in pruned.last]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_place_of_a_next_canvas_holds_the_row_of_its_token(width: int, height: int) -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(width, height)]])
    _, (image,) = encoded(tiny, inputs)
    crops, rows = crops_of(tiny, inputs)[0]
    assert image.length == len(rows)
    assert len(image.crops) == len(crops)
    seen = set(image.layout.separators.tolist())
    for crop, reference in zip(image.crops, crops, strict=True):
        torch.testing.assert_close(crop.projected, reference.projected, rtol=0, atol=1e-6)
        torch.testing.assert_close(crop.vision, reference.vision, rtol=0, atol=1e-6)
        assert np.array_equal(crop.eligible, crop.layout.offsets >= 0)
        for token in np.flatnonzero(crop.eligible).tolist():
            place = int(crop.layout.offsets[token])
            torch.testing.assert_close(rows[place], reference.projected[token], rtol=0, atol=1e-6)
            assert place not in seen
            seen.add(place)
    assert seen == set(range(image.length))
    newline = tiny.model.model.image_newline
    assert all(torch.equal(rows[place], newline) for place in image.layout.separators.tolist())


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("budget", [9, 10_000])
def test_a_next_image_of_any_shape_equals_the_computation_by_hand(width: int, height: int, budget: int) -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(width, height)]])
    expected, columns = pruned_by_hand(tiny, inputs, ["there dog"], budget)
    with StackTok(budget=budget)(tiny.model, tiny.processor) as pruned:
        logits = tiny.model(**inputs).logits
    assert pruned.kept_positions[0].tolist() == columns[0]
    torch.testing.assert_close(logits[0], expected[0][0], **LOOSE)
    result = pruned.last[0]
    assert result.after == min(budget, result.image.capacity)
    # Base view first, then the canvas row by row across tiles.
    places = result.image.offsets_of(result.reduction.anchors)
    assert (np.diff(places) > 0).all()


@pytest.mark.parametrize("family", ["llava", "llava_next", *MROPE])
def test_the_rows_of_a_reduced_image_can_be_had_without_hooks(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    seen: list[torch.Tensor] = []
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        hook = tiny.model.model.language_model.register_forward_pre_hook(
            lambda m, a, k: seen.append(k["inputs_embeds"]), with_kwargs=True
        )
        tiny.model(**inputs)
        hook.remove()
    (result,) = pruned.last
    left = result.image.gather(crops_of(tiny, inputs)[0][1], result.reduction)
    columns = pruned.kept_positions[0]
    image = inputs["input_ids"][0, columns] == tiny.model.config.image_token_id
    torch.testing.assert_close(seen[0][0, image], left)
    with pytest.raises(ValueError, match="give the unpruned ones"):
        result.image.gather(left, result.reduction)


def test_patches_wholly_inside_the_letterbox_are_not_eligible() -> None:
    # A 2:1 picture on a 2 x 2 canvas of 4-patch tiles fills rows 2 to 5 of 8.
    layout = canvas_layout(4, 2, 2, (100, 200))
    rows = np.stack([crop.eligible for crop in layout.crops[1:]]).reshape(2, 2, 4, 4).any(axis=(1, 3)).reshape(-1)
    assert rows.tolist() == [False, False, True, True, True, True, False, False]
    assert layout.length == 16 + 4 * 9
    # The published shape: five views of 24 x 24, 48 newlines.
    assert canvas_layout(24, 2, 2, (672, 672)).length == 5 * 576 + 48


def test_newlines_can_be_kept_on_top_of_the_budget() -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    with StackTok(budget=9)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
        plain = pruned.last[0]
        dropped = pruned.kept_positions[0].tolist()
    with StackTok(budget=9, keep_newlines=True)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
        result = pruned.last[0]
        kept = pruned.kept_positions[0].tolist()
    image, reduction = result.image, result.reduction
    lines = {
        int(image.layout.crops[c].separators[t])
        for c, t in plain.reduction.anchors.tolist()
        if image.layout.crops[c].separators is not None
    }
    assert plain.after == 9
    assert reduction.tokens == 9
    assert result.after == 9 + len(lines)
    newlines = [token for crop, token in reduction.anchors.tolist() if crop == SEPARATOR]
    assert newlines == sorted(lines)
    first = int((inputs["input_ids"][0] == tiny.model.config.image_token_id).nonzero()[0])
    assert sorted(set(kept) - set(dropped)) == [first + int(image.layout.separators[line]) for line in newlines]
    assert kept == sorted(kept)


def test_a_fraction_counts_the_encoded_positions_of_all_crops() -> None:
    tiny = build("llava_next")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(400, 30)]])
    with StackTok(budget=0.25)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    image = pruned.last[0].image
    assert image.n == 16 * len(image.crops)
    assert pruned.after == image.n // 4


@pytest.mark.parametrize("family", MROPE)
def test_grids_of_patches_follow_the_images_own_resolution(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(200, 90), picture(84, 140, 1)]])
    _, images = encoded(tiny, inputs)
    assert [image.crops[0].grid for image in images] == [
        (h // 2, w // 2) for _, h, w in inputs["image_grid_thw"].tolist()
    ]
    for image, (crops, rows) in zip(images, crops_of(tiny, inputs), strict=True):
        assert image.tau_query == (0.01 if family.startswith("qwen") else 0.02)
        assert torch.equal(image.crops[0].projected, rows)
        torch.testing.assert_close(image.crops[0].vision, crops[0].vision)


def test_merged_tokens_take_their_anchors_place_with_their_own_embedding() -> None:
    class PreparedAverage(Prepared):
        """Two tokens: a kept one after the mean of all others, out of raster order."""

        nbytes = 0

        def reduce(self, query: Any, budget: Any) -> Reduction:
            crop = self.image.crops[0]
            others = np.stack([np.zeros(crop.n - 1, dtype=np.int64), np.delete(np.arange(crop.n), 3)], axis=1)
            return Reduction(
                anchors=np.array([[0, 20], [0, 3]]),
                embeddings={0: crop.projected[others[:, 1]].mean(0)},
                merged={0: others},
            )

    class Average(FeatureMethod):
        def prepare(self, image: EncodedImage) -> Prepared:
            return PreparedAverage(image)

    tiny = build("llava")
    inputs = tiny.inputs(["Is there a dog?", "What is in the image?"], [[picture()], [picture(seed=1)]])
    seen: list[Any] = []
    with Average(budget=2)(tiny.model, tiny.processor) as pruned:
        hook = tiny.model.model.language_model.register_forward_pre_hook(
            lambda m, a, k: seen.append(k["inputs_embeds"]), with_kwargs=True
        )
        tiny.model(**inputs)
        hook.remove()
    for row, result in enumerate(pruned.last):
        first = int((inputs["input_ids"][row] == tiny.model.config.image_token_id).nonzero()[0])
        at = pruned.kept_positions[row].tolist().index(first + 20)
        assert pruned.kept_positions[row, at : at + 2].tolist() == [first + 20, first + 3]
        projected = result.image.crops[0].projected
        others = np.delete(np.arange(36), 3)
        torch.testing.assert_close(seen[0][row, at], projected[others].mean(0))
        assert torch.equal(seen[0][row, at + 1], projected[3])
        assert result.reduction.sources[1].tolist() == [[0, 3]]
        assert len(result.reduction.sources[0]) == 35


def test_an_adapter_from_outside_can_be_handed_over() -> None:
    class Half(LlavaAdapter):
        """As LLaVA-1.5, with the right half of every image out of bounds."""

        family = "half"

        def layout(self, *args: Any) -> ImageLayout:
            return super().layout(*args).with_eligible(np.tile(np.arange(6) < 3, 6))

    tiny = build("llava")
    assert issubclass(Half, ModelAdapter)
    with StackTok(budget=30)(tiny.model, tiny.processor, adapter=Half()) as pruned:
        tiny.model(**tiny.inputs(["Is there a dog?"], [[picture()]]))
    assert pruned.last[0].selection.indices.tolist() == [i for i in range(36) if i % 6 < 3]


def test_the_adapter_of_the_page_add_a_model_works_as_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/add-a-model.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    tiny = build("llava")
    inputs = tiny.inputs(["Is there a dog?"], [[picture()]])
    with StackTok(budget=7)(tiny.model, tiny.processor, adapter=names["MyAdapter"]()):
        theirs = tiny.model(**inputs).logits
    with StackTok(budget=7)(tiny.model, tiny.processor):
        assert torch.equal(theirs, tiny.model(**inputs).logits)


def test_adapters_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from stacktok.models import adapter_for, registry, supported

    entry = EntryPoint("llava", f"{__name__}:Elsewhere", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    assert isinstance(adapter_for(build("llava").model), Elsewhere)
    assert supported()["llava"] == "elsewhere"


class Elsewhere(LlavaAdapter):
    family = "elsewhere"


def test_rows_are_padded_on_the_asked_side() -> None:
    image = single_crop(torch.eye(4), torch.eye(4), (2, 2))
    span = Span(np.arange(1, 5), image, image.keep([np.array([1, 3])]))
    valid = np.array([[True] * 6, [True] * 5 + [False]])
    left, _ = compact(valid, [[span], [span]], torch.device("cpu"))
    assert left.origin.tolist() == [[0, 2, 4, 5], [-1, 0, 2, 4]]
    right, _ = compact(valid, [[span], [span]], torch.device("cpu"), pad_right=True)
    assert right.origin.tolist() == [[0, 2, 4, 5], [0, 2, 4, -1]]
    rows = left.gather(torch.arange(12.0).view(2, 6, 1))
    assert rows[..., 0].tolist() == [[0, 2, 4, 5], [6, 6, 8, 10]]
    assert not span.unchanged
    assert Span(np.arange(1, 5), image, image.keep([np.arange(4)])).unchanged


def test_a_reduction_cannot_keep_what_the_model_drops() -> None:
    layout = canvas_layout(4, 2, 2, (100, 200))
    lost = ImageLayout(layout.crops[1:2], layout.length)
    with pytest.raises(ValueError, match="keeps token 0 of crop 0, which the model drops"):
        lost.keep([np.array([0, 15])])
    with pytest.raises(ValueError, match="names crop 3"):
        lost.offsets_of(np.array([[3, 0]]))


def test_padding_is_read_from_every_kind_of_mask_and_custom_ones_are_refused() -> None:
    flat = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    causal = torch.ones(4, 4, dtype=torch.bool).tril() & flat.bool()[:, None, None]
    wide = torch.cat([causal, torch.zeros(2, 1, 4, 3, dtype=torch.bool)], dim=-1)
    additive = torch.zeros(wide.shape).masked_fill(~wide, torch.finfo(torch.float32).min)
    for mask in (flat, causal, wide, additive, {"full_attention": wide}):
        assert np.array_equal(padding_of(mask, 4), flat.bool().numpy())
    assert padding_of(None, 4) is None
    assert padding_of(torch.ones(2, 4), 4) is None
    with pytest.raises(ValueError, match="custom 4-D attention_mask"):
        padding_of(torch.ones(1, 1, 4, 4, dtype=torch.bool), 4)
    with pytest.raises(ValueError, match="cannot be pruned"):
        padding_of(object(), 4)


def test_importing_the_package_and_its_methods_loads_no_model_library() -> None:
    code = (
        "import sys, stacktok; from stacktok import StackTok; StackTok(budget=4); import stacktok.methods; "
        "print(sorted(m for m in ('transformers', 'typer', 'rich', 'PIL', 'accelerate') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("settings", [{"budget": 1.5}, {"budget": True}, {"tau_vision": 0.0}, {"positions": "gapped"}])
def test_nonsense_parameters_are_refused_when_the_method_is_made(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        StackTok(**settings)


def test_the_method_has_every_parameter_of_the_selector_under_its_name_and_default() -> None:
    method = StackTok()
    for field in dataclasses.fields(Parameters):
        expected = None if field.name == "tau_query" else field.default
        assert getattr(method, field.name) == expected, field.name
    assert method.parameters() == Parameters()
    assert method.parameters(tau_query=0.01).tau_query == 0.01
    assert StackTok(tau_query=0.5).parameters(tau_query=0.01).tau_query == 0.5


def test_stacktok_selects_on_features_without_a_model() -> None:
    generator = torch.Generator().manual_seed(0)
    vision, projected, query = (torch.randn(n, 8, generator=generator) for n in (30, 30, 4))
    eligible = torch.arange(30) % 2 == 0
    found = StackTok(budget=6, relevance_depth=2).select(vision, projected, query, eligible)
    assert found == select(vision, projected, query, 6, eligible=eligible, relevance_depth=2)
    with pytest.raises(ValueError, match="budget=None keeps everything"):
        StackTok().select(vision, projected, query)


def test_stacktok_is_frozen_and_compares_by_its_parameters() -> None:
    method = StackTok(budget=64)
    assert method == StackTok(budget=64)
    assert hash(method) == hash(StackTok(budget=64))
    with pytest.raises(AttributeError):
        method.budget = 3  # type: ignore[misc]
