"""`stacktok check --vllm`: a server that answers as transformers does passes, and one that mixes questions does not."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from stacktok import StackTok
from stacktok.check import Outcomes, check_server
from stacktok.check.server import Client, local_reply
from tests.tiny import Tiny, build, picture

SAMPLES = [(picture(96, 64, 0), "Is there a dog?"), (picture(64, 96, 1), "How many cats are there?")]
BUDGET = 3


class Served:
    """Answers requests as our server does: a pruned model, counters, and a cache by picture that may be wrong."""

    def __init__(self, tiny: Tiny, *, mixes: bool = False, counts: bool = True) -> None:
        self.tiny, self.mixes, self.counts = tiny, mixes, counts
        self.first: dict[bytes, str] = {}
        self.counters = {"images": 0, "tokens_before": 0, "tokens_after": 0}
        self.lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        image_part, text_part = body["messages"][0]["content"]
        data = base64.b64decode(image_part["image_url"]["url"].split(",")[1])
        question, tiny = text_part["text"], self.tiny
        with self.lock:
            told = self.first.setdefault(data, question) if self.mixes else question
            image = Image.open(io.BytesIO(data))
            method = StackTok(budget=body["mm_processor_kwargs"]["stacktok"]["budget"])
            reply = local_reply(tiny.model, tiny.processor, method, image, question, body["max_tokens"], told)
            if self.counts:
                self.counters["images"] += 1
                self.counters["tokens_before"] += 36
                self.counters["tokens_after"] += BUDGET
        likeliest = sorted(reply.scores.items(), key=lambda item: -item[1])[: body["top_logprobs"]]
        top = [{"token": f"token_id:{token}", "logprob": score} for token, score in likeliest]
        return {
            "choices": [{"message": {"content": reply.text}, "logprobs": {"content": [{"top_logprobs": top}]}}],
            "usage": {"prompt_tokens": reply.length},
        }

    def metrics(self) -> str:
        return "".join(f"stacktok_{name}_total {value}\n" for name, value in self.counters.items())


@contextmanager
def listening(served: Served) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _send(self, data: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "pruned"}]})
            self._send((models if self.path == "/v1/models" else served.metrics()).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(served.answer(body)).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def outcomes(**faults: bool) -> Outcomes:
    tiny = build("llava")
    with listening(Served(tiny, **faults)) as url:
        return check_server(
            f"{url}/v1", tiny.model, tiny.processor, SAMPLES, StackTok(budget=BUDGET), name="tiny", new_tokens=4
        )


def statuses(found: Outcomes) -> dict[str, str]:
    return {row.name: row.status for row in found.rows}


def test_a_server_that_answers_as_transformers_does_passes() -> None:
    assert set(statuses(outcomes()).values()) == {"pass"}


def test_a_server_that_mixes_two_questions_is_found() -> None:
    (row,) = (row for row in outcomes(mixes=True).rows if row.name == "caches do not mix questions")
    assert row.status == "fail"
    assert "was answered from a picture that is pruned for 'Is there a dog?'" in row.detail


def test_a_server_that_does_not_count_is_found() -> None:
    assert statuses(outcomes(counts=False))["counters count"] == "fail"


def test_an_address_where_nothing_listens_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="start `stacktok serve` first"):
        Client("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="is not an address"):
        Client("127.0.0.1:9")
