"""The page in a real browser."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route

from stacktok.view.engine import Engine
from tests import tiny
from tests.view.conftest import served
from tests.view.test_api import SCRIPT, bomb, file_of, places_of, run_of_the_library


def record_of(engine: Engine, name: str, question: str, budget: int) -> Any:
    """The selector's record of what the page shows."""
    return engine.pruned_view(engine.picture(name), question, "stacktok", budget).reduction.record


WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with served(engine) as found:
        yield found


@pytest.fixture(scope="module")
def tiles_address(tiles: Engine) -> Iterator[str]:
    with served(tiles) as found:
        yield found


@pytest.fixture(scope="module")
def grids_address(grids: Engine) -> Iterator[str]:
    with served(grids) as found:
        yield found


class Inspector:
    """The page as a person uses it; everything that it asks for must come from its own server."""

    def __init__(self, browser: Browser, address: str, size: str = "desk", **context: Any) -> None:
        width, height = WIDTHS[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, **context)
        self.page: Page = self.context.new_page()
        self.address = address
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.route("**/*", self._watch)

    def _watch(self, route: Route) -> None:
        if not route.request.url.startswith((self.address, "data:", "blob:")):
            self.foreign.append(route.request.url)
            route.abort()
            return
        route.continue_()

    def open(self, fragment: str = "") -> Inspector:
        self.page.goto(self.address + fragment)
        return self.settled()

    def settled(self, **state: Any) -> Inspector:
        """Wait until answers for the shown state are there."""
        self.page.wait_for_function(
            """(wanted) => {
                const settled = document.body.dataset.settled && JSON.parse(document.body.dataset.settled);
                const link = new URLSearchParams(location.hash.slice(1));
                if (!settled || settled[1] !== link.get('q') || String(settled[2]) !== link.get('k')) return false;
                if (settled[0] !== link.get('image') || settled[3] !== link.get('method')) return false;
                if (settled[4] !== (link.get('with') || '')) return false;
                return Object.entries(wanted).every(([name, value]) => link.get(name) === String(value));
            }""",
            arg=state,
            timeout=60_000,
        )
        return self

    def kept(self, panel: int = 0) -> list[list[int]]:
        return json.loads(self.page.locator(".stage").nth(panel).get_attribute("data-kept") or "null")

    def link(self) -> str:
        return str(self.page.evaluate("location.hash"))

    def close(self) -> None:
        self.context.close()
        assert not self.errors
        assert not self.foreign


@pytest.fixture
def inspector(browser: Browser, address: str) -> Iterator[Inspector]:
    made = Inspector(browser, address).open()
    yield made
    made.close()


def test_the_page_opens_with_a_sample_answered(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    assert page.locator("#question").input_value() == engine.samples["scene-0"].questions[0]
    assert page.locator("#answers tbody tr").count() == 2
    assert len(inspector.kept()) == 64
    assert page.locator("#samples button").count() == 3


def test_a_question_is_asked_and_the_numbers_are_the_librarys(inspector: Inspector, engine: Engine) -> None:
    page, question = inspector.page, engine.samples["scene-0"].questions[1]
    page.fill("#question", question)
    page.keyboard.press("Enter")
    inspector.settled(q=question)
    for budget in (64, 9, 2):
        page.fill("#count", str(budget))
        page.keyboard.press("Tab")
        inspector.settled(k=budget)
        method = type(engine.methods["stacktok"])(budget=budget)
        result, text = run_of_the_library(engine, question, method)
        stage = page.locator(".stage").first
        assert inspector.kept() == [[0, token] for token in result.selection.indices.tolist()]
        assert float(stage.get_attribute("data-relevance") or "nan") == result.selection.final_relevance
        assert float(stage.get_attribute("data-coverage") or "nan") == result.selection.final_coverage
        assert page.locator("#answers tbody tr").first.locator("td").nth(1).inner_text() == (text or "(nothing)")
    words = page.locator("#words .name").all_inner_texts()
    assert " ".join(words) == result.query


def test_dragging_the_budget_redraws_without_the_model(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    # The model is away: whatever the page draws now, it draws from what it has.
    page.route("**/api/**", lambda route: route.abort())
    page.locator("#budget").scroll_into_view_if_needed()
    box = page.locator("#budget").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.12, box["y"] + box["height"] / 2)
    page.mouse.down()
    question = engine.samples["scene-0"].questions[0]
    seen = set()
    for share in (0.02, 0.3, 0.6, 0.9):
        page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2, steps=3)
        budget = int(page.locator("#budget").input_value())
        kept = record_of(engine, "scene-0", question, budget).indices.tolist()
        assert [token for _, token in inspector.kept()] == kept
        seen.add(budget)
    page.mouse.up()
    assert len(seen) == 4
    assert not [url for url in asked if "/api/trace" in url]


