"""The built site, opened from disk in a real browser: `make test-docs`."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Request, sync_playwright

SITE = Path(__file__).parents[1] / "site"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_box_finds_pages_without_a_network(width: int) -> None:
    foreign: list[str] = []

    def watch(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            foreign.append(request.url)

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        page = browser.new_context(viewport={"width": width, "height": 844}).new_page()
        page.on("request", watch)
        page.goto(f"file://{SITE / 'index.html'}")
        if width < 1000:
            page.locator("label.md-header__button[for=__search]").click()
        page.locator(".md-search__input").click()
        page.keyboard.type("strictness")
        page.wait_for_selector(".md-search-result__link")
        assert "From the paper to the code" in page.locator(".md-search-result").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        browser.close()
    assert foreign == []
