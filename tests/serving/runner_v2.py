"""A program: answers of vLLM's Model Runner V2 on this CPU, each against this package's transformers path.

The runner is the one that GPUs use. Its kernels are Triton's and are interpreted; vLLM asks for a Triton backend for
CPUs, which the public builds of Triton do not have, so that an empty one stands in. Every family has a process of its
own, forked from this one.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

BUDGET = 10
BIDIRECTIONAL = ("gemma3",)
"""Families whose image tokens see each other."""


def prepare() -> None:
    """Set everything that must stand before vLLM is loaded."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from triton.backends import backends

    found: dict[str, Any] = backends
    found["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: False))


def attend_by_triton() -> None:
    """Choose the attention backend in which the tokens of an image can see each other; CPUs have one without."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda *args, **kwargs: path)
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)


def check(name: str) -> None:
    """Compare the answers of one family."""
    from vllm import LLM

    from stacktok.serving import engine_arguments
    from tests.serving.answers import CATS, DOG, SQUARE, TALL, WIDE, Request, answers, expected, video
    from tests.serving.models import folder, reference
    from tests.serving.test_videos import VIDEOS

    if name in BIDIRECTIONAL:
        attend_by_triton()
    tiny = reference(name)
    limits = {"image": 2, "video": 2} if name in VIDEOS else {"image": 2}
    # A prompt is prefilled in pieces, and the cuts go through its images; not where their tokens see each other.
    piece = 256 if name in BIDIRECTIONAL else 24
    small = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": piece, "kv_cache_memory_bytes": 1 << 24}
    ours = engine_arguments(tiny.model.config.model_type, BUDGET)
    llm = LLM(str(folder(name)), dtype="float32", enforce_eager=True, limit_mm_per_prompt=limits, **small, **ours)
    runner = type(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    assert any(kind.__module__ == "vllm.v1.worker.gpu.model_runner" for kind in runner.__mro__), runner
    requests = [
        Request(DOG, (WIDE,)),
        Request(CATS, (WIDE, SQUARE), budget=7),
        Request("What is the answer?"),
        Request(DOG, (TALL,), budget=None),
    ]
    tokens = 6
    if name in BIDIRECTIONAL:
        # Interpreted attention is slow.
        requests, tokens = requests[1:2], 3
    if name in VIDEOS:
        requests += [Request(DOG, videos=(video(1),)), Request(CATS, (WIDE,), (video(1),), budget=5)]
    for request, answer in zip(requests, answers(llm, tiny, requests, tokens), strict=True):
        wanted = expected(tiny, request, BUDGET, tokens=tokens)
        assert answer.close(wanted), (request.question, request.budget, answer, wanted)


def main(names: list[str]) -> int:
    """Check families one after the other; the number of those that failed."""
    prepare()
    # Loaded once, for all.
    import transformers  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    failed = 0
    for name in names:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check(name)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        wrong = os.waitpid(child, 0)[1] != 0
        failed += wrong
        print(name, "differs" if wrong else "equal", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
