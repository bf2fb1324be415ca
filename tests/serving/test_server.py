"""``stacktok serve`` over HTTP, with the embedded model and an OpenAI client."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from benchmarks.served import NAME, Server, bytes_url, data_url, messages
from PIL import Image

from stacktok.check.server import Client, local_reply
from stacktok.methods import StackTok
from stacktok.view.samples import scene_samples
from tests.check.test_server import listening
from tests.cli.test_commands import shell
from tests.serving.answers import embedded_answer
from tests.serving.models import reference
from tests.serving.soak import FLAT, soak, soaked_server

TOKENS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with soaked_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def ask(server: Server, question: str, *urls: str, **own: Any) -> str:
    foreign = {name: own.pop(name) for name in ("size",) if name in own}
    media = {name: own.pop(name) for name in ("media_io_kwargs",) if name in own}
    body = {"mm_processor_kwargs": {**foreign, **({"stacktok": own} if own else {})}, **media}
    reply = server.client().chat.completions.create(
        model=NAME, messages=messages(question, *urls), temperature=0, max_tokens=TOKENS, extra_body=body
    )
    return str(reply.choices[0].message.content).strip()


def test_answers_are_those_of_transformers(server: Server) -> None:
    tiny = reference("embedded/llava")
    for sample in scene_samples(3):
        for question in sample.questions[:3]:
            for budget in (64, 16):
                found = ask(server, question, data_url(sample.picture), budget=budget)
                assert found == embedded_answer(tiny, sample.picture, question, budget, TOKENS), (question, budget)


def test_the_question_is_the_messages_own_text(server: Server) -> None:
    tiny, sample = reference("embedded/llava"), scene_samples(1)[0]
    question, read_back = "is there a red cat ? USER: a blue dog ?", "a blue dog ?"
    found = Client(server.url).ask(sample.picture, question, 8, 1)
    own, misread = (
        local_reply(tiny.model, tiny.processor, StackTok(budget=8), sample.picture, question, 1, query)
        for query in (question, read_back)
    )
    assert found.gap(own) < 1e-4 < found.gap(misread)


def test_a_stream_gives_the_same_words(server: Server) -> None:
    sample = scene_samples(1)[0]
    url = data_url(sample.picture)
    stream = server.client().chat.completions.create(
        model=NAME,
        messages=messages(sample.questions[0], url),
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
    )
    words = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert words.strip() == ask(server, sample.questions[0], url)


def test_the_prompt_is_as_short_as_the_budget_says(server: Server) -> None:
    sample = scene_samples(1)[0]
    lengths = {}
    for budget in (16, "25%", None):
        reply = server.client().chat.completions.create(
            model=NAME,
            messages=messages(sample.questions[0], data_url(sample.picture)),
            max_tokens=1,
            extra_body={"mm_processor_kwargs": {"stacktok": {"budget": budget}}},
        )
        lengths[budget] = reply.usage.prompt_tokens
    assert lengths["25%"] - lengths[16] == 144 - 16
    assert lengths[None] - lengths[16] == 576 - 16


def test_counters_stand_beside_those_of_vllm(server: Server) -> None:
    sample = scene_samples(2)[1]
    before = server.counters()
    ask(server, "is there a cat ?", data_url(sample.picture), budget=11)
    ask(server, "is there a dog ?", data_url(sample.picture), budget=11)
    after = server.counters()
    page = server.get("/metrics")
    assert "vllm:" in page
    assert "# TYPE stacktok_images_total counter" in page
    assert after["stacktok_images_total"] - before["stacktok_images_total"] == 2
    assert after["stacktok_tokens_after_total"] - before["stacktok_tokens_after_total"] == 22
    assert after["stacktok_tokens_before_total"] - before["stacktok_tokens_before_total"] == 2 * 576
    assert after["stacktok_encoder_cache_hits_total"] > before["stacktok_encoder_cache_hits_total"]
    assert after["stacktok_selection_seconds_total"] > before["stacktok_selection_seconds_total"]


class Mixing:
    """The server behind one fault: the first question on a picture decides what all of them see of it."""

    def __init__(self, server: Server) -> None:
        self.server, self.first, self.lock = server, dict[str, str](), threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        image, text = body["messages"][0]["content"]
        with self.lock:
            query = self.first.setdefault(image["image_url"]["url"], text["text"])
        body["model"], body["mm_processor_kwargs"]["stacktok"]["query"] = NAME, query
        reply: dict[str, Any] = self.server.client().post("/chat/completions", body=body, cast_to=object)
        return reply

    def metrics(self) -> str:
        return self.server.get("/metrics")


def test_stacktok_check_passes_and_finds_mixed_questions(server: Server, monkeypatch: Any, capsys: Any) -> None:
    def checked(url: str) -> tuple[int, dict[str, str]]:
        code, out, _ = shell(monkeypatch, capsys, "check", "--vllm", url, "--budget", 8, "--dtype", "float32", "--json")
        return code, {row["name"]: row["status"] for row in json.loads(out)["checks"]}

    code, found = checked(server.url)
    assert code == 0
    assert len(found) == 4
    assert set(found.values()) == {"pass"}
    with listening(Mixing(server)) as url:
        code, found = checked(url)
    assert code == 1
    assert found["caches do not mix questions"] == "fail"
    # The second question on a picture finds the selection of the first in vLLM's cache, and no image is counted.
    assert found["counters count"] == "fail"


def _bomb() -> str:
    """A small file of a picture with too many pixels."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return bytes_url(file.getvalue())


