"""The JSON API: its numbers are the library's, its limits hold."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stacktok import StackTok, prepare
from stacktok.core.reference import coverage_sum
from stacktok.figures.kept import MERGED
from stacktok.methods import Spotlight
from stacktok.methods.registry import BUILT_IN
from stacktok.models.pictures import PictureError, read_picture
from stacktok.view.engine import UPLOADS, Engine
from stacktok.view.jobs import Job, Superseded
from tests import coroutines, tiny
from tests.view.conftest import Api, api_of

BUDGETS = (1, 2, 5, 9, 16, 17, 40, 64)


def question_of(engine: Engine, name: str = "scene-0") -> str:
    return engine.samples[name].questions[1]


def run_of_the_library(engine: Engine, question: str, method: Any) -> Any:
    """The record of a user's own run of the hooked model, on the same picture and question."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = engine.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = engine.processor(images=[engine.samples["scene-0"].picture], text=[prompt], return_tensors="pt")
    with method(engine.model, engine.processor) as pruned, torch.no_grad():
        out = engine.model.generate(**inputs, max_new_tokens=engine.max_new_tokens, do_sample=False)
    text = engine.processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return pruned.last[0], text.strip()


def kept_by(trace: dict[str, Any], k: int) -> list[list[int]]:
    """Kept tokens per crop at a budget, from the data that the page has."""
    sizes = [sum(1 for crop, _ in trace["order"][:k] if crop == c) for c in range(len(trace["crops"]))]
    kept = []
    for crop, size in zip(trace["crops"], sizes, strict=True):
        refined = {entry["k"]: entry["indices"] for entry in crop["refined"]}
        kept.append(refined.get(size, sorted(crop["order"][:size])))
    return kept


