"""What other packages bring by entry points is served: the method of docs/add-a-method.md, the family of serving.md."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.methods.guide import code_of, package
from tests.serving.answers import CATS, DOG, SQUARE, WIDE, Request, answers, expected
from tests.serving.models import folder, reference

__all__ = ["package"]

GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's family; its module and entry point are found by processes that are started from here."""
    entry = code_of(GUIDE, "toml").split("]", 1)[1].strip()
    name, value = (part.strip().strip('"') for part in entry.split("="))
    module = value.split(":")[0]
    blocks = [block.split("```", 1)[0] for block in GUIDE.read_text().split("```python\n")[1:]]
    (code,) = [block for block in blocks if "PrunedProcessor" in block]
    site = tmp_path / "family"
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{module}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[stacktok.serving]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return name


def check(name: str, method: str) -> None:
    from vllm import LLM

    from stacktok.serving import engine_arguments

    tiny = reference(name)
    ours = engine_arguments(tiny.model.config.model_type, 10, method=method)
    small = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    llm = LLM(str(folder(name)), dtype="float32", enforce_eager=True, **small, **ours)
    try:
        requests = [Request(DOG, (WIDE,)), Request(CATS, (WIDE,)), Request(DOG, (SQUARE, WIDE), budget=3)]
        found = answers(llm, tiny, requests)
    finally:
        llm.llm_engine.engine_core.shutdown()
    for request, answer in zip(requests, found, strict=True):
        wanted = expected(tiny, request, 10, method=method)
        assert answer.close(wanted), (request, answer, wanted)


def test_a_method_of_another_package_is_served(package: str) -> None:
    check("llava", package)


def test_a_family_of_another_package_is_served(family: str) -> None:
    # In a process of its own: vLLM asks its plugins once per process, and what is installed later is not known to it.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(check, family, "stacktok").result()
