"""The package that docs/add-a-method.md prints, installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stacktok.methods import registry

DOC = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def code_of(document: Path, language: str, number: int = 0) -> str:
    """A block of a language in a page."""
    return document.read_text().split(f"```{language}\n")[1 + number].split("```", 1)[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The method's name; its module and entry point are found by this process and by those that it starts."""
    (tmp_path / "loudest_tokens.py").write_text(code_of(DOC, "python"))
    entry = code_of(DOC, "toml").split("]", 1)[1]
    name, value = (part.strip().strip('"') for part in entry.strip().split("="))
    metadata = tmp_path / "loudest_tokens-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loudest-tokens\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[stacktok.methods]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    registry._found.cache_clear()
    yield name
    registry._found.cache_clear()
    sys.modules.pop("loudest_tokens", None)
