"""vLLM's Model Runner V2, which is the default on GPUs, serves families of every kind as V1 does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

# One of each kind: plain, M-RoPE, DeepStack with times between frames, texts between tiles, bidirectional images.
NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3")


def test_families_give_the_answers_of_transformers() -> None:
    command = [sys.executable, "-m", "tests.serving.runner_v2", *NAMES]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == [f"{name} equal" for name in NAMES], done.stderr[-6000:]
    assert done.returncode == 0
