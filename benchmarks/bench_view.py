"""The inspector's two targets: a dragged budget redrawn within 100 ms, a new question shown within a second.

Runs the server on the embedded model (or ``--model``) and Debian's Chromium in front of it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile

from playwright.sync_api import Page, sync_playwright

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

# From the event to the frame after the one in which everything was drawn.
DRAG = """async () => {
  const budget = document.getElementById('budget');
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const times = [];
  for (let i = 0; i < 60; i += 1) {
    await frame();
    const begin = performance.now();
    budget.value = 1 + Math.floor(Math.random() * (budget.max - 1));
    budget.dispatchEvent(new Event('input'));
    const script = performance.now() - begin;
    await frame();
    await frame();
    times.push([script, performance.now() - begin]);
  }
  return times;
}"""

# From the click on Ask to the new selection on the page, and to all answers.
ASK = """async (question) => {
  const begin = performance.now();
  document.getElementById('question').value = question;
  const settled = (test) => new Promise((done) => {
    const look = () => (test() ? done(performance.now() - begin) : requestAnimationFrame(look));
    look();
  });
  document.getElementById('form').requestSubmit();
  const link = () => new URLSearchParams(location.hash.slice(1)).get('q') === question;
  const shown = await settled(link);
  const row = (at) => document.querySelectorAll('#answers tbody tr')[at].cells[1].className === 'answer';
  const pruned = await settled(() => link() && row(0));
  const all = await settled(() => row(0) && row(1));
  return [shown, pruned, all];
}"""


def spread(values: list[float]) -> str:
    """Median and largest."""
    return f"{statistics.median(values):8.1f} {max(values):8.1f}"


def measure(page: Page, address: str) -> None:
    """Print the table."""
    page.goto(address)
    page.wait_for_selector("body[data-settled]")
    positions = page.locator("#of").inner_text()
    drags = page.evaluate(DRAG)
    page.wait_for_timeout(3000)
    questions = page.locator("#suggested button").all_inner_texts()
    asked = [page.evaluate(ASK, question) for question in questions[1:]]
    print(f"{'milliseconds, budget ' + positions:44} {'median':>8} {'largest':>8}")
    print(f"{'drag: script':44} {spread([script for script, _ in drags])}")
    print(f"{'drag: event to painted frame':44} {spread([painted for _, painted in drags])}")
    for at, name in enumerate(("selection shown", "pruned answer shown", "both answers shown")):
        print(f"{'question: ' + name:44} {spread([times[at] for times in asked])}")


def picture(page: Page, address: str, path: str) -> None:
    """A screenshot for the README: a sign to read, 40 tokens, two methods."""
    page.goto(address + "#image=scene-3&k=40&with=divprune&q=What+word+is+on+the+black+sign%3F")
    page.wait_for_selector("body[data-settled]")
    page.screenshot(path=path, full_page=True)


def main() -> None:
    """Serve, browse, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub name; the embedded model if not given")
    parser.add_argument("--screenshot", help="also write the page, two methods side by side, to this file")
    arguments = parser.parse_args()
    model = arguments.model
    command = [sys.executable, "-c", "from stacktok.cli import main; main()", "view", "--no-browser", "--port", "0"]
    command += ["--model", model] if model else []
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=log, text=True)
        try:
            assert server.stderr is not None
            address = next(line.split()[4] for line in server.stderr if "inspector is at" in line)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
                measure(browser.new_page(viewport={"width": 1280, "height": 900}), address)
                if arguments.screenshot:
                    page = browser.new_page(viewport={"width": 1280, "height": 900})
                    picture(page, address, arguments.screenshot)
                browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
