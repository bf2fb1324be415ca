"""Where pictures may come from."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from PIL import Image
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from stacktok.serving.media import NAME
from stacktok.serving.plugin import register
from tests import coroutines


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def site() -> Iterator[Any]:
    """A site with a picture, and an address that sends on to it; ``asked`` is what was asked of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/on":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{server.server_port}/picture.png")
                self.end_headers()
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(png())

        def log_message(self, *args: Any) -> None:
            pass

    asked: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked = asked
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(url: str, **flags: Any) -> list[Any]:
    """The picture or the error of both of vLLM's ways to read an address."""
    register()
    # vLLM's own connection belongs to the first event loop that used it.
    connector = MEDIA_CONNECTOR_REGISTRY.load(NAME, connection=HTTPConnection(), **flags)

    async def later() -> Any:
        return await connector.fetch_image_async(url)

    found: list[Any] = []
    for way in (lambda: connector.fetch_image(url), lambda: coroutines.run(later())):
        try:
            found.append(way())
        except Exception as error:
            found.append(error)
    return found


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x.png", "HTTPS://10.0.0.1/x.png", "file:///etc/passwd", "ftp://a.example/x", "x.png"]
)
def test_nothing_but_the_request_is_read_by_default(url: str) -> None:
    for error in fetch(url):
        # Of this class vLLM makes status 400.
        assert type(error) is ValueError
        assert "send the picture as a data URL" in str(error)


def test_data_urls_are_read() -> None:
    for image in fetch("data:image/png;base64," + base64.b64encode(png()).decode()):
        assert getattr(image, "media", image).size == (8, 6)


def test_a_domain_that_is_allowed_is_fetched_from_and_others_are_not(site: Any) -> None:
    for image in fetch(f"http://127.0.0.1:{site.server_port}/picture.png", allowed_media_domains=["127.0.0.1"]):
        assert getattr(image, "media", image).size == (8, 6)
    assert site.asked == ["/picture.png"] * 2
    for error in fetch(f"http://localhost:{site.server_port}/picture.png", allowed_media_domains=["127.0.0.1"]):
        assert isinstance(error, ValueError)
    assert site.asked == ["/picture.png"] * 2


def test_a_domain_that_is_allowed_does_not_lead_to_another(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from stacktok.serving.launch import _VARIABLES

    for name, value in _VARIABLES.items():
        monkeypatch.setenv(name, value)
    for error in fetch(f"http://127.0.0.1:{site.server_port}/on", allowed_media_domains=["127.0.0.1"]):
        assert isinstance(error, Exception)
    assert site.asked == ["/on"] * 2
