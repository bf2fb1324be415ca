"""Pages that are written to disk, in a real browser at the width of a phone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from stacktok.evaluation.formats import Table, to_html
from stacktok.tune.data import Sample
from stacktok.tune.page import Change, page
from tests import tiny

WIDTH = 390
OVERFLOW = """() => [...document.querySelectorAll('h1, h2, p, article, img, dl, dd, dt, div')].filter((e) => {
  const own = e.getBoundingClientRect();
  return own.left < -0.5 || own.right > innerWidth + 0.5;
}).map((e) => e.tagName + ': ' + e.textContent.slice(0, 40))"""


@pytest.fixture
def phone(browser: Browser) -> Iterator[Page]:
    # As a phone does: without a viewport of its own, a page is laid out for a desk and shrunk.
    context = browser.new_context(viewport={"width": WIDTH, "height": 844}, is_mobile=True, has_touch=True)
    yield context.new_page()
    context.close()


def shown(phone: Page, text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(text)
    phone.goto(f"file://{tmp_path / 'page.html'}")
    assert phone.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [WIDTH, WIDTH]
    assert phone.evaluate(OVERFLOW) == []
    sizes = "() => [...document.querySelectorAll('p, td, th, dd')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    assert min(phone.evaluate(sizes)) >= 12


def test_a_report_scrolls_its_tables_and_keeps_the_method_in_view(phone: Page, tmp_path: Path) -> None:
    columns = tuple(f"benchmark {number}" for number in range(9))
    rows = (("budget 64",), *((f"a method with a long name {n}", *["61.23 [60.1, 62.3]"] * 9) for n in range(6)))
    table = Table("LLaVA-1.5-7B (paper-llava-1.5)", ("Method", *columns), rows, notes=("A note of some length. " * 9,))
    shown(phone, to_html([table, table]), tmp_path)
    frame = phone.locator("div").first
    assert frame.evaluate("(e) => e.scrollWidth > e.clientWidth")
    frame.evaluate("(e) => { e.scrollLeft = e.scrollWidth; }")
    cells = phone.locator("tbody tr").nth(1).locator("td")
    for cell in (cells.first, cells.last):
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= WIDTH
    first = cells.first.bounding_box()
    assert first is not None
    # There is room for numbers beside it.
    assert first["width"] < WIDTH / 2


def test_the_worst_changes_are_one_below_the_other(phone: Page, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (360, 360), "teal").save(picture, format="PNG")
    question = "What word is on the sign beside the road?"
    sample = Sample(0, "x", question, ("supercalifragilistic" * 4,), lambda: tiny.picture(20, 20))
    changes = [(Change(sample, "one", "another " * 12, -3.0, 64), picture.getvalue())] * 3
    shown(phone, page("Worst changes", ["64 tokens", "a line"], changes), tmp_path)
    boxes = [article.bounding_box() for article in phone.locator("article").all()]
    assert len({box["x"] for box in boxes if box is not None}) == 1
