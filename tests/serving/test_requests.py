"""Bodies are checked before the application works on them; FastAPI stands for vLLM's server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs FastAPI, which vLLM brings")
pytest.importorskip("httpx", reason="needs httpx")

import fastapi
from fastapi.testclient import TestClient

from stacktok.serving.requests import RequestMiddleware


def client(**entry: Any) -> TestClient:
    """A server whose one route takes any object, behind a key."""
    app = fastapi.FastAPI()
    config = SimpleNamespace(stacktok={"budget": 64, **entry})
    app.state.engine_client = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))

    @app.post("/v1/chat/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        return {"keys": sorted(body)}

    class Key:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and (b"authorization", b"Bearer key") not in scope["headers"]:
                await fastapi.responses.JSONResponse({}, status_code=401)(scope, receive, send)
                return
            await self.app(scope, receive, send)

    # As in vLLM: the middleware of its flag stands outside of the one that asks for the key.
    app.add_middleware(Key)
    app.add_middleware(RequestMiddleware)
    return TestClient(app, headers={"Authorization": "Bearer key"})


TEXT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mm_processor_kwargs": {"stacktok": {"budget": -1}}}, "negative"),
        ({"mm_processor_kwargs": {"stacktok": {"budgets": 1}}}, "budgets"),
        ({"mm_processor_kwargs": {"stacktok": {"query": "x" * 5000}}}, "5000 characters"),
        ({"mm_processor_kwargs": {"stacktok": 3}}, "not a mapping"),
        ({"mm_processor_kwargs": {"size": 9}}, "'size'"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs is not taken"),
    ],
)
def test_requests_without_a_picture_are_checked_like_others(more: Any, reason: str) -> None:
    reply = client(own_arguments_only=True).post("/v1/chat/completions", json={**TEXT, **more})
    assert reply.status_code == 400
    assert reason in reply.json()["detail"]


def test_what_is_fine_goes_through() -> None:
    asked = {**TEXT, "mm_processor_kwargs": {"stacktok": {"budget": 16, "query": None}}, "media_io_kwargs": {}}
    reply = client(own_arguments_only=True).post("/v1/chat/completions", json=asked)
    assert reply.json() == {"keys": sorted(asked)}
    assert client().post("/v1/chat/completions", json=TEXT).status_code == 200


def test_a_server_that_trusts_its_clients_takes_more_but_no_nonsense() -> None:
    trusting = client()
    foreign = {"mm_processor_kwargs": {"size": 9}, "media_io_kwargs": {"image": {"image_mode": "L"}}}
    assert trusting.post("/v1/chat/completions", json=foreign).status_code == 200
    wrong = {"mm_processor_kwargs": {"stacktok": {"budget": 0}}}
    assert trusting.post("/v1/chat/completions", json=wrong).status_code == 400


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["media_io_kwargs", "\\u006dedia_io_kwargs", "media\\u005fio_kwargs"])
def test_no_spelling_of_a_name_gets_around_the_check(name: str, encoding: str) -> None:
    body = f'{{"{name}": {{"image": {{"image_mode": "L"}}}}}}'
    assert json.loads(body)["media_io_kwargs"]
    headers = {"Content-Type": "application/json"}
    reply = client(own_arguments_only=True).post("/v1/chat/completions", content=body.encode(encoding), headers=headers)
    assert reply.status_code == 400
    assert "media_io_kwargs" in reply.json()["detail"]


def test_bodies_that_are_no_object_are_the_applications_business() -> None:
    for body in (b"[media_io_kwargs", b'["media_io_kwargs"]', b"\0"):
        reply = client().post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 422


def test_nobody_learns_anything_without_the_key() -> None:
    wrong = {"mm_processor_kwargs": {"stacktok": {"budget": -1}}}
    reply = client().post("/v1/chat/completions", json=wrong, headers={"Authorization": "Bearer other"})
    assert reply.status_code == 401
