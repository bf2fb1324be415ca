"""Golden tests on what is drawn, not on pixels."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import stacktok
from stacktok.cli.show import draw
from stacktok.core.notebook import grid_of
from stacktok.evaluation.paper import published_cross_model, published_rows
from stacktok.figures.files import save
from stacktok.figures.image import panel_data, relevance_maps, tile_layout
from stacktok.figures.kept import COVERAGE, RELEVANCE, draw_kept
from stacktok.figures.results import (
    RADIAL,
    Step,
    difference_data,
    draw_differences,
    draw_floating,
    draw_radar,
    floating_data,
    radar_data,
)
from stacktok.figures.trajectory import candidate_data, draw_nominees, draw_trajectory, nominee_data
from stacktok.methods import DivPrune, Spotlight, StackTok, VisionZip
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


def scores(method, budget):
    found = [r for r in published_rows() if (r.model, r.method, r.budget) == ("LLaVA-1.5-7B", method, budget)]
    return next(row for row in found if not row.fine_tuned).scores


def selection(m=3, n=36, k=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(size, 8, generator=generator) for size in (n, n, m)]
    return stacktok.select(*rows, k)


def drawing():
    """Everything that a run draws with clips, gradients and hatches of its own."""
    figure = Figure(layout="constrained")
    first, second = figure.subplots(1, 2)
    record = selection()
    draw_trajectory(first, record, candidate_data(record, np.eye(36, dtype=np.float32), np.ones(36, dtype=bool)))
    draw_kept(second, np.ones((36, 36, 3)), (6, 6), [1, 7], ["relevance", ""], eligible=np.arange(36) > 3)
    return figure


def saved(figure, ending="svg"):
    stream = io.BytesIO()
    figure.savefig(stream, format=ending)
    return stream.getvalue()


def legend(owner):
    """Texts of the legend of axes or of a figure."""
    found = owner.get_legend() if hasattr(owner, "get_legend") else owner.legends[0]
    return [text.get_text() for text in found.get_texts()]


def test_the_radar_shows_table_3_and_annotates_the_tightest_budgets():
    data = radar_data(published_cross_model())
    assert len(data.spokes) == 12
    assert data.spokes[:3] == (("LLaVA-1.5-7B", "192"), ("LLaVA-1.5-7B", "128"), ("LLaVA-1.5-7B", "64"))
    assert set(data.values) == {"VisionZip", "DivPrune", "MMTok", "StackTok"}
    assert [value for _, value in data.notes] == [96.66, 96.54, 95.26, 95.21]
    figure = Figure()
    axes = figure.add_subplot(projection="polar")
    draw_radar(axes, data)
    assert axes.get_ylim() == RADIAL == (89, 101)
    assert {text.get_text() for text in axes.texts} == {"96.66", "96.54", "95.26", "95.21"}
    drawn = {line.get_label(): line.get_ydata()[:-1].tolist() for line in axes.lines}
    assert drawn["StackTok"] == list(data.values["StackTok"])


def test_difference_bars_follow_table_1_with_a_near_zero_class():
    bars = difference_data(scores("StackTok", "64"), scores("MMTok", "64"), scores("Vanilla", "576"))
    kinds = {bar.benchmark: bar.kind for bar in bars}
    # The text: the largest gains are on MMB and SQA; StackTok trails on MME, TextVQA and SEED.
    assert [bar.benchmark for bar in bars[:2]] == ["mmb", "sqa"]
    assert {name for name, kind in kinds.items() if kind == "loss"} == {"mme", "textvqa", "seed"}
    assert {name for name, kind in kinds.items() if kind == "near zero"} == {"vqav2", "mmmu"}
    axes = Figure().subplots()
    draw_differences(axes, bars)
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([bar.points for bar in bars])
    looks = {bar.kind: patch.get_facecolor() for patch, bar in zip(axes.patches, bars, strict=True)}
    assert legend(axes) == ["ahead", "behind", "within 0.1 points"]
    assert [handle.get_facecolor() for handle in axes.get_legend().get_patches()] == [
        looks[kind] for kind in ("gain", "loss", "near zero")
    ]


def test_floating_bars_follow_table_a1():
    rows = [r for r in published_rows() if r.model == "Qwen2.5-VL-7B" and r.method == "StackTok"]
    steps = floating_data([(row.budget, row.average) for row in rows])
    assert steps[0] == Step("100% → 20%", 100.0, 95.79)
    assert [round(step.end - step.start, 2) for step in steps] == [-4.21, -5.99, -9.80]
    axes = Figure().subplots()
    draw_floating(axes, steps)
    assert [(p.get_y(), p.get_y() + p.get_height()) for p in axes.patches] == [
        pytest.approx((step.end, step.start)) for step in steps
    ]


def test_the_trajectory_marks_every_addition_by_its_criterion():
    record = selection()
    axes = Figure().subplots()
    draw_trajectory(axes, record)
    marked = {}
    for collection in axes.collections:
        label = collection.get_label()
        if label.startswith("added by "):
            marked[label.removeprefix("added by ")] = collection.get_offsets()
    assert sum(len(points) for points in marked.values()) == record.k
    for name, points in marked.items():
        steps = [t + 1 for t, criterion in enumerate(record.criterion) if criterion == name]
        assert points[:, 0].tolist() == steps
        assert points[:, 1].tolist() == record.coverage[steps].tolist()
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert lines["support target"].tolist() == record.target.tolist()
    assert lines["coverage-only reference"].tolist() == record.reference.tolist()


def test_faded_candidates_are_additions_that_the_run_could_have_made():
    generator = torch.Generator().manual_seed(0)
    vision, projected, query = (torch.randn(size, 8, generator=generator) for size in (36, 36, 3))
    eligible = np.arange(36) % 5 > 0
    record = stacktok.select(vision, projected, query, 12, eligible=eligible)
    _, affinity = stacktok.affinities(vision, projected, query)
    found = candidate_data(record, affinity, eligible, per_step=4)
    assert np.bincount(found.steps).tolist() == [4] * 12
    for step, token, value in zip(found.steps.tolist(), found.tokens.tolist(), found.coverage.tolist(), strict=True):
        before = record.order[:step].tolist()
        assert token not in record.order[: step + 1]
        assert eligible[token]
        assert value == pytest.approx(affinity[:, [*before, token]].max(axis=1).mean(dtype=np.float64), abs=1e-12)
    # The range of what was possible is shown: at every step the best and the worst of the others.
    for step in range(12):
        left = np.setdiff1d(np.flatnonzero(eligible), record.order[: step + 1])
        kept = record.order[:step].tolist()
        possible = [affinity[:, [*kept, token]].max(axis=1).mean(dtype=np.float64) for token in left.tolist()]
        own = found.coverage[found.steps == step]
        assert (own.max(), own.min()) == pytest.approx((max(possible), min(possible)), abs=1e-12)
    axes = Figure().subplots()
    draw_trajectory(axes, record, found)
    drawn = {collection.get_label(): collection for collection in axes.collections}
    offsets = drawn["not chosen"].get_offsets()
    assert offsets[:, 0].tolist() == (found.steps + 1).tolist()
    assert offsets[:, 1].tolist() == found.coverage.tolist()
    whole = candidate_data(stacktok.select(vision, projected, query, 36), affinity, np.ones(36, dtype=bool))
    assert whole.steps.max() == 34
    with pytest.raises(ValueError, match="per_step=0 must be at least 1"):
        candidate_data(record, affinity, eligible, per_step=0)


def test_nominees_are_those_of_the_run():
    generator = torch.Generator().manual_seed(1)
    crops = [stacktok.Crop(*(torch.randn(16, 8, generator=generator) for _ in range(2))) for _ in range(3)]
    record = stacktok.select_crops(crops, torch.randn(2, 8, generator=generator), 10)
    data = nominee_data(record)
    assert data.winners.tolist() == [crop for crop, _ in record.order]
    for step, (crop, token) in enumerate(record.order):
        local = record.crops[crop].order.tolist().index(token)
        assert data.criteria[step] == record.crops[crop].criterion[local]
        assert data.gains[step, crop] == np.nanmax(data.gains[step])
    axes = Figure().subplots()
    draw_nominees(axes, record)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        f"{name}: {crop.k}" for name, crop in zip(("base view", "tile 1", "tile 2"), record.crops, strict=True)
    ]
    assert sum(len(c.get_offsets()) for c in axes.collections) == int(np.isfinite(data.gains).sum())
    winners = [f"got the slot, by {name}" for name in dict.fromkeys(data.criteria)]
    assert legend(axes) == [*winners, "nominee of a crop that did not"]
    assert axes.get_ylabel() == "crop: tokens it got"


@pytest.mark.parametrize(
    ("family", "size"), [("llava", (96, 96)), ("llava_next", (96, 64)), ("qwen2_5_vl", (168, 112))]
)
def test_panels_hold_what_was_kept_in_every_family(family, size):
    built, picture = tiny.build(family), tiny.picture(*size)
    inputs = built.inputs(["Is there a dog?"], [[picture]])
    with StackTok(budget=9)(built.model, built.processor) as pruned:
        built.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    result = pruned.last[0]
    panels = panel_data(result.image, result.reduction)
    assert sum(panel.tokens for panel in panels) == sum(len(panel.indices) for panel in panels) == 9
    assert sum(panel.share for panel in panels) == pytest.approx(1)
    selections = [result.selection] if len(panels) == 1 else result.selection.crops
    steps = sorted(step for panel in panels for step in panel.numbers if step)
    assert len(set(steps)) == len(steps)
    for panel, crop, chosen in zip(panels, result.image.crops, selections, strict=True):
        assert panel.grid == crop.grid
        assert list(panel.indices) == chosen.indices.tolist()
        assert (panel.eligible == crop.eligible).all()
        assert all(crop.eligible[index] for index in panel.indices)


def test_merged_tokens_are_regions():
    built, picture = tiny.build("llava"), tiny.picture(96, 96)
    inputs = built.inputs(["Is there a dog?"], [[picture]])
    with VisionZip(budget=10)(built.model, built.processor) as pruned:
        built.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    reduction = pruned.last[0].reduction
    panel = panel_data(pruned.last[0].image, reduction)[0]
    assert panel.regions
    assert {frozenset(region) for region in panel.regions} == {
        frozenset(sources[:, 1].tolist()) for sources in reduction.merged.values() if len(sources)
    }
    assert panel.numbers is None
    # CLS is one of the ten and has no place on the image.
    assert panel.tokens == 10
    assert len(panel.indices) == len(set(panel.indices)) == 9


def test_relevance_maps_are_the_selectors_affinities_per_word():
    built = tiny.build("llava")
    inputs = built.inputs(["dog"], [[tiny.picture(96, 96)]])
    with StackTok(budget=9)(built.model, built.processor) as pruned:
        built.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    image = pruned.last[0].image
    words = {"dog": torch.randn(2, 32), "cat": torch.randn(1, 32)}
    maps = relevance_maps(image, ["dog", "cat", "dog"], words)
    assert list(maps) == ["dog", "cat"]
    assert maps["dog"][0].shape == (6, 6)
    z = torch.nn.functional.normalize(image.crops[0].projected.double(), dim=1)
    q = torch.nn.functional.normalize(words["dog"].double(), dim=1)
    expected = torch.softmax(q @ z.T / 0.02, dim=1).mean(0).numpy()
    np.testing.assert_allclose(maps["dog"][0].reshape(-1), expected, atol=1e-4)


def test_tiles_stand_as_the_model_lays_them_out():
    processor = tiny.build("llava_next").processor
    assert tile_layout(processor, (56, 112), 3) == (1, 2)
    assert tile_layout(processor, (112, 56), 3) == (2, 1)
    assert tile_layout(tiny.build("llava").processor, (64, 96), 1) is None


def test_show_draws_methods_and_budgets_in_one_figure_with_hatched_padding():
    built, picture = tiny.build("llava_next"), tiny.picture(120, 50)
    question = "Is there a dog?"
    inputs = built.inputs([question], [[picture]])
    figures = draw(built.model, built.processor, inputs, picture, question, [StackTok(), VisionZip()], [12, 5])
    assert set(figures) == {"kept", "relevance", "nominees", "trajectory"}
    svg = saved(figures["kept"]).decode()
    assert RELEVANCE in svg or COVERAGE in svg
    spots = [axes for axes in figures["kept"].axes if axes.images]
    titles = [axes.get_title() for axes in spots]
    assert sum(title.startswith("base view: ") for title in titles) == 4
    assert any(patch.get_hatch() for axes in spots for patch in axes.patches)
    words = [axes.get_title() for axes in figures["relevance"].axes if axes.get_title()]
    assert words == ["there", "dog"]
    # A row of the relevance figure is a crop, named at its left.
    rows = [axes.get_ylabel() for axes in figures["relevance"].axes][:: len(words)]
    crops = len(rows)
    assert rows == ["base view", *(f"tile {number}" for number in range(1, crops))]
    assert crops * 4 == len(spots)
    assert "padding" in legend(figures["kept"])
    assert figures["trajectory"].axes[0].get_title().startswith("base view: strictness")
    for figure in figures.values():
        assert saved(figure, "png").startswith(b"\x89PNG")


def test_a_legend_names_what_is_drawn_and_nothing_else():
    built, picture = tiny.build("llava"), tiny.picture(96, 96)
    inputs = built.inputs(["Is there a dog?"], [[picture]])
    square, merged = "kept by another rule", "merged into one token"
    for method, others in (
        (StackTok(swap_limit=0), set()),
        (DivPrune(), {square}),
        (VisionZip(), {square, merged}),
    ):
        figure = draw(built.model, built.processor, inputs, picture, "Is there a dog?", [method], [18])["kept"]
        (axes,) = (axes for axes in figure.axes if axes.images)
        assert not any(patch.get_hatch() for patch in axes.patches)
        names = {"#e8731a": "picked by relevance to the question", "#006964": "picked to cover the image"}
        colours = {to_hex(own.get_facecolor()[0]) for own in axes.collections if isinstance(own, PathCollection)}
        assert any(isinstance(own, LineCollection) for own in axes.collections) == (merged in others)
        assert set(legend(figure)) == {names[colour] for colour in colours & set(names)} | others


def test_show_draws_the_weights_of_a_method_that_has_them():
    built, picture = tiny.build("llava_next"), tiny.picture(120, 50)
    inputs = built.inputs(["Is there a dog?"], [[picture]])
    figures = draw(built.model, built.processor, inputs, picture, "Is there a dog?", [Spotlight()], [5])
    assert set(figures) == {"kept", "relevance", "weights", "nominees", "trajectory"}
    with Spotlight(budget=5)(built.model, built.processor) as pruned:
        built.model(**inputs)
    weights = [crop.row_weights for crop in pruned.last[0].selection.crops]
    drawn = [axes.get_xlabel() for axes in figures["weights"].axes]
    assert drawn == [f"brightest token: {100 * own.max():.1f} %" for own in weights]


def test_a_picture_in_patches_lies_on_its_grid_with_the_steps_written_on_demand():
    built, picture = tiny.build("qwen2_5_vl"), tiny.picture(230, 120)
    question = "Is there a dog?"
    inputs = built.inputs([question], [[picture]])
    for numbered in (False, True):
        figures = draw(built.model, built.processor, inputs, picture, question, [StackTok()], [6], numbered=numbered)
        (axes,) = (axes for axes in figures["kept"].axes if axes.images)
        (shown,) = axes.images
        assert shown.get_extent() == [0, 8, 4, 0]
        assert shown.get_array().shape == (4 * 28, 8 * 28, 3)
        written = [text.get_text() for text in axes.texts]
        assert set(written) <= {str(step) for step in range(1, 7)}
        assert bool(written) == numbered


def test_the_same_data_give_the_same_bytes_in_another_process(tmp_path):
    program = (
        "import runpy, sys\n"
        "from pathlib import Path\n"
        "from stacktok.figures.files import save\n"
        "published = runpy.run_path('docs/make_figures.py')['published']\n"
        "from tests.figures.test_drawn_data import drawing\n"
        "figures = {'run': drawing(), **published()}\n"
        "for name, figure in figures.items():\n"
        "    save(figure, Path(sys.argv[1]) / (name + '.svg'))\n"
        "    save(figure, Path(sys.argv[1]) / (name + '.png'))\n"
    )
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": f"{seed}0000000"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, env=environment, check=True)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert len(written[0]) == 8
    assert written[0] == written[1]
    with pytest.raises(ValueError, match=r"ends in '\.pdf'; use \.svg or \.png"):
        save(Figure(), tmp_path / "a.pdf")


def test_a_selection_shows_itself_in_a_notebook():
    record = selection()
    page = record._repr_html_()
    assert page.count("<circle") == sum(record.criterion[i] == "relevance" for i in range(record.k))
    assert page.count("<title>") == record.k
    assert "Selection(12 of 36 tokens" in page
    assert grid_of(36) == (6, 6)
    assert grid_of(24) == (6, 4)
    assert grid_of(7) == (2, 6)
    assert grid_of(1) == (1, 1)
