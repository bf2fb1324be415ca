"""The benchmark's figures come from the run they claim to come from; no test looks at how long anything took."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import stacktok
from stacktok import StackTok
from stacktok.bench import PRESETS, preset, run, selection
from stacktok.bench.flops import language_work, work_of
from stacktok.bench.measure import cache_bytes
from stacktok.bench.presets import preset_config, processed
from stacktok.models.registry import BUILT_IN, adapter_for
from tests.bench.published import PUBLISHED
from tests.core.cases import affinities
from tests.tiny import MROPE, build, picture
from tests.tiny_tiles import TILES


@pytest.fixture(scope="module")
def shape() -> Any:
    return preset("tiny", torch.float32)


def test_a_report_counts_tokens_cache_bytes_and_repeats(shape: Any) -> None:
    model, processor, inputs = shape
    # The model sets up its own recording of hidden states on first use.
    model.generate(**inputs, max_new_tokens=1)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    told: list[str] = []
    methods = [StackTok(budget=192), StackTok(budget=0.1)]
    report = run(model, processor, inputs, methods, name="tiny", new_tokens=3, repeats=2, progress=told.append)
    text = inputs["input_ids"].shape[1] - 576
    assert [m.tokens for m in report.measurements] == [576, 192, 57]
    assert [m.columns for m in report.measurements] == [text + 576, text + 192, text + 57]
    # 2 layers x keys and values x 2 heads x 16 x 4 bytes per column.
    assert [m.cache_bytes for m in report.measurements] == [m.columns * 512 for m in report.measurements]
    for measurement in report.measurements:
        assert all(len(values) == 2 for values in measurement.repeats.values())
        assert min(measurement.vision, measurement.prefill, measurement.decode, measurement.stock_prefill) > 0
        assert (measurement.selection > 0) == (measurement.budget is not None)
    # Interleaved: every repeat visits every budget.
    assert [line.split(": ")[1] for line in told[:6]] == [
        "full tokens",
        "StackTok, budget 192",
        "StackTok, budget 0.1",
    ] * 2
    rows = report.rows()
    assert rows[0]["prefill speed-up"] == rows[0]["ideal"] == 1.0
    assert rows[2]["ideal"] > rows[1]["ideal"] > 1
    assert "| 192 | 192 |" in report.markdown()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_work_is_counted_from_the_shapes(shape: Any) -> None:
    model, _, inputs = shape
    # q, k, v, o and three feed-forward matrices, two layers.
    weights = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    columns = 10
    attention = sum(4 * 2 * 64 * (seen + 1) for seen in range(columns))
    assert language_work(weights, 64, 2, columns) == 2 * weights * columns + attention
    work = work_of(model, adapter_for(model), inputs, columns, new_tokens=3)
    head = 2 * 64 * 512
    assert work.prefill == 2 * weights * columns + attention + head
    assert work.decode == sum(2 * weights + 4 * 2 * 64 * (past + 1) + head for past in (10, 11))
    assert work.vision > 0


def test_cache_bytes_counts_keys_and_values() -> None:
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    assert cache_bytes(cache) == 2 * 40 * 4


def test_presets_have_the_published_numbers_of_tokens() -> None:
    assert {name: PRESETS[name].budgets for name in ("llava-1.5-7b", "llava-next-7b", "qwen2.5-vl-7b")} == {
        "llava-1.5-7b": (192, 128, 64),
        "llava-next-7b": (640, 320, 160),
        "qwen2.5-vl-7b": ("20%", "10%", "5%"),
    }
    with pytest.raises(ValueError, match="preset 'x' is not known"):
        preset("x")


@pytest.mark.parametrize(("repeats", "new_tokens"), [(0, 4), (1, 1)])
def test_nonsense_settings_are_refused(shape: Any, repeats: int, new_tokens: int) -> None:
    with pytest.raises(ValueError, match="give at least"):
        run(*shape, [], name="tiny", repeats=repeats, new_tokens=new_tokens)


def test_the_torch_loop_of_selection_is_mmtok() -> None:
    """By the selector's own scalarized run, on affinities without ties."""
    a_qv, a_vv = affinities(40, 5, seed=3)
    expected = stacktok.select_from_affinities(a_qv, a_vv, 12, criterion="scalarized", alpha=0.5, swap_limit=0)
    found = selection.torch_loop(torch.from_numpy(a_qv).double(), torch.from_numpy(a_vv).double(), 12, 0.5)
    assert found.tolist() == expected.order.tolist()


