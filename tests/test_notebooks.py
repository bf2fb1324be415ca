"""The notebooks run on the embedded model and print what is stored in them."""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def run(source: str, known: dict[str, Any]) -> str:
    """Run a cell as a notebook does; returns what it printed, and the repr of its last expression if it is plain."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), known)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), known)
            if type(value).__module__ == "numpy":
                print(repr(value))
    return printed.getvalue()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_says(path: Path) -> None:
    known: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        expected = ""
        for output in cell["outputs"]:
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if output["output_type"] == "stream" or "array" in "".join(text):
                expected += "".join(text)
        assert run("".join(cell["source"]), known).strip() == expected.strip()


def test_there_are_three() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {"add-a-method", "compare-methods", "first-selection"}
