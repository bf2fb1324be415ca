"""The cache of unpruned encoder outputs."""

from __future__ import annotations

import numpy as np
import torch

from stacktok.core.tokens import EncodedImage, single_crop
from stacktok.methods import method_class
from stacktok.models.llava_next import canvas_layout
from stacktok.serving.cache import FeatureCache, image_bytes
from stacktok.serving.counters import Counters
from stacktok.serving.fields import ALL, PROFILE, ImageRequest, pack, unpack
from stacktok.serving.pruner import Pruner, image_rows
from stacktok.serving.settings import Settings

HOST = torch.device("cpu")


def image(seed: int, n: int = 16) -> EncodedImage:
    generator = torch.Generator().manual_seed(seed)
    return single_crop(torch.randn(n, 4, generator=generator), torch.randn(n, 8, generator=generator), (4, n // 4))


def test_what_was_used_longest_ago_goes_first() -> None:
    size = image_bytes(image(0))
    cache = FeatureCache(2 * size)
    for key in ("a", "b"):
        cache.put(key, image(0))
    assert cache.get("a", HOST) is not None
    cache.put("c", image(1))
    assert cache.get("b", HOST) is None
    assert cache.get("a", HOST) is not None
    assert cache.get("c", HOST) is not None
    assert cache.bytes == 2 * size
    assert len(cache) == 2


def test_its_size_is_bounded_whatever_is_put_in() -> None:
    cache = FeatureCache(5000)
    for seed in range(50):
        cache.put(seed % 7, image(seed, 4 * (1 + seed % 30)))
        assert cache.bytes <= 5000
        assert cache.bytes == sum(image_bytes(found.image) for found in cache._images.values())
    assert len(cache)


def test_an_image_larger_than_the_cache_is_not_kept_and_replaces_nothing() -> None:
    cache = FeatureCache(image_bytes(image(0)))
    cache.put("small", image(0))
    cache.put("large", image(0, 64))
    assert cache.get("large", HOST) is None
    assert cache.get("small", HOST) is not None
    assert FeatureCache(0).get("x", HOST) is None


def test_cached_features_do_not_hold_on_to_the_batch() -> None:
    batch = torch.randn(5, 16, 8)
    cache = FeatureCache(1 << 20)
    cache.put("x", single_crop(batch[1], batch[1], (4, 4)))
    found = cache.get("x", HOST)
    assert found is not None
    assert torch.equal(found.crops[0].projected, batch[1])
    assert found.crops[0].projected.untyped_storage().nbytes() == batch[1].numel() * 4


def asked(key: bytes, keep: int, query: tuple[int, ...] = ()) -> ImageRequest:
    return ImageRequest(keep, torch.tensor(query, dtype=torch.long), key, None)


def test_two_questions_in_one_batch_encode_an_image_once() -> None:
    pruner = Pruner(Settings.read({"budget": 5}))
    runs: list[list[int]] = []

    def encode(indices: list[int]) -> list[EncodedImage]:
        runs.append(indices)
        return [image(index) for index in indices]

    table = torch.randn(10, 8)
    wanted = [asked(b"a", 5, (1,)), asked(b"b", 5, (1,)), asked(b"a", 5, (2,)), asked(b"a", ALL)]
    kept = pruner.embed(wanted, encode, lambda ids: table[ids], HOST)
    assert runs == [[0, 1]]
    again = pruner.embed(wanted, encode, lambda ids: table[ids], HOST)
    assert runs == [[0, 1]]
    for first, second in zip(kept, again, strict=True):
        assert torch.equal(first.rows, second.rows)
    method = method_class("stacktok")(budget=5)
    reduction = method.reduce(image(0), table[[2]], 5)
    assert np.array_equal(kept[2].offsets, image(0).offsets_of(reduction.anchors))
    assert torch.equal(kept[3].rows, image(0).crops[0].projected)
    counted = pruner.snapshot()
    assert counted["images"] == 8
    assert counted["encoder_runs"] == 2
    assert counted["encoder_cache_hits"] == 6
    assert counted["preparations"] == 2
    assert counted["tokens_before"] == 8 * 16
    assert counted["tokens_after"] == 2 * (3 * 5 + 16)


def test_prepared_state_counts_towards_the_bound_and_goes_with_its_image() -> None:
    size = image_bytes(image(0))
    method = method_class("stacktok")(budget=5)
    state = method.prepare(image(0)).nbytes
    assert 16 * 16 * 4 <= state < 2 * 16 * 16 * 4
    cache = FeatureCache(2 * size + state)
    for name in ("a", "b"):
        held = cache.put(name, image(0))
        assert held is not None
        cache.hold(name, method.prepare(held))
    # The second image's state does not fit beside the first.
    assert cache.get("a", HOST) is None
    assert cache.prepared("a") is None
    assert cache.prepared("b") is not None
    assert cache.bytes == size + state
    cache.put("b", image(0))
    assert cache.prepared("b") is None
    assert cache.bytes == size
    small = FeatureCache(size)
    small.put("a", image(0))
    small.hold("a", method.prepare(image(0)))
    assert small.prepared("a") is None
    assert small.bytes == size


def test_images_that_only_measure_memory_are_neither_cached_nor_counted() -> None:
    pruner = Pruner(Settings.read({"budget": 5}))
    (kept,) = pruner.embed([asked(b"a", PROFILE)], lambda indices: [image(i) for i in indices], lambda ids: ids, HOST)
    assert len(kept.rows) == 16
    assert pruner.snapshot() == Counters().snapshot()


def test_rows_of_an_unpruned_canvas_have_their_newlines() -> None:
    layout = canvas_layout(2, 1, 2, (56, 112))
    projected = torch.arange(3 * 4 * 2, dtype=torch.float32).reshape(3, 4, 2)
    rows = image_rows(EncodedImage.of(layout, projected.flatten(0, 1), projected.flatten(0, 1)), torch.full((2,), -1.0))
    assert len(rows) == layout.length == 4 + 2 * 5
    assert torch.equal(rows[:4], projected[0])
    # Two tiles side by side: a canvas row is the first row of each tile, then a newline.
    assert torch.equal(rows[4:9], torch.cat([projected[1, :2], projected[2, :2], torch.full((1, 2), -1.0)]))


def test_fields_come_back_as_they_were_packed() -> None:
    masks = [torch.tensor([True, False]), torch.tensor([True, True])]
    fields = pack("image", [3, ALL], [7, 8, 9], ["first", "second"], eligible=masks)
    first, second = unpack(fields)
    assert (first.keep, second.keep) == (3, ALL)
    assert first.query.tolist() == second.query.tolist() == [7, 8, 9]
    assert len(first.key) == 32
    assert first.key != second.key
    assert first.eligible is not None
    assert first.eligible.tolist() == [True, False]
    assert unpack(pack("video", [1], [], ["x"], 7))[0].request == 7
    assert unpack({}) == []
    assert unpack(pack("image", [1], [], ["x"]))[0].query.tolist() == []
