"""From features to the kept tokens' embeddings nothing reads the device: `make test-triton` runs this file.

There is no GPU here: features are on the pretended device of `tests.recording`, which notes what would make the host
wait. Triton's interpreter, which reads memory itself, is left out while it runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stacktok.core import reference
from stacktok.core.parameters import Parameters
from stacktok.core.tokens import DeviceReduction, EncodedImage, ImageLayout, TowerAttention
from stacktok.kernels.transfer import upload
from stacktok.methods.base import Asked
from stacktok.methods.cdpruner import CDPruner
from stacktok.methods.divprune import DivPrune
from stacktok.methods.mmtok import MMTok
from stacktok.methods.scope import SCOPE
from stacktok.methods.stacktok import StackTok
from stacktok.serving.fields import ImageRequest
from stacktok.serving.pruner import Pruner
from stacktok.serving.settings import Settings
from stacktok.serving.text import with_text
from tests.core.cases import affinities, features
from tests.recording import OnDevice, on_device, recorder  # noqa: F401 - a fixture

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets kernels where TRITON_INTERPRET=1 is set", allow_module_level=True)

from stacktok.core.device import keeps  # noqa: E402

SELECTOR = ["facility_location", "facility_location", "swaps"]
ONE, CROPS = [(4, 5)], [(2, 4), (3, 3), (2, 3)]


def encoded(grids, there, seed=0):
    """An image with the tower's attention, and a question."""
    layout = ImageLayout.raster(*grids)
    x, z, q = (torch.from_numpy(rows) for rows in features(layout.n, 3, seed=seed))
    scores = torch.from_numpy(np.random.default_rng(seed).random(layout.n).astype(np.float32))
    x, z, q, scores = (on_device(own) if there else own for own in (x, z, q, scores))
    sizes = [crop.n for crop in layout.crops]
    attention = map(TowerAttention, scores.split(sizes), x.split(sizes))
    return EncodedImage.of(layout, x, z).with_attention(list(attention)), q


@pytest.mark.parametrize(
    ("method", "grids", "launches"),
    [
        (StackTok(), ONE, SELECTOR),
        (MMTok(), ONE, SELECTOR),
        (MMTok(allocation="per_crop"), CROPS, SELECTOR),
        (StackTok(), CROPS, [*SELECTOR[:2], "merge", "swaps"]),
        (SCOPE(), ONE, ["facility_location"]),
        (SCOPE(), CROPS, ["facility_location"]),
        (DivPrune(), CROPS, ["max_min"]),
        (CDPruner(), CROPS, ["determinantal"]),
        (CDPruner(theta=0.5), ONE, ["determinantal"]),
    ],
)
def test_nothing_waits_between_features_and_kept_embeddings(method, grids, launches, recorder):  # noqa: F811
    """Two images with questions and budgets of their own: each kernel is launched once."""
    batch = [encoded(grids, True), encoded([(3, 4)], True, seed=1)]
    with recorder.noting():
        asked = [Asked(method.prepare(image), q, k) for (image, q), k in zip(batch, (7, 4), strict=True)]
        found = method.reduce_batch(asked)
        kept = []
        for (image, _), reduction in zip(batch, found, strict=True):
            kept.append(image.gather(torch.cat([crop.projected for crop in image.crops]), reduction))
        sizes = [len(reduction) for reduction in found]
    assert recorder.waits == []
    assert [name for name, _ in recorder.launches] == launches
    # Looking at it reads the device, and finds what the host's backend keeps.
    for number, (own, k) in enumerate(((grids, 7), ([(3, 4)], 4))):
        image, q = encoded(own, False, seed=number)
        expected, reduction = method.prepare(image).reduce(q, k), found[number]
        assert isinstance(reduction, DeviceReduction)
        assert sizes[number] == len(expected)
        assert np.array_equal(reduction.anchors, expected.anchors)
        rows = torch.cat([crop.projected for crop in image.crops])
        assert torch.equal(kept[number].cpu(), image.gather(rows, expected))
        record, wanted = (one if isinstance(one, tuple) else (one,) for one in (reduction.record, expected.record))
        for one, other in zip(record, wanted, strict=True):
            assert np.array_equal(one.order, other.order)
        assert np.array_equal(reduction.read().anchors, expected.anchors)


