"""The inspector on the embedded model: an engine, a client of the API, a server with a browser in front of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, sync_playwright

from stacktok import embedded
from stacktok.cli.common import load
from stacktok.view.engine import Engine
from stacktok.view.samples import scene_samples
from stacktok.view.server import create_app
from tests import tiny

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def engine() -> Engine:
    model, processor = load(str(embedded.path()), "float32", "cpu", quiet=True)
    return Engine(model, processor, name="embedded/llava", samples=scene_samples(3), max_new_tokens=8)


@pytest.fixture(scope="session")
def tiles() -> Engine:
    built = tiny.build("llava_next")
    return Engine(built.model, built.processor, name="tiles", samples=scene_samples(1), max_new_tokens=4)


@pytest.fixture(scope="session")
def grids() -> Engine:
    """Qwen2.5-VL: one grid that follows the picture's shape."""
    built = tiny.build("qwen2_5_vl")
    return Engine(built.model, built.processor, name="grids", samples=scene_samples(1), max_new_tokens=4)


class Api:
    """The JSON API as one page uses it."""

    def __init__(self, client: TestClient, page: str = "test") -> None:
        self.client, self.page, self.serial = client, page, 0

    def headers(self) -> dict[str, str]:
        return {"X-Page": self.page, "X-Serial": str(self.serial)}

    def get(self, path: str) -> Any:
        return self.client.get(path, headers=self.headers())

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body, headers=self.headers())

    def upload(self, data: bytes) -> Any:
        return self.client.post("/api/images", content=data, headers=self.headers())


@contextmanager
def api_of(engine: Engine, **settings: Any) -> Iterator[Api]:
    with TestClient(create_app(engine, **settings), base_url="http://127.0.0.1") as client:
        yield Api(client)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with api_of(engine) as found:
        yield found


@contextmanager
def served(engine: Engine, **settings: Any) -> Iterator[str]:
    """A real server on a free port."""
    import uvicorn

    app = create_app(engine, **settings)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    started = threading.Event()
    startup = server.startup

    async def announce(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        started.set()

    server.startup = announce  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    if not started.wait(60):
        raise RuntimeError("the server did not start")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        yield found
        found.close()


__all__ = ["Api", "api_of", "served"]
