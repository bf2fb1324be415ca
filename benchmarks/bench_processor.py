"""Processor time of vLLM's HTTP process per image request, stock against this package's plugin.

No engine is started: a renderer turns chat requests into engine inputs, as the server's process does. Every request has
a picture of its own, so no cache answers; the arms take turns.

    .venv-vllm/bin/python benchmarks/bench_processor.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from bench_serve import fresh_url
from served import messages
from stacktok.bench.presets import QUESTION
from stacktok.embedded import path as embedded_path
from stacktok.serving import engine_arguments
from stacktok.serving.plugin import register


def renderer(**own: Any) -> Any:
    """The renderer of a server of the embedded model."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    arguments = EngineArgs(str(embedded_path()), dtype="float32", max_model_len=2048, enforce_eager=True, **own)
    return renderer_from_config(arguments.create_engine_config())


def request_seconds(one: Any, url: str, budget: Any) -> float:
    """Processor seconds of one request."""
    from vllm.renderers.params import ChatParams

    extras = {} if budget == "server" else {"mm_processor_kwargs": {"stacktok": {"budget": budget}}}
    begin = time.process_time()
    one.render_chat(
        [messages(QUESTION, url)],
        ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False}),
        prompt_extras=extras,
    )
    return time.process_time() - begin


def create_seconds(one: Any, repeats: int) -> float:
    """Seconds of one `create_processor`."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    begin = time.perf_counter()
    for _ in range(repeats):
        MULTIMODAL_REGISTRY.create_processor(one.model_config)
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="per arm")
    arguments = parser.parse_args()
    register()
    stock, ours = renderer(), renderer(**engine_arguments("llava", 64))
    arms = {"stock": (stock, "server"), "budget null": (ours, None), "budget 64": (ours, "server")}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    seed = 0
    for turn in range(arguments.requests + 5):
        for name, (one, budget) in arms.items():
            found = request_seconds(one, fresh_url(seed), budget)
            seed += 1
            if turn >= 5:
                seconds[name].append(found)
    base = statistics.median(seconds["stock"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:12} {1e3 * median:7.2f} ms of processor time per request, {median / base:.2f} of stock")
    for name, one in (("stock", stock), ("plugin", ours)):
        print(f"{name:12} {1e3 * min(create_seconds(one, 50) for _ in range(3)):7.3f} ms per create_processor")


if __name__ == "__main__":
    main()