def test_the_answer_is_refreshed_when_the_slider_rests(inspector: Inspector) -> None:
    page = inspector.page
    page.locator("#budget").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    inspector.settled(k=61)
    row = page.locator("#answers tbody tr").first.locator("td")
    assert row.nth(2).inner_text() == "61"
    assert row.nth(1).get_attribute("class") == "answer"


def test_the_film_steps_plays_and_pauses(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    question = engine.samples["scene-0"].questions[0]
    record = record_of(engine, "scene-0", question, 64)
    page.locator("#film").focus()
    page.keyboard.press("Home")
    assert inspector.kept() == []
    page.locator("h1").click()
    for step in range(1, 5):
        page.keyboard.press("ArrowRight")
        assert sorted(token for _, token in inspector.kept()) == sorted(record.order[:step].tolist())
        said = page.locator("#token").inner_text()
        assert f"Token {record.order[step - 1]}:" in said
        assert f"by {record.criterion[step - 1]}" in said
        assert "Gains: relevance +" in said
    page.keyboard.press("ArrowLeft")
    assert len(inspector.kept()) == 3
    page.keyboard.press("Space")
    page.wait_for_function("() => Number(document.getElementById('film').value) > 6")
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-pressed") == "false"
    stopped = page.locator("#film").input_value()
    page.wait_for_timeout(400)
    assert page.locator("#film").input_value() == stopped


def test_swaps_are_the_last_frames_of_a_film(browser: Browser, address: str, engine: Engine) -> None:
    for sample in engine.samples.values():
        for question in sample.questions:
            for budget in range(2, 17):
                record = record_of(engine, sample.name, question, budget)
                if record.swaps:
                    break
            if record.swaps:
                break
        if record.swaps:
            break
    assert record.swaps
    from urllib.parse import urlencode

    state = urlencode({"image": sample.name, "q": question, "k": budget, "method": "stacktok", "frame": budget})
    inspector = Inspector(browser, address).open("#" + state)
    assert sorted(token for _, token in inspector.kept()) == sorted(record.order.tolist())
    inspector.page.locator("h1").click()
    for _ in record.swaps:
        inspector.page.keyboard.press("ArrowRight")
    assert [token for _, token in inspector.kept()] == record.indices.tolist()
    assert "Swapped in for token" in inspector.page.locator("#token").inner_text()
    inspector.close()


def test_hovering_tells_when_and_why(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    question = engine.samples["scene-0"].questions[0]
    record = record_of(engine, "scene-0", question, 64)
    box = page.locator(".stage canvas").bounding_box()
    assert box is not None
    cell = box["width"] / 24
    dropped = next(token for token in range(576) if token not in record.order)
    for token, says in ((int(record.order[0]), "Picked 1st of 64"), (dropped, "Dropped at 64")):
        page.mouse.move(box["x"] + (token % 24 + 0.5) * cell, box["y"] + (token // 24 + 0.5) * cell)
        said = page.locator("#token").inner_text()
        assert f"Token {token}:" in said
        assert says in said
        assert "Gains: relevance +" in said
    assert "covered best by" in said
    page.mouse.move(5, 5)
    assert "Point at a token" in page.locator("#token").inner_text()


def test_merged_tokens_are_regions(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    question = engine.samples["scene-0"].questions[0]
    page.locator(".panel select").first.select_option("visionzip")
    inspector.settled(method="visionzip")
    result, _ = run_of_the_library(engine, question, replace(engine.methods["visionzip"], budget=64))
    regions = {int(result.reduction.anchors[i, 1]): own for i, own in result.reduction.merged.items() if len(own)}
    token, sources = max(regions.items(), key=lambda entry: len(entry[1]))
    said = page.locator(".metrics").inner_text()
    assert f"◆ {len(regions)}" in said
    assert "CLS 1" in said
    assert page.locator("#film").is_disabled()
    assert page.locator("#curves").is_hidden()
    box = page.locator(".stage canvas").bounding_box()
    assert box is not None
    cell = box["width"] / 24
    page.mouse.move(box["x"] + (token % 24 + 0.5) * cell, box["y"] + (token // 24 + 0.5) * cell)
    assert f"Made of {len(sources)} tokens" in page.locator("#token").inner_text()
    other = next(own for own in sources[:, 1].tolist() if own != token)
    page.mouse.move(box["x"] + (other % 24 + 0.5) * cell, box["y"] + (other // 24 + 0.5) * cell)
    assert (
        f"Merged with {len(sources) - 1} others, at the place of token {token}" in page.locator("#token").inner_text()
    )


def test_a_second_method_stands_beside(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    question = engine.samples["scene-0"].questions[0]
    page.click("#compare")
    for method in ("coverage only", "divprune", "visionzip", "fastv", "sparsevlm"):
        page.locator(".panel select").nth(1).select_option(method)
        inspector.settled(**{"with": method})
        result, text = run_of_the_library(engine, question, replace(engine.methods[method], budget=64))
        assert [token for _, token in inspector.kept(1)] == sorted(places_of(result.reduction))
        assert page.locator("#answers tbody tr").count() == 3
        row = page.locator("#answers tbody tr").nth(1).locator("td").all_inner_texts()
        assert row[1] == (text or "(nothing)")
        assert row[2] == ("64" if len(set(result.per_layer)) == 1 else f"{result.average:.1f} mean")
    boxes = [page.locator(".panel").nth(at).bounding_box() for at in (0, 1)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    page.get_by_role("button", name="Close").click()
    inspector.settled()
    assert page.locator(".panel").count() == 1


@pytest.mark.parametrize(("form", "name"), [("svg", "stacktok.svg"), ("json", "stacktok.json"), ("python", ".py")])
def test_the_state_is_taken_away(inspector: Inspector, form: str, name: str) -> None:
    page = inspector.page
    page.click("#export summary")
    with page.expect_download() as download:
        page.click(f"[data-form={form}]")
    text = Path(download.value.path()).read_text()
    assert download.value.suggested_filename.endswith(name)
    if form == "json":
        assert json.loads(text)["indices"] == [[token for _, token in inspector.kept()]]
    assert {"svg": "<svg", "json": '"selection"', "python": "StackTok(budget=64)"}[form] in text


def test_a_link_reproduces_the_state(browser: Browser, inspector: Inspector, address: str) -> None:
    page = inspector.page
    page.locator("#samples button").nth(1).click()
    inspector.settled(image="scene-1")
    page.click("#compare")
    inspector.settled(**{"with": "mmtok"})
    page.fill("#count", "12")
    page.keyboard.press("Tab")
    inspector.settled(k=12)
    page.locator("#words button").first.click()
    page.locator("#back").click()
    other = Inspector(browser, address).open(inspector.link())
    assert other.link() == inspector.link()
    for panel in (0, 1):
        assert other.kept(panel) == inspector.kept(panel)
    assert other.page.locator("#token").inner_text() == inspector.page.locator("#token").inner_text()
    assert other.page.locator("#words button").first.get_attribute("aria-pressed") == "true"
    other.close()


def test_weights_of_tokens_are_shown_on_demand(inspector: Inspector) -> None:
    page = inspector.page
    assert not page.locator("#weights").count()
    page.locator(".panel select").first.select_option("spotlight")
    inspector.settled(method="spotlight")
    before = page.locator("canvas").first.screenshot()
    page.click("#weights")
    assert page.locator("#weights").get_attribute("aria-pressed") == "true"
    assert page.locator("canvas").first.screenshot() != before
    assert page.locator("#words button:not(#weights)").count()
    page.click("#weights")
    assert page.locator("canvas").first.screenshot() == before


def test_everything_can_be_done_with_the_keyboard(browser: Browser, address: str, engine: Engine) -> None:
    inspector = Inspector(browser, address).open()
    page = inspector.page

    def focus(selector: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"the Tab key does not reach {selector}")

    focus("#question")
    page.keyboard.press("Control+A")
    page.keyboard.type("Where is it?")
    page.keyboard.press("Enter")
    inspector.settled(q="Where is it?")
    focus("#compare")
    page.keyboard.press("Enter")
    inspector.settled(**{"with": "mmtok"})
    focus(".stage")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.keyboard.press(f"Shift+{key}")
    assert "Token 49: row 3, column 2" in page.locator("#token").inner_text()
    focus("#budget")
    page.keyboard.press("ArrowLeft")
    inspector.settled(k=63)
    focus("#play")
    page.keyboard.press("Enter")
    page.wait_for_function("() => Number(document.getElementById('film').value) > 2")
    page.keyboard.press("Enter")
    focus("#words button")
    page.keyboard.press("Enter")
    assert page.locator("#words button").first.get_attribute("aria-pressed") == "true"
    focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    focus("#export summary")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "stacktok.svg"
    focus("#file")
    inspector.close()


def test_an_uploaded_picture_is_shown_and_comes_back_by_its_link(inspector: Inspector) -> None:
    page = inspector.page
    picture = Image.effect_mandelbrot((500, 300), (-2, -1.2, 1, 1.2), 40).convert("RGB")
    page.set_input_files("#file", {"name": "own.png", "mimeType": "image/png", "buffer": file_of(picture)})
    page.wait_for_function("() => location.hash.includes('image=file-')")
    inspector.settled()
    kept = inspector.kept()
    page.reload()
    inspector.settled()
    assert inspector.kept() == kept


def test_a_picture_is_dropped_in(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    data = list(file_of(engine.samples["scene-2"].picture))
    page.evaluate(
        """(data) => {
            const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(data)], 'own.png', { type: 'image/png' }));
            for (const kind of ['dragover', 'drop']) {
                document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true }));
            }
        }""",
        data,
    )
    page.wait_for_function("() => location.hash.includes('image=file-')")
    inspector.settled()
    assert page.locator("#drop").is_hidden()
    assert len(inspector.kept()) == 64


@pytest.mark.parametrize(
    ("name", "kind", "data", "says"),
    [
        ("broken.png", "image/png", file_of(Image.effect_noise((300, 300), 90).convert("RGB"))[:3000], "broken"),
        ("bomb.png", "image/png", bomb(), "100 megapixels"),
        ("script.svg", "image/svg+xml", SCRIPT, "not a picture"),
    ],
    ids=["broken", "bomb", "svg"],
)
def test_bad_files_are_refused_and_the_page_goes_on(
    inspector: Inspector, name: str, kind: str, data: bytes, says: str
) -> None:
    page, before = inspector.page, inspector.kept()
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})
    page.wait_for_selector("#message:not([hidden])")
    assert says in page.locator("#message").inner_text()
    assert page.title() == "StackTok inspector"
    assert inspector.kept() == before
    suggested = page.locator("#suggested button").nth(1)
    suggested.click()
    inspector.settled(q=suggested.inner_text())
    assert page.locator("#message").is_hidden()


def test_a_marker_in_the_question_is_answered_as_text(inspector: Inspector) -> None:
    page = inspector.page
    page.fill("#question", "is <image> red?")
    page.keyboard.press("Enter")
    inspector.settled(q="is <image> red?")
    assert page.locator("#message").is_hidden()
    assert page.locator("#answers .answer").count() == 2


def test_the_page_says_what_it_waits_for_and_shows_no_old_answer(inspector: Inspector, engine: Engine) -> None:
    page = inspector.page
    held: list[Route] = []
    page.route("**/api/trace", lambda route: held.append(route))
    page.fill("#question", "a new question")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('status').textContent.includes('Selecting')")
    assert page.locator("#answers .answer").count() == 0
    page.wait_for_function("() => /stacktok… [1-9]/.test(document.getElementById('status').textContent)")
    detail = "The model has worked on this for 120 s without an answer."
    held[0].fulfill(status=504, json={"detail": detail})
    page.wait_for_selector("#message:not([hidden])")
    assert page.locator("#message").inner_text() == detail
    assert page.locator("#status").inner_text() == ""
    assert page.locator("#answers .waiting").all_inner_texts() == ["–", "–"]
    page.unroute("**/api/trace")
    page.keyboard.press("Enter")
    inspector.settled(q="a new question")
    assert page.locator("#message").is_hidden()


def test_a_lost_server_is_named(browser: Browser, engine: Engine) -> None:
    with served(engine) as address:
        inspector = Inspector(browser, address).open()
    page = inspector.page
    page.locator("#budget").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#message:not([hidden])")
    assert "The server does not answer" in page.locator("#message").inner_text()
    # No answer of another budget stands beside the new one.
    assert page.locator("#answers .waiting").all_inner_texts() == ["–"]
    page.fill("#question", "anybody there?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('#answers .waiting').length === 2")
    assert "Start `stacktok view` again" in page.locator("#message").inner_text()
    inspector.close()


def test_the_budget_box_shows_the_budget_in_use(inspector: Inspector) -> None:
    page, box = inspector.page, inspector.page.locator("#count")
    for typed, used in (("9999", 576), ("0", 1), ("-3", 1), ("12.6", 13), ("", 13), ("e", 13), ("20", 20)):
        box.click()
        page.keyboard.press("Control+A")
        page.keyboard.press("Delete")
        page.keyboard.type(typed)
        page.keyboard.press("Enter")
        if typed == "e":
            page.keyboard.press("Tab")
        inspector.settled(k=used)
        assert (box.input_value(), page.locator("#budget").input_value()) == (str(used), str(used)), typed
        assert len(inspector.kept()) == used
    page.locator("#back").click()
    box.click()
    page.keyboard.press("Tab")
    # Leaving the box without a change does not leave the frame.
    assert len(inspector.kept()) == 19


def test_words_that_are_not_part_of_the_query_are_struck_through(inspector: Inspector) -> None:
    page = inspector.page
    page.fill("#question", "Which hen is in the barn, and then where?")
    page.keyboard.press("Enter")
    inspector.settled(q="Which hen is in the barn, and then where?")
    asked = page.locator("#asked")
    assert asked.inner_text() == "Which hen is in the barn, and then where?"
    assert [text.split() for text in asked.locator("del").all_inner_texts()] == [
        ["Which"],
        ["is"],
        ["the"],
        [",", "and", "then", "where?"],
    ]
    line = "(e) => getComputedStyle(e).textDecorationLine"
    assert asked.locator("del").first.evaluate(line) == "line-through"
    assert page.locator("#words .name").all_inner_texts() == ["hen", "in", "barn"]
    page.fill("#question", "")
    page.keyboard.press("Enter")
    inspector.settled(q="")
    assert asked.is_hidden()


LAYOUT = """() => {
  const problems = [];
  const box = (e) => e.getBoundingClientRect();
  const name = (e) => e.id || e.className || e.tagName + ':' + e.textContent.slice(0, 20);
  const wanted = 'button, input, select, summary, label, h1, h2, p, td, th, dt, dd, figure, canvas, '
    + '.card, .panel, .transport';
  // Closed menus are not there, and what scrolls inside its own line may reach beyond it.
  const all = [...document.querySelectorAll(wanted)].filter((e) => e.checkVisibility({ visibilityProperty: true })
    && box(e).width > 2 && box(e).height > 2 && !e.closest('#samples, #suggested, .hidden, details:not([open]) .menu'));
  if (document.documentElement.scrollWidth > innerWidth) problems.push('the page is wider than the window');
  for (const e of all) {
    const own = box(e);
    if (own.left < -0.5 || own.right > innerWidth + 0.5) problems.push(name(e) + ' is cut off by the window');
    const card = e.parentElement.closest('.card, .panel, .transport');
    if (card) {
      const outer = box(card);
      const leaves = own.left < outer.left - 0.5 || own.right > outer.right + 0.5 || own.bottom > outer.bottom + 0.5;
      if (leaves) problems.push(name(e) + ' leaves its card');
    }
    const clips = e.matches('button, td, th, p, h2, dt, dd, summary') && e.clientWidth;
    if (clips && e.scrollWidth > e.clientWidth + 1) problems.push(name(e) + ' is cut off');
  }
  all.forEach((a, i) => all.slice(i + 1).forEach((b) => {
    if (a.contains(b) || b.contains(a)) return;
    const [p, q] = [box(a), box(b)];
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 1 && down > 1) problems.push(name(a) + ' overlaps ' + name(b));
  }));
  return problems;
}"""


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize(("scheme", "other"), [("light", "divprune"), ("dark", "sparsevlm")])
def test_nothing_overlaps_and_nothing_is_cut_off(
    browser: Browser, address: str, size: str, scheme: Any, other: str, tmp_path: Path
) -> None:
    inspector = Inspector(browser, address, size, color_scheme=scheme).open(f"#k=40&with={other}")
    page = inspector.page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.locator("#back").click()
    assert page.evaluate(LAYOUT) == []
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True, path=tmp_path / f"{size}-{scheme}.png")))
    assert shot.width == WIDTHS[size][0]
    # The background of the page is what the scheme says, and something is drawn on it.
    corner = shot.convert("L").getpixel((3, shot.height - 3))
    assert isinstance(corner, (int, float))
    assert corner > 200 if scheme == "light" else corner < 60
    colours = shot.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 500
    inspector.close()


@pytest.mark.parametrize("size", WIDTHS)
def test_tiles_show_their_shares(browser: Browser, tiles_address: str, tiles: Engine, size: str) -> None:
    inspector = Inspector(browser, tiles_address, size).open("#k=30")
    page = inspector.page
    question = tiles.samples["scene-0"].questions[0]
    record = record_of(tiles, "scene-0", question, 30)
    kept = [[c, token] for c, own in enumerate(record.indices) for token in own.tolist()]
    assert inspector.kept() == kept
    shares = [int(text.split(" ")[0]) for text in page.locator("#tiles .value").all_inner_texts()]
    assert shares == [crop.k for crop in record.crops]
    page.locator("#tiles button").nth(2).click()
    assert "view 3 of 5" in page.locator("#which").inner_text()
    assert f"At {record.crops[2].k} tokens" in page.locator("#gate").inner_text()
    assert page.evaluate(LAYOUT) == []
    inspector.close()


@pytest.mark.parametrize("size", WIDTHS)
def test_a_picture_of_any_shape_lies_on_its_own_grid(
    browser: Browser, grids_address: str, grids: Engine, size: str
) -> None:
    inspector = Inspector(browser, grids_address, size).open("#k=9&with=visionzip")
    page = inspector.page
    file = {"name": "own.png", "mimeType": "image/png", "buffer": file_of(tiny.picture(230, 120))}
    page.set_input_files("#file", file)
    page.wait_for_function("() => location.hash.includes('image=file-')")
    inspector.settled()
    assert page.locator("#of").inner_text() == "of 32"
    box = page.locator(".stage canvas").first.bounding_box()
    assert box is not None
    assert box["width"] / box["height"] == pytest.approx(8 / 4, rel=0.01)
    name = str(page.evaluate("new URLSearchParams(location.hash.slice(1)).get('image')"))
    question = page.locator("#question").input_value()
    record = record_of(grids, name, question, 9)
    assert [token for _, token in inspector.kept()] == record.indices.tolist()
    cell = box["width"] / 8
    token = int(record.indices[-1])
    page.mouse.move(box["x"] + (token % 8 + 0.5) * cell, box["y"] + (token // 8 + 0.5) * cell)
    assert f"Token {token}: row {token // 8 + 1}, column {token % 8 + 1}" in page.locator("#token").inner_text()
    assert page.evaluate(LAYOUT) == []
    inspector.close()


def test_the_film_follows_the_panel_that_has_steps(inspector: Inspector) -> None:
    page = inspector.page
    page.locator(".panel select").first.select_option("divprune")
    inspector.settled(method="divprune")
    assert page.locator("#play").is_disabled()
    page.click("#compare")
    inspector.settled(**{"with": "stacktok"})
    assert page.locator("#play").is_enabled()
    alone = inspector.kept(0)
    page.locator("#back").click()
    assert len(inspector.kept(1)) == 63
    assert inspector.kept(0) == alone
    assert "next pick by" in page.locator("#gate").inner_text()
    assert page.locator("#curves").is_visible()