def test_the_model_half_of_the_server_waits_for_nothing(recorder):  # noqa: F811
    """Two requests in one batch, one of an image that is cached; rows with text between them, and the cache itself."""
    images = {b"a": encoded(CROPS, True), b"b": encoded([(3, 4)], True, seed=1)}
    table = on_device(torch.from_numpy(np.random.default_rng(5).normal(size=(9, 24)).astype(np.float32)))
    server = Pruner(Settings(StackTok(budget=5)), log=False)

    def embed(*wanted):
        asked = [ImageRequest(5, torch.tensor([1, 4 + n]), key, None, n) for n, key in enumerate(wanted)]
        return server.embed(
            asked, lambda indices: [images[wanted[i]][0] for i in indices], lambda ids: table[ids], table.device
        )

    embed(b"b")
    recorder.launches.clear()
    with recorder.noting():
        kept = embed(b"a", b"b")
        text = torch.tensor([[3, 3, 2], [0, 8, 17]])
        whole = with_text(kept[0], text, table[upload(text[0], table.device)])
    assert recorder.waits == []
    assert [name for name, _ in recorder.launches] == ["facility_location", "facility_location", "merge", "swaps"]
    assert server.counters.encoder_cache_hits == 1
    # Texts stand where they stood: behind as many of the kept tokens as lie before them.
    offsets = kept[0].offsets.tolist()
    keys = sorted([2 * offset for offset in offsets] + [2 * before - 1 for before in (0, 8, 17)])
    texts = {-1: -1, 15: -2, 33: -3}
    assert whole.offsets.tolist() == [texts.get(key, key // 2) for key in keys]
    image, _ = encoded(CROPS, False)
    rows = torch.cat([crop.projected for crop in image.crops])
    assert torch.equal(kept[0].rows.cpu(), rows[offsets])


@pytest.mark.parametrize("seed", range(3))
def test_strictness_of_a_tensor_is_that_of_an_array(seed):
    a_qv, _ = affinities(30, 4, seed=seed)
    expected = reference.strictness(a_qv, Parameters())
    assert float(reference._tensor_strictness(torch.from_numpy(a_qv), Parameters())) == pytest.approx(expected, 1e-12)


WAITS = {
    "numbers": lambda there: there.tolist(),
    "a truth": lambda there: bool(there[0] > 1),
    "a copy": lambda there: there.cpu(),
    "a search": lambda there: there.nonzero(),
    "a mask": lambda there: there[there > 1],
    "an assignment by a mask": lambda there: there.__setitem__(there > 1, there[:1]),
    "indices of the host": lambda there: there[[0, 1]],
    "a comparison": lambda there: torch.equal(there, there),
    "pageable memory": lambda there: torch.arange(3.0).to(there.device),
    "pageable memory, not blocking": lambda there: torch.arange(3.0).to(there.device, non_blocking=True),
    "a new tensor": lambda there: torch.tensor([1.0], device=there.device),
}


@pytest.mark.parametrize("wait", WAITS)
def test_what_waits_is_noticed(wait, recorder):  # noqa: F811
    there = on_device(torch.arange(3.0))
    with recorder.noting():
        WAITS[wait](there)
    assert recorder.waits


def test_what_does_not_wait_is_not_noted(recorder):  # noqa: F811
    there = on_device(torch.arange(3.0))
    with recorder.noting():
        found = there[there.sort().indices[:2]] + torch.arange(2, device=there.device)
        found += torch.arange(2.0).pin_memory().to(there.device, non_blocking=True)
    assert isinstance(found, OnDevice)
    assert recorder.waits == []


def test_settings_that_need_the_host_in_between_are_decided_there():
    image, _ = encoded([(2, 3), (2, 2)], False)
    for settings in ({"allocation": "proportional"}, {"swap_passes": None}):
        units = StackTok(backend="triton", **settings).prepare(image).units
        assert not keeps([unit.reference for unit in units], units[0].parameters)


@pytest.mark.parametrize("method", [StackTok(), DivPrune()])
def test_features_that_are_not_finite_are_refused_when_the_record_is_looked_at(method, recorder):  # noqa: F811
    image, query = encoded([(2, 3)], False)
    image.crops[0].projected[4, 0] = float("nan")
    crop = replace(
        image.crops[0], **{name: on_device(getattr(image.crops[0], name)) for name in ("vision", "projected")}
    )
    reduction = method.prepare(replace(image, crops=(crop,))).reduce(on_device(query), 2)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        reduction.record  # noqa: B018
