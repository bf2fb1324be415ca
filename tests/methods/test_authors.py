"""Selections equal to those that the authors' code made of the same seeded features; see fixtures/README.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stacktok.core.tokens import EncodedImage, ImageLayout, TowerAttention
from stacktok.methods import (
    DART,
    CDPruner,
    DARTEmbeddings,
    DivPrune,
    FastV,
    LayerView,
    MMTok,
    PyramidDrop,
    SparseVLM,
    VisionZip,
)
from stacktok.methods.sparsevlm import density_peaks
from tests.methods.given_view import GivenView
from tests.methods.seeded import Case, attending, fixture, layer_states, tower


def image_of(case: Case, attention: list[TowerAttention] | None = None, padding: int = 0) -> EncodedImage:
    """The case's crops one behind the other; the first and last ``padding`` tokens of each may not be kept."""
    eligible = np.zeros((case.crops, case.n), dtype=np.bool_)
    eligible[:, padding : case.n - padding] = True
    layout = ImageLayout.raster(*[(1, case.n)] * case.crops).with_eligible(eligible.reshape(-1))
    image = EncodedImage.of(layout, case.vision().flatten(0, 1), case.projected().flatten(0, 1))
    return image.with_attention(attention) if attention else image


def kept_per_crop(method: Any, case: Case, padding: int = 0) -> list[list[int]]:
    """Indices that a method keeps of every crop, with k tokens per crop."""
    anchors = method.reduce(image_of(case, padding=padding), case.query(), case.k * case.crops).anchors
    return [sorted(anchors[anchors[:, 0] == c, 1].tolist()) for c in range(case.crops)]


@pytest.mark.parametrize(("case", "entry"), fixture("mmtok"))
def test_mmtok_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    found = kept_per_crop(MMTok(tau_query=entry["tau"]), case, entry["excluded"])
    for crop, (ours, theirs) in enumerate(zip(found, entry["kept"], strict=True)):
        # Where two gains are nearer to one another than float32 can tell, either token may be the one.
        assert len(set(ours) - set(theirs)) <= (crop in entry["tied"])


@pytest.mark.parametrize(("case", "entry"), fixture("divprune"))
def test_divprune_picks_in_the_order_of_the_authors_code(case: Case, entry: dict[str, Any]) -> None:
    found = DivPrune().reduce(image_of(case), None, case.k * case.crops)
    assert found.record.order.tolist() == entry["order"]


@pytest.mark.parametrize(("case", "entry"), fixture("visionzip"))
def test_visionzip_keeps_and_merges_what_the_authors_code_does(case: Case, entry: dict[str, Any]) -> None:
    seen = tower(case)
    attention = [
        TowerAttention(scores.sum(0), keys, cls, project=lambda rows: rows)
        for scores, keys, cls in zip(seen.attention, seen.keys, seen.cls, strict=True)
    ]
    record = VisionZip().reduce(image_of(case, attention), None, case.k * case.crops).record
    expected = zip(entry["dominant"], entry["targets"], entry["assigned"], case.vision(), strict=True)
    choices = (record,) if case.crops == 1 else record
    for choice, (dominant, targets, assigned, vision) in zip(choices, expected, strict=True):
        assert choice.order.tolist() == dominant + targets
        others = sorted(set(range(case.n)) - set(dominant) - set(targets))
        for number, target in enumerate(targets):
            group = [i for i, own in zip(others, assigned, strict=True) if own == number]
            assert choice.sources[target].tolist() == sorted([target, *group])
            merged = vision[target] + (vision[group].mean(0) if group else 0)
            torch.testing.assert_close(choice.embeddings[target], merged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "entry"), fixture("cdpruner"))
def test_cdpruner_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    method = CDPruner(budget=case.k, theta=entry["theta"])
    assert kept_per_crop(method, case) == entry["kept"]


def view_of(case: Case) -> GivenView:
    """The attention of a case."""
    given = attending(case)
    n, t = len(given.image), len(given.text)
    rotation = rotary_weights(torch.arange(t) + n, torch.arange(n)).float()
    return GivenView(given.image, given.text, given.probabilities[:, :, given.start : given.start + n], rotation)


