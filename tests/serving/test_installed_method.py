"""The method of docs/add-a-method.md, served: vLLM finds it by its entry point."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.methods.guide import package
from tests.serving.answers import CATS, DOG, SQUARE, WIDE, Request, answers, expected
from tests.serving.models import folder, reference

__all__ = ["package"]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_method_of_another_package_is_served(family: str, package: str) -> None:
    from vllm import LLM

    from stacktok.serving import engine_arguments

    tiny = reference(family)
    ours = engine_arguments(tiny.model.config.model_type, 10, method=package)
    llm = LLM(str(folder(family)), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4, **ours)
    try:
        requests = [Request(DOG, (WIDE,)), Request(CATS, (WIDE,)), Request(DOG, (SQUARE,), budget=3)]
        found = answers(llm, tiny, requests)
    finally:
        llm.llm_engine.engine_core.shutdown()
    for request, answer in zip(requests, found, strict=True):
        assert answer.close(expected(tiny, request, 10, method=package)), request
