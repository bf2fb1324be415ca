"""Python in README and in the guides runs as it is printed, with the embedded model in place of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stacktok import embedded
from stacktok.cli.common import load
from stacktok.view.samples import scene_samples

ROOT = Path(__file__).parents[1]
# Where a page's own tests follow it: add-a-method.md, add-a-model.md, serving.md, tune.md, batch.md.
PAGES = ("README.md", "docs/index.md", "docs/models.md")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Names that a page takes for given: a loaded model, a picture, a prompt, features."""
    model, processor = load(str(embedded.path()), "float32", "cpu", quiet=True)
    (sample,) = scene_samples(1)
    width = model.get_input_embeddings().weight.shape[1]
    return {
        "model": model,
        "processor": processor,
        "image": sample.picture,
        "prompt": "USER: <image>\nWhat does the sign say? ASSISTANT:",
        "vision": torch.randn(576, 32),
        "projected": torch.randn(576, width),
        "query": torch.randn(3, width),
        "other_query": torch.randn(2, width),
        "embeddings": torch.randn(2, width),
    }


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_its_first_snippet_to_its_last(page: str, names: dict[str, Any]) -> None:
    found, known = snippets(page), dict(names)
    assert found
    for number, snippet in enumerate(found):
        text = snippet.replace("llava-hf/llava-1.5-7b-hf", str(embedded.path())).replace(', device_map="auto"', "")
        exec(compile(text, f"{page}, snippet {number}", "exec"), known)


def test_every_page_with_snippets_is_run_or_has_a_test_of_its_own() -> None:
    others = {"docs/add-a-method.md", "docs/add-a-model.md", "docs/serving.md", "docs/tune.md", "docs/batch.md"}
    pages = {path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    assert {page for page in pages if snippets(page)} <= {*PAGES, *others}