def test_selection_is_measured_for_every_size_that_is_asked_for() -> None:
    sizes = (selection.Size(30, 4, 1), selection.Size(30, 4, 2))
    lines = list(selection.table(torch.device("cpu"), sizes, repeats=1))
    assert [line.split(" | ")[:4] for line in lines[3:]] == [["| 30", "4", "1", "cpu"], ["| 30", "4", "2", "cpu"]]


def test_predictions_grow_with_the_work_and_leave_room_for_measurements() -> None:
    small, large = (selection.Size(n, 64, 8) for n in (576, 4096))
    for gpu in selection.GPUS:
        assert selection.predicted_seconds(small, gpu) < selection.predicted_seconds(large, gpu)
        assert selection.predicted_seconds(selection.Size(16384, 64, 1), gpu) is None
    assert all(line.endswith("|  |") for line in list(selection.prediction())[2:])


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_sizes_of_published_configurations(name: str) -> None:
    config = json.loads(preset_config(name)[0].to_json_string(use_diff=False))
    model = PUBLISHED[name]
    assert config["model_type"] == model.type
    for part, sizes in ((config["text_config"], model.text), (config["vision_config"], model.vision)):
        assert {key: part[key] for key in sizes} == sizes
    assert {key: config[key] for key in model.own} == model.own


def test_presets_without_a_published_configuration_are_named() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {
        *(f"{family}-1b" for family in ("llava-1.5", "llava-next", "qwen2.5-vl", "gemma3", "gemma4", "mistral3")),
        "tiny",
    }


# The tokens that the family's own processor gives a picture of the preset's size.
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen2-vl-2b", 1296),
        ("qwen3-vl-8b", 1024),
        ("qwen3-vl-30b-a3b", 1024),
        ("qwen3.5-0.8b", 1024),
        ("internvl3-8b", 5 * 256),
        ("llava-onevision-0.5b", 729 + 54 * 55),
        ("gemma3-4b", 256),
        ("gemma4-1b", 256),
        ("smolvlm2-500m", 17 * 64),
        ("mistral-small-3-24b", 36 * 36),
        ("glm-4.1v-9b", 1296),
        ("glm-ocr-0.9b", 1296),
    ],
)
def test_pictures_of_presets_have_the_tokens_of_their_processor(name: str, tokens: int) -> None:
    config, _ = preset_config(name)
    _, inputs = processed(PRESETS[name], torch.float32)
    assert int((inputs["input_ids"] == config.image_token_id).sum()) == tokens


def test_every_family_has_a_preset_that_fits_a_small_machine() -> None:
    small = {p.family for name, p in PRESETS.items() if p.text[0] <= 2048}
    relatives = {"idefics3", "glm4v", "glm4v_moe", "glm46v"}
    assert small >= set(BUILT_IN) - relatives


@pytest.mark.parametrize("family", ["llava_next", *MROPE, *TILES])
def test_every_family_is_measured(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["Is there a dog?"], [[picture(160, 100)]])
    report = run(tiny.model, tiny.processor, inputs, [StackTok(budget=6)], name=family, new_tokens=2, repeats=1)
    full, pruned = report.measurements
    assert pruned.tokens == 6
    # Row breaks are text, and go with their rows.
    assert full.columns - pruned.columns - (full.tokens - 6) == (4 if family == "mistral3" else 0)
    assert full.work.vision == pruned.work.vision > 0
    assert full.work.prefill > pruned.work.prefill
    assert full.cache_bytes > pruned.cache_bytes