def rotary_weights(rows: torch.Tensor, columns: torch.Tensor, size: int = 64, base: float = 10_000.0) -> torch.Tensor:
    """Products of rotated vectors of ones, (rows, columns): two cosines of the distance per frequency."""
    frequencies = base ** (-torch.arange(0, size, 2).double() / size)
    return 2 * ((rows[:, None, None] - columns[None, :, None]) * frequencies).cos().sum(-1)


@pytest.mark.parametrize(("case", "entry"), fixture("fastv"))
def test_fastv_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    view, method = view_of(case), FastV(counting="kept")
    assert method.keeps(32, len(view.states), case.k) == (case.k,)
    assert method.choose(view, case.k).tolist() == entry["kept"]


@pytest.mark.parametrize(("case", "entry"), fixture("sparsevlm"))
def test_sparsevlm_keeps_and_clusters_what_the_authors_code_does(case: Case, entry: dict[str, Any]) -> None:
    view = view_of(case)
    for variant, kept in entry["kept"].items():
        method = SparseVLM(variant=variant)
        assert method.raters(view).tolist() == entry["raters"]
        chosen: Any = method.choose(view, case.k)
        assert (chosen.kept if variant == "v1.5" else chosen).tolist() == kept
    centres, assigned = density_peaks(case.projected()[0], entry["clusters_asked"], case.seed)
    assert centres.tolist() == entry["centres"]
    assert assigned.tolist() == entry["assigned"]


def states_view(case: Case, padding: int = 0) -> LayerView:
    """The prompt of a case between two layers, with padding before it."""
    given = layer_states(case)
    total = len(given.states)
    states = torch.cat([torch.full((padding, given.states.shape[1]), 9.0), given.states])
    rows = [
        torch.nn.functional.pad(given.rotated(own), (0, 0, padding, 0), value=9.0)
        for own in (given.queries, given.keys)
    ]
    image = torch.arange(given.n) + given.start + padding
    text = torch.arange(given.start + given.n, total) + padding
    reading = (rows[0], rows[1], rows[0].shape[-1] ** -0.5)
    return LayerView(
        inputs=states,
        input_image=image,
        input_text=text,
        entered=states,
        left=states,
        valid=torch.arange(total + padding) >= padding,
        image=image,
        text=text,
        read=lambda: reading,
        read_next=lambda: reading,
        rotated_ones=lambda: states,
        norm=lambda rows: rows,
    )


@pytest.mark.parametrize(("case", "entry"), fixture("dart"))
def test_dart_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    method = DART()
    (k,) = method.keeps(32, case.n * case.crops, case.k * case.crops)
    assert k == len(entry["kept"])
    assert method.choose(states_view(case), k).tolist() == entry["kept"]
    assert method.choose(states_view(case, padding=3), k).tolist() == entry["kept"]


def test_dart_in_ascending_order_of_pivots_is_another_method() -> None:
    method = DART(pivot_order="ascending")
    same = [
        method.choose(states_view(case), len(entry["kept"])).tolist() == entry["kept"]
        for case, entry in fixture("dart")
    ]
    assert len(same) == 32
    assert 0 < sum(same) < 16


@pytest.mark.parametrize(("case", "entry"), fixture("dart_embeddings"))
def test_dart_on_embeddings_picks_in_the_order_of_edge_llm(case: Case, entry: dict[str, Any]) -> None:
    rows = case.projected().flatten(0, 1)
    found = DARTEmbeddings(budget=len(entry["order"])).select(rows, rows, case.query(rows=9))
    assert found.order.tolist() == entry["order"]


@pytest.mark.parametrize(("case", "entry"), fixture("pyramiddrop"))
def test_pyramiddrop_keeps_what_the_authors_code_keeps(case: Case, entry: dict[str, Any]) -> None:
    method, n = PyramidDrop(), case.n * case.crops
    counts = method.keeps(32, n, "46.875%")
    for count, kept in zip(counts, entry["kept"].values(), strict=True):
        assert count == len(kept)
        assert method.choose(states_view(case), count).tolist() == kept