@pytest.mark.parametrize("which", ["engine", "tiles", "grids"])
def test_every_budget_of_a_trace_is_what_a_run_with_that_budget_keeps(
    which: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(which)
    question = question_of(engine)
    with api_of(engine) as api:
        trace = api.post("/api/trace", image="scene-0", question=question, method="stacktok").json()
        for k in BUDGETS:
            result, _ = run_of_the_library(engine, question, StackTok(budget=k))
            record = result.selection
            crops = record.crops if hasattr(record, "crops") else (record,)
            assert kept_by(trace, k) == [crop.indices.tolist() for crop in crops]
            for sent, crop in zip(trace["crops"], crops, strict=True):
                for curve in ("relevance", "coverage", "reference", "target"):
                    assert sent[curve][: crop.k + 1] == getattr(crop, curve).tolist()
                assert sent["criterion"][: crop.k] == list(crop.criterion)
                assert sent["bound"][: crop.k] == crop.bound.tolist()
                assert sent["strictness"] == crop.strictness
                refined = {entry["k"]: entry for entry in sent["refined"]}
                if crop.k in refined:
                    assert refined[crop.k]["relevance"] == crop.final_relevance
                    assert refined[crop.k]["coverage"] == crop.final_coverage
            assert " ".join(word["text"] for word in trace["words"]) == result.query


@pytest.mark.parametrize("which", ["engine", "tiles"])
def test_a_walk_of_spotlight_has_the_weights_and_every_budget(which: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(which)
    question = question_of(engine)
    with api_of(engine) as api:
        walk = api.post("/api/trace", image="scene-0", question=question, method="spotlight").json()
        plain = api.post("/api/trace", image="scene-0", question=question, method="stacktok").json()
    result, _ = run_of_the_library(engine, question, Spotlight(budget=9))
    record = result.selection
    crops = record.crops if hasattr(record, "crops") else (record,)
    assert kept_by(walk, 9) == [crop.indices.tolist() for crop in crops]
    for sent, crop in zip(walk["crops"], crops, strict=True):
        assert sent["row_weights"] == crop.row_weights.tolist()
        assert sent["focus"] == crop.focus
    assert not any("row_weights" in crop for crop in plain["crops"])


def test_swaps_are_among_what_was_compared(engine: Engine, api: Api) -> None:
    """The tested budgets are of use only if some small set is refined."""
    refined = 0
    for sample in engine.samples.values():
        for question in sample.questions:
            trace = api.post("/api/trace", image=sample.name, question=question, method="stacktok").json()
            refined += sum(len(crop["refined"]) for crop in trace["crops"])
    assert refined


def test_changes_tell_what_every_token_covers(engine: Engine, api: Api) -> None:
    question = question_of(engine)
    trace = api.post("/api/trace", image="scene-0", question=question, method="stacktok").json()["crops"][0]
    affinity = engine.picture("scene-0").units[0].vision_affinity
    best, owner = np.zeros(trace["n"]), np.full(trace["n"], -1)
    for k, token in enumerate(trace["order"], start=1):
        rows = trace["changed_rows"][trace["changed_offsets"][k - 1] : trace["changed_offsets"][k]]
        best[rows], owner[rows] = affinity[rows, token], token
        if k in BUDGETS:
            kept = trace["order"][:k]
            np.testing.assert_array_equal(best, affinity[:, kept].max(axis=1))
            np.testing.assert_array_equal(affinity[np.arange(trace["n"]), owner], affinity[:, kept].max(axis=1))
            assert best.sum() / trace["n"] == trace["coverage"][k]


def test_query_affinities_are_those_of_a_prepared_image(engine: Engine, api: Api) -> None:
    question = question_of(engine)
    trace = api.post("/api/trace", image="scene-0", question=question, method="stacktok").json()
    (sent,) = trace["query_affinity"]
    found = np.frombuffer(base64.b64decode(sent["float32"]), "<f4").reshape(sent["shape"])
    (crop,) = engine.picture("scene-0").encoded.crops
    query = engine.ask("scene-0", question).query
    np.testing.assert_array_equal(found, prepare(crop.vision, crop.projected).query_affinity(query))
    assert [row for word in trace["words"] for row in word["rows"]] == list(range(len(found)))


def places_of(reduction: Any, crop: int = 0) -> list[int]:
    """Tokens of a crop that stand for a place; CLS stands for none."""
    sources = reduction.sources
    return [token for i, (c, token) in enumerate(reduction.anchors.tolist()) if c == crop and len(sources[i])]


@pytest.mark.parametrize("which", ["engine", "tiles", "grids"])
def test_every_method_on_offer_keeps_what_its_own_run_keeps(which: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(which)
    question, budget = question_of(engine), 24 if which == "engine" else 9
    with api_of(engine) as api:
        names = api.get("/api/info").json()["methods"]
        # The page shows pictures, not videos.
        assert set(BUILT_IN) - {"evs", "vidcom2"} < set(names)
        for name in names:
            result, text = run_of_the_library(engine, question, replace(engine.methods[name], budget=budget))
            state = {"image": "scene-0", "question": question, "method": name, "budget": budget}
            kept = api.post("/api/kept", **state).json()
            assert kept["tokens"] == len(result.reduction), name
            placed = sum(len(crop["indices"]) for crop in kept["crops"])
            assert kept["tokens"] == placed + kept["cls"] + kept["separators"], name
            assert kept["separators"] == int((result.reduction.anchors[:, 0] < 0).sum()), name
            assert tuple(kept["per_layer"]) == result.per_layer, name
            for c, (crop, unit) in enumerate(zip(kept["crops"], engine.picture("scene-0").units, strict=True)):
                assert crop["indices"] == sorted(places_of(result.reduction, c)), name
                sums = coverage_sum(torch.from_numpy(unit.vision_affinity), crop["indices"])
                assert crop["coverage"] == sums / unit.n
            merged = {tuple(entry["token"]): entry["sources"] for entry in kept["merged"]}
            assert merged == {
                tuple(result.reduction.anchors[i].tolist()): sources.tolist()
                for i, sources in result.reduction.merged.items()
                if len(sources)
            }, name
            answer = api.post("/api/answer", **state).json()
            assert (answer["answer"], tuple(answer["per_layer"])) == (text, result.per_layer), name
            assert answer["tokens"] == len(result.reduction)


def test_visionzip_merges_and_fastv_and_sparsevlm_cut_inside_the_language_model(engine: Engine, api: Api) -> None:
    state = {"image": "scene-0", "question": question_of(engine), "budget": 64}
    kept = {name: api.post("/api/kept", method=name, **state).json() for name in ("visionzip", "fastv", "sparsevlm")}
    # 64 with CLS, ten of them merged, and every position of the picture is in one of them.
    zipped = kept["visionzip"]
    assert (zipped["tokens"], len(zipped["crops"][0]["indices"]), len(zipped["merged"])) == (64, 63, 10)
    shown = {token for entry in zipped["merged"] for _, token in entry["sources"]} | set(zipped["crops"][0]["indices"])
    assert shown == set(range(576))
    layers = kept["fastv"]["per_layer"]
    assert layers == [576] * 2 + [64] * (len(layers) - 2)
    layers = kept["sparsevlm"]["per_layer"]
    assert layers[0] == 576
    assert layers == sorted(layers, reverse=True)
    assert layers[-1] == kept["sparsevlm"]["tokens"]
    assert kept["sparsevlm"]["merged"]


def test_a_cancelled_run_inside_the_language_model_is_not_held(engine: Engine) -> None:
    state = ("scene-0", question_of(engine), "fastv", 33)
    job = Job("page", 1, lambda _: None)
    job.cancel()
    with pytest.raises(Superseded):
        engine.kept(*state, job)
    kept = engine.kept(*state)
    assert kept["tokens"] == len(kept["crops"][0]["indices"]) == 33


def test_exports_of_methods_that_merge_and_that_cut_inside(engine: Engine, api: Api) -> None:
    state = {"image": "scene-0", "question": question_of(engine), "budget": 24}
    for name in ("visionzip", "sparsevlm", "fastv"):
        result, text = run_of_the_library(engine, state["question"], replace(engine.methods[name], budget=24))
        trace = api.post("/api/export", form="json", method=name, **state).json()
        assert trace["indices"] == [sorted(places_of(result.reduction))]
        assert trace["per_layer"] == list(result.per_layer)
        assert trace["merged"] == api.post("/api/kept", method=name, **state).json()["merged"]
        drawing = api.post("/api/export", form="svg", method=name, **state).text
        assert (MERGED in drawing) == bool(trace["merged"])
        answer, anchors = said_by(api.post("/api/export", form="python", method=name, **state).text)
        assert answer == text
        assert anchors == result.reduction.anchors.tolist()


def said_by(program: str) -> tuple[str, Any]:
    """The answer and the kept tokens that an exported program prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(program, "exported.py", "exec"), {})
    answer, anchors = said.getvalue().rsplit("\n", 2)[:2]
    return answer.strip(), json.loads(anchors)


def test_a_picture_cut_into_patches_is_shown_as_its_grid_sees_it(grids: Engine) -> None:
    picture = tiny.picture(230, 120)
    with api_of(grids) as api:
        found = api.upload(file_of(picture)).json()
        seen = Image.open(io.BytesIO(api.get(f"/api/images/{found['image']}/crops/0.png").content))
    (crop,) = found["crops"]
    assert (crop["rows"], crop["columns"]) == (4, 8)
    assert seen.size == (28 * crop["columns"], 28 * crop["rows"])
    # The processor scales the whole picture to its grid; what is shown are the encoder's own pixels.
    scaled = np.asarray(picture.resize(seen.size, Image.Resampling.BICUBIC), dtype=np.int64)
    assert np.abs(np.asarray(seen, dtype=np.int64) - scaled).max() <= 1
    assert found["positions"] == found["capacity"] == 32


def test_answers_are_the_models_own(engine: Engine, api: Api) -> None:
    question = question_of(engine)
    for budget, method in ((16, StackTok(budget=16)), (None, StackTok())):
        _, text = run_of_the_library(engine, question, method) if budget else (None, full_answer(engine, question))
        if budget:
            body = {"image": "scene-0", "question": question, "method": "stacktok", "budget": budget}
            found = api.post("/api/answer", **body).json()
            assert found["tokens"] == 16
        else:
            found = api.post("/api/answer/full", image="scene-0", question=question).json()
            assert found["tokens"] == engine.picture("scene-0").encoded.length
        assert found["answer"] == text
    assert "get_image_features" not in vars(engine.adapter.base(engine.model))


def full_answer(engine: Engine, question: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = engine.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = engine.processor(images=[engine.samples["scene-0"].picture], text=[prompt], return_tensors="pt")
    with torch.no_grad():
        out = engine.model.generate(**inputs, max_new_tokens=engine.max_new_tokens, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    return str(engine.processor.tokenizer.decode(new, skip_special_tokens=True)).strip()


def test_no_question_selects_by_coverage_alone(api: Api) -> None:
    trace = api.post("/api/trace", image="scene-0", question="  ", method="stacktok").json()
    assert trace["words"] == []
    assert set(trace["crops"][0]["criterion"]) == {"coverage"}


def test_exports_hold_the_records_of_the_library(engine: Engine, api: Api) -> None:
    question = question_of(engine)
    state = {"image": "scene-0", "question": question, "method": "stacktok", "budget": 12}
    result, text = run_of_the_library(engine, question, StackTok(budget=12))
    trace = api.post("/api/export", form="json", **state).json()
    assert trace["selection"] == json.loads(result.selection.to_json())
    assert trace["indices"] == [result.selection.indices.tolist()]

    drawing = api.post("/api/export", form="svg", **state)
    assert drawing.headers["content-type"] == "image/svg+xml"
    by = dict(zip(result.selection.order.tolist(), result.selection.criterion, strict=True))
    kept = [by.get(token) for token in result.selection.indices.tolist()]
    assert drawing.text.count("<circle") == kept.count("relevance")

    answer, anchors = said_by(api.post("/api/export", form="python", **state).text)
    assert answer == text
    assert anchors == result.reduction.anchors.tolist()


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_uploads_are_seen_as_they_are(api: Api, engine: Engine, kind: str) -> None:
    data = file_of(engine.samples["scene-1"].picture, kind)
    found = api.upload(data)
    assert found.status_code == 200
    name = found.json()["image"]
    assert api.get(f"/api/images/{name}").json() == found.json()
    seen = Image.open(io.BytesIO(api.get(f"/api/images/{name}/crops/0.png").content))
    assert seen.size == (336, 336)
    if kind in ("PNG", "BMP"):
        np.testing.assert_array_equal(np.asarray(seen), np.asarray(engine.samples["scene-1"].picture))


def test_uploads_are_not_written_to_disk(api: Api, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a temporary file was opened")

    for name in ("TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    noise = np.random.default_rng(0).integers(0, 256, (1400, 1400, 3), dtype=np.uint8)
    assert api.upload(file_of(Image.fromarray(noise))).status_code == 200


def bomb(side: int = 10_000) -> bytes:
    """A 100-megapixel picture in a few kilobytes."""
    return file_of(Image.new("1", (side, side)))


SCRIPT = b'<svg xmlns="http://www.w3.org/2000/svg"><script>document.title = "owned"</script></svg>'


@pytest.mark.parametrize(
    ("make", "status", "says"),
    [
        (lambda: b"not a picture at all", 415, "PNG, JPEG"),
        (lambda: b"", 415, "PNG, JPEG"),
        (lambda: SCRIPT, 415, "PNG, JPEG"),
        (lambda: file_of(Image.effect_noise((300, 300), 90).convert("RGB"))[:4000], 422, "broken"),
        (bomb, 413, "100 megapixels"),
        (lambda: bomb(20_000), 413, "megapixels"),
        (lambda: bytes(21_000_000), 413, "20 MB"),
    ],
    ids=["text", "empty", "svg", "truncated", "bomb", "larger-bomb", "large-file"],
)
def test_what_is_no_picture_or_too_large_is_refused_in_one_sentence(
    api: Api, make: Callable[[], bytes], status: int, says: str
) -> None:
    answer = api.upload(make())
    assert (answer.status_code, says in answer.json()["detail"]) == (status, True)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bomb()

    def refuse(self: Image.Image) -> None:
        raise AssertionError("the picture was decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    with pytest.raises(PictureError, match="megapixels"):
        read_picture(data, UPLOADS)


def test_a_strip_is_refused_before_it_is_scaled_up(api: Api, grids: Engine) -> None:
    """102 bytes that a processor would make 336 x 2,016,000 pixels of."""
    answer = api.upload(file_of(Image.new("1", (1, 6000))))
    assert answer.status_code == 422
    assert "1 x 6000 pixels, one side more than 50 times the other" in answer.json()["detail"]
    # Wide, but within bounds.
    assert api.upload(file_of(Image.new("RGB", (400, 10)))).status_code == 200


def test_a_picture_of_too_many_tokens_is_refused_before_it_is_encoded(grids: Engine) -> None:
    few = Engine(grids.model, grids.processor, name="few", limits=replace(UPLOADS, tokens=10))

    def refuse(*args: Any) -> Any:
        raise AssertionError("the picture was encoded")

    few._features = refuse  # type: ignore[method-assign]
    with api_of(few) as api:
        answer = api.upload(file_of(tiny.picture(230, 120)))
    assert answer.status_code == 413
    assert "32 visual tokens; give a smaller one, of at most 10 tokens" in answer.json()["detail"]


@pytest.mark.parametrize("which", ["engine", "tiles", "grids"])
@pytest.mark.parametrize("marker", ["<image>", "<|image_pad|>", "<video>"])
def test_markers_in_a_question_are_text(which: str, marker: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(which)
    state = {"image": "scene-0", "question": f"is {marker} {marker} red?", "method": "stacktok"}
    with api_of(engine, deadline=100) as api:
        trace = api.post("/api/trace", **state)
        assert trace.status_code == 200
        assert trace.json()["question"] == state["question"]
        answer = api.post("/api/answer", budget=9, **state)
        assert (answer.status_code, answer.json()["tokens"]) == (200, 9)
        program = api.post("/api/export", form="python", budget=9, **state).text
    if which == "engine":
        assert said_by(program)[0] == answer.json()["answer"]


def test_a_request_that_takes_too_long_is_answered_and_stopped(engine: Engine) -> None:
    stopped = threading.Event()

    class Slow(Engine):
        def answer(self, name: str, question: str, method: str | None, budget: int | None, job: Job) -> dict[str, Any]:
            while not job.cancelled:
                stopped.wait(0.005)
            stopped.set()
            raise StopIteration

    slow = Slow(engine.model, engine.processor, name="slow", samples=tuple(engine.samples.values()))
    with api_of(slow, deadline=0.2) as api:
        answer = api.post("/api/answer/full", image="scene-0", question="")
        assert answer.status_code == 504
        assert "worked on this for 0.2 s" in answer.json()["detail"]
        assert "--deadline" in answer.json()["detail"]
        assert stopped.wait(30)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"question": "' + b"x" * 70_000 + b'"}', 413, "64000 bytes"),
        (b"[" * 30_000 + b"]" * 30_000, 422, "nests more than 16 deep"),
        (b'{"question": ' + b"[" * 900 + b"]" * 900 + b"}", 422, "nests more than 16 deep"),
        (b'{"budget": ' + b"9" * 10_000 + b"}", 422, "not JSON"),
        (b"\xff\xfe", 422, "decode"),
        (b'{"image": "scene-0", "method": "stacktok"}', 422, "question: Field required"),
        (b'{"image": "scene-0", "method": "m", "question": "' + b"q" * 1001 + b'"}', 422, "question: String should"),
    ],
    ids=["long", "deep", "deep-value", "digits", "bytes", "missing", "long-question"],
)
def test_bodies_are_bounded(api: Api, body: bytes, status: int, says: str) -> None:
    headers = {**api.headers(), "Content-Type": "application/json"}
    answer = api.client.post("/api/trace", content=body, headers=headers)
    assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
    assert len(answer.text) < 500


def test_an_upload_that_is_broken_off_leaves_no_traceback(engine: Engine) -> None:

    from stacktok.view.server import create_app

    app, sent = create_app(engine), []
    headers = [(b"host", b"127.0.0.1"), (b"x-page", b"p"), (b"x-serial", b"1")]
    scope = {"type": "http", "method": "POST", "path": "/api/images", "headers": headers, "query_string": b""}
    messages = [{"type": "http.request", "body": b"begin", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    # An error that leaves the application is what the server logs with a traceback.
    coroutines.run(app(scope, receive, send))


def test_foreign_names_and_pages_without_their_header_are_turned_away(api: Api) -> None:
    assert api.client.get("/api/info", headers={"Host": "elsewhere.example"}).status_code == 400
    query = {"image": "scene-0", "question": "", "method": "stacktok"}
    assert api.client.post("/api/trace", json=query).status_code == 422


def test_answers_forbid_everything_foreign(api: Api) -> None:
    for path in ("/", "/app.js", "/api/info"):
        policy = api.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy


def test_unknown_names_are_named(api: Api) -> None:
    assert "held" in api.get("/api/images/file-0000").json()["detail"]
    found = api.post("/api/trace", image="scene-0", question="", method="guess")
    assert found.status_code == 404
    assert "'guess'" in found.json()["detail"]


def test_a_full_queue_says_so_and_a_newer_state_cancels_the_older(engine: Engine) -> None:
    started, go = threading.Event(), threading.Event()

    class Slow(Engine):
        def answer(self, name: str, question: str, method: str | None, budget: int | None, job: Job) -> dict[str, Any]:
            started.set()
            while not go.wait(0.005):
                job.check()
            return {}

    slow = Slow(engine.model, engine.processor, name="slow", samples=tuple(engine.samples.values()))
    with api_of(slow, waiting=1) as api:
        status: dict[str, int] = {}

        def ask(name: str, page: str, serial: int) -> threading.Thread:
            headers = {"X-Page": page, "X-Serial": str(serial)}
            body = {"image": "scene-0", "question": name}

            def send() -> None:
                status[name] = api.client.post("/api/answer/full", json=body, headers=headers).status_code

            thread = threading.Thread(target=send)
            thread.start()
            return thread

        first = ask("first", "a", 1)
        assert started.wait(30)
        started.clear()
        second = ask("second", "a", 2)
        first.join(30)
        assert started.wait(30)
        third, fourth = ask("third", "b", 1), ask("fourth", "c", 1)
        # One of them waits, and the other finds the queue full.
        while third.is_alive() and fourth.is_alive():
            third.join(0.01)
        go.set()
        for thread in (second, third, fourth):
            thread.join(30)
    assert status["first"] == 409
    assert sorted([status["second"], status["third"], status["fourth"]]) == [200, 200, 503]