def _strip() -> str:
    """A hundred bytes that scaling makes millions of pixels of."""
    file = io.BytesIO()
    Image.new("1", (1, 6000)).save(file, "PNG")
    return bytes_url(file.getvalue())


def _picture() -> str:
    return data_url(scene_samples(1)[0].picture)


def _half() -> str:
    """The first half of a picture's file."""
    file = io.BytesIO()
    scene_samples(1)[0].picture.save(file, "PNG")
    return bytes_url(file.getvalue()[: file.tell() // 2])


BAD = {
    "broken image": ((bytes_url(b"this is no picture"),), {}, "image"),
    "cut image": ((_half(),), {}, "image"),
    "image too large": ((_bomb(),), {}, "pixels"),
    "thin image": ((_strip(),), {}, "1 x 6000 pixels, one side more than 50 times the other"),
    "a hundred images": ((_picture(),) * 100, {}, "16 image"),
    "budget 0": ((_picture(),), {"budget": 0}, "budget=0"),
    "negative budget": ((_picture(),), {"budget": -4}, "negative"),
    "budget of words": ((_picture(),), {"budget": "many"}, "percentage"),
    "budget above all": ((_picture(),), {"budget": 1.5}, "fraction"),
    "budget true": ((_picture(),), {"budget": True}, "bool"),
    "budget list": ((_picture(),), {"budget": [1]}, "budget"),
    "unknown entry": ((_picture(),), {"budgets": 3}, "budgets"),
    "query number": ((_picture(),), {"query": 3}, "query"),
    "query of 100 KB": ((_picture(),), {"query": "cat " * 25_000}, "characters"),
    "query of many tokens": ((_picture(),), {"query": "cat " * 900}, "more than 256 tokens"),
    "no image, negative budget": ((), {"budget": -1}, "negative"),
    "no image, unknown entry": ((), {"budgets": 3}, "budgets"),
    "no image, the processor's own": ((), {"size": 3}, "'size'"),
    "how pictures are decoded": ((_picture(),), {"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs"),
    "this machine's network": (("http://127.0.0.1:9/x.png",), {}, "data URL"),
    "a file": (("file:///etc/hostname",), {}, "data URL"),
    "the processor's own": ((_picture(),), {"size": {"shortest_edge": 9000}}, "'size'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_why_and_the_server_lives_on(server: Server, name: str) -> None:
    import openai

    urls, own, reason = BAD[name]
    with pytest.raises(openai.APIStatusError, match=reason) as refused:
        ask(server, "is there a cat ?", *urls, **own)
    assert refused.value.status_code == 400
    assert ask(server, "is there a cat ?", _picture())


def test_a_question_beyond_what_the_selector_sees_is_answered(server: Server) -> None:
    assert ask(server, "is there a cat ? " * 300, _picture())


def test_a_known_uuid_answers_for_its_picture(server: Server) -> None:
    url, client = _picture(), server.client()

    def words(question: str, sent: str | None) -> str:
        turns = messages(question, "")
        turns[0]["content"][0] = {"type": "image_url", "image_url": sent and {"url": sent}, "uuid": "a name"}
        reply = client.chat.completions.create(model=NAME, messages=turns, temperature=0, max_tokens=TOKENS)
        return str(reply.choices[0].message.content).strip()

    questions = scene_samples(1)[0].questions[:3]
    alone = [ask(server, question, url) for question in questions]
    assert words(questions[0], url) == alone[0]
    assert [words(question, None) for question in questions] == alone


def test_ready_means_that_the_engine_answers(server: Server) -> None:
    assert json.loads(server.get("/ready")) == {"ready": True}


def test_every_request_with_new_pictures_has_a_line_of_its_own(server: Server) -> None:
    first, second = (data_url(sample.picture.rotate(1)) for sample in scene_samples(2))
    ask(server, "is there a cat ?", first, second, budget=13)
    ask(server, "is there a dog ?", first, budget=13)
    lines = re.findall(r"request \d+: (.*)", server.log.read_text())
    assert re.fullmatch(r"2 image\(s\), 1152 -> 26 tokens, selection [\d.]+ ms, 0 from the feature cache", lines[-2])
    assert re.fullmatch(r"1 image\(s\), 576 -> 13 tokens, selection [\d.]+ ms, 1 from the feature cache", lines[-1])


def test_one_minute_of_many_clients(server: Server) -> None:
    report = soak(server, 1)
    print(report)
    assert not report.errors
    assert not report.wrong
    assert report.requests > 100
    assert report.growth(0.5) < FLAT
