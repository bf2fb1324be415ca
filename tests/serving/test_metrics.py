"""Our counters at /metrics, in front of an application that is not vLLM's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from stacktok.serving.counters import Counters, exposition
from stacktok.serving.metrics import CountersMiddleware
from tests import coroutines


class Engine:
    """Answers what a worker would, or never."""

    def __init__(self) -> None:
        self.stuck = False

    async def collective_rpc(self, name: str) -> list[Any]:
        assert name == "stacktok_counters"
        if self.stuck:
            await asyncio.Event().wait()
        counters = Counters(images=3, tokens_before=30, tokens_after=12)
        for share in (0.1, 0.4, 7.0):
            counters.image_kept_share.observe(share)
        return [counters.snapshot()] * 2


async def application(scope: Any, receive: Any, send: Any) -> None:
    assert scope["path"] != "/metrics" or not scope["headers"]
    status = 404 if scope["path"] == "/nothing" else 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"a 1\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"\n"})


def answer(middleware: CountersMiddleware, engine: Engine, path: str) -> tuple[dict[bytes, bytes], str]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "path": path,
        "headers": [(b"accept-encoding", b"gzip")],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }
    coroutines.run(middleware(scope, None, send))  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent)
    return dict(sent[0]["headers"]), body.decode()


def test_ours_follow_what_the_application_says() -> None:
    headers, body = answer(CountersMiddleware(application), Engine(), "/metrics")
    assert body.startswith("a 1\n")
    assert "stacktok_images_total 3\n" in body
    assert "stacktok_tokens_after_total 12\n" in body
    assert int(headers[b"content-length"]) == len(body)


def test_other_paths_are_untouched() -> None:
    assert answer(CountersMiddleware(application), Engine(), "/health")[1] == "a 1\n\n"


def test_a_busy_engine_gives_the_last_known_numbers(monkeypatch: Any) -> None:
    monkeypatch.setattr("stacktok.serving.metrics._PATIENCE", 0.01)
    middleware, engine = CountersMiddleware(application), Engine()
    answer(middleware, engine, "/metrics")
    engine.stuck = True
    assert "stacktok_images_total 3\n" in answer(middleware, engine, "/metrics")[1]


def test_engines_add_up() -> None:
    text = exposition([{"images": 2}, {"images": 5, "encoder_cache_bytes": 7}])
    assert "stacktok_images_total 7\n" in text
    assert "# TYPE stacktok_encoder_cache_bytes gauge\nstacktok_encoder_cache_bytes 7\n" in text


def test_histograms_count_all_values_up_to_a_bound() -> None:
    body = answer(CountersMiddleware(application), Engine(), "/metrics")[1]
    assert "# TYPE stacktok_image_kept_share histogram\n" in body
    assert 'stacktok_image_kept_share_bucket{le="0.05"} 0\n' in body
    assert 'stacktok_image_kept_share_bucket{le="0.1"} 1\n' in body
    assert 'stacktok_image_kept_share_bucket{le="0.5"} 2\n' in body
    assert 'stacktok_image_kept_share_bucket{le="1.0"} 2\n' in body
    assert 'stacktok_image_kept_share_bucket{le="+Inf"} 3\n' in body
    assert "stacktok_image_kept_share_sum 7.5\nstacktok_image_kept_share_count 3\n" in body


def test_histograms_of_engines_add_up() -> None:
    counters = [Counters(), Counters()]
    counters[0].image_selection_seconds.observe(0.004)
    counters[1].image_selection_seconds.observe(0.0015)
    text = exposition([one.snapshot() for one in counters])
    assert 'stacktok_image_selection_seconds_bucket{le="0.002"} 1\n' in text
    assert "stacktok_image_selection_seconds_count 2\n" in text
