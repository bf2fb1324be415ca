"""vLLM's Model Runner V2, which is the default on GPUs, serves every family as V1 does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.serving.models import FAMILIES
from tests.serving.runner_v2 import BIDIRECTIONAL

NAMES = (*FAMILIES, *BIDIRECTIONAL)


def test_families_give_the_answers_of_transformers() -> None:
    command = [sys.executable, "-m", "tests.serving.runner_v2", *NAMES]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == [f"{name} equal" for name in NAMES], done.stderr[-6000:]
    assert done.returncode == 0
