"""Readiness."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from stacktok.serving import health
from stacktok.serving.health import ReadinessMiddleware
from tests import coroutines


class Engine:
    """Answers at once, or when it is let go, or not at all."""

    def __init__(self) -> None:
        self.go: asyncio.Event | None = None
        self.error: Exception | None = None
        self.ended: Exception | None = None
        self.asked = 0

    async def check_health(self) -> None:
        if self.ended is not None:
            raise self.ended

    async def collective_rpc(self, name: str) -> list[Any]:
        assert name == "stacktok_counters"
        self.asked += 1
        if self.go is not None:
            await self.go.wait()
        if self.error is not None:
            raise self.error
        return [{}]


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(middleware: ReadinessMiddleware, engine: Engine, path: str = "/ready") -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
    await middleware(scope, None, send)  # type: ignore[arg-type]
    return sent[0]["status"], sent[1]["body"]


def test_an_engine_that_answers_is_ready() -> None:
    async def run() -> None:
        middleware, engine = ReadinessMiddleware(application), Engine()
        status, body = await ask(middleware, engine)
        assert (status, json.loads(body)) == (200, {"ready": True})
        assert await ask(middleware, engine, "/health") == (204, b"")
        assert engine.asked == 1

    coroutines.run(run())


def test_an_engine_that_has_ended_without_a_word_is_not() -> None:
    async def run() -> None:
        middleware, engine = ReadinessMiddleware(application), Engine()
        engine.go, engine.ended = asyncio.Event(), RuntimeError("dead")
        status, body = await ask(middleware, engine)
        assert status == 503
        assert json.loads(body)["reason"] == "the engine has ended: RuntimeError"

    coroutines.run(run())


def test_an_engine_that_answers_with_an_error_is_not() -> None:
    async def run() -> None:
        middleware, engine = ReadinessMiddleware(application), Engine()
        engine.error = RuntimeError("dead")
        status, body = await ask(middleware, engine)
        assert status == 503
        assert json.loads(body) == {"ready": False, "reason": "the engine does not answer: RuntimeError"}
        engine.error = None
        assert (await ask(middleware, engine))[0] == 200

    coroutines.run(run())


def test_a_busy_engine_is_ready_until_it_is_silent_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(health, "_PATIENCE", 0.01)
        middleware, engine = ReadinessMiddleware(application), Engine()
        engine.go = asyncio.Event()
        assert (await ask(middleware, engine))[0] == 200
        # Time goes by: the question asked first is still open, and no second one is put on top of it.
        middleware._since -= 75
        status, body = await ask(middleware, engine)
        assert status == 503
        assert "has not answered for 75 s" in json.loads(body)["reason"]
        assert engine.asked == 1
        engine.go.set()
        assert (await ask(middleware, engine))[0] == 200

    coroutines.run(run())
