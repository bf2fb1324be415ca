"""The model's half: what it compiles when, and what it logs."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stacktok.core.tokens import EncodedImage, single_crop
from stacktok.methods import method_class
from stacktok.serving.fields import ALL, PROFILE, ImageRequest
from stacktok.serving.pruner import Pruner
from stacktok.serving.settings import Settings

HOST = torch.device("cpu")
Uniform: Any = method_class("uniform")


def encode(indices: list[int]) -> list[EncodedImage]:
    found = []
    for index in indices:
        features = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
        found.append(single_crop(features, features, (4, 4)))
    return found


def asked(keep: int, key: bytes, request: int) -> ImageRequest:
    return ImageRequest(keep, torch.zeros(0, dtype=torch.long), key, None, request)


def embed(pruner: Pruner, *wanted: ImageRequest) -> list[Any]:
    return pruner.embed(wanted, encode, lambda ids: torch.zeros(len(ids), 8), HOST)


@dataclass(frozen=True)
class Held(Uniform):
    """Selects when it is let go."""

    go: Any = None
    done: Any = None
    error: Any = None

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.go.wait(5)
        if self.error is not None:
            raise self.error
        found = super().reduce(*args, **kwargs)
        self.done.set()
        return found


def held(**more: Any) -> Held:
    return Held(budget=4, go=threading.Event(), done=threading.Event(), **more)


@pytest.mark.parametrize("keep", [PROFILE, 4])
def test_the_selector_compiles_while_weights_load_and_images_wait_for_it(keep: int) -> None:
    method = held()
    pruner = Pruner(Settings(method))
    pruner.warm_up()
    assert not method.done.is_set()
    threading.Timer(0.05, method.go.set).start()
    embed(pruner, asked(keep, b"a", 1))
    assert method.done.is_set()


def test_what_goes_wrong_while_compiling_is_told() -> None:
    method = held(error=RuntimeError("no compiler"))
    method.go.set()
    pruner = Pruner(Settings(method))
    pruner.warm_up()
    with pytest.raises(RuntimeError, match="no compiler"):
        embed(pruner, asked(PROFILE, b"a", 1))


def test_a_request_has_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pruner = Pruner(Settings(Uniform(budget=4)))
    with caplog.at_level(logging.INFO, "vllm.stacktok"):
        embed(pruner, asked(PROFILE, b"x", 1))
        embed(pruner, asked(4, b"a", 2), asked(6, b"b", 2), asked(ALL, b"a", 3))
    # Other loggers may speak meanwhile: of compiling, or of a client session that is collected.
    records = [record for record in caplog.records if record.name == "vllm.stacktok"]
    first, second = (vars(record) for record in records)
    wanted = {"request": 2, "images": 2, "tokens_before": 32, "tokens_after": 10, "cache_hits": 0}
    assert {name: first[name] for name in wanted} == wanted
    assert first["selection_ms"] > 0
    wanted = {"request": 3, "images": 1, "tokens_before": 16, "tokens_after": 16, "cache_hits": 1, "selection_ms": 0}
    assert {name: second[name] for name in wanted} == wanted
    assert records[0].getMessage().startswith("request 2: 2 image(s), 32 -> 10 tokens, selection ")


def test_one_rank_of_several_writes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.stacktok"):
        embed(Pruner(Settings(Uniform(budget=4)), log=False), asked(4, b"a", 1))
    assert not [record for record in caplog.records if record.name == "vllm.stacktok"]


def test_selections_are_counted_by_time_and_share() -> None:
    pruner = Pruner(Settings(Uniform(budget=4)))
    embed(pruner, asked(4, b"a", 1), asked(8, b"b", 1), asked(ALL, b"c", 2))
    counters = pruner.counters
    assert sum(counters.image_selection_seconds.counts) == 2
    assert counters.image_selection_seconds.sum == pytest.approx(counters.selection_seconds)
    assert counters.image_kept_share.sum == pytest.approx(4 / 16 + 8 / 16)
