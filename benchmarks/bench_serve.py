"""Throughput and time to first token of ``stacktok serve``: all tokens against budgets, in one run of one server.

A request's budget is its own, so full and pruned requests go to the same process in turn, each with a picture that it
has never seen: neither vLLM's caches nor ours answer. Every row is also held against the full row of its concurrency.

    python benchmarks/bench_serve.py
    python benchmarks/bench_serve.py --models llava-1.5-1b --concurrency 1 --requests 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from served import NAME, Server, data_url, messages, serving
from stacktok.bench.presets import PRESETS, QUESTION, preset_config, preset_tokenizer
from stacktok.embedded import path as embedded_path

TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' }}{% for c in m['content'] if c['type'] == 'image' %}{{ '<image> ' }}"
    "{% endfor %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{% endfor %}"
    "{{ ' ASSISTANT:' }}"
)


@dataclass(frozen=True)
class Row:
    """Measurements of one budget at one concurrency."""

    model: str
    concurrency: int
    budget: Any
    requests: int
    seconds: float
    first: float
    slowest: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def preset_folder(name: str, where: Path) -> Path:
    """Config, tokenizer and processor of a preset; vLLM fills the weights with random numbers."""
    import transformers

    if PRESETS[name].family != "llava":
        raise ValueError(f"preset {name!r} is of another family; use one of the llava-1.5 shapes")
    config, prompt = preset_config(name)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(where)
    tokenizer = preset_tokenizer(prompt, **{"<image>": config.image_token_id, "</s>": config.image_token_id - 1})
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<image>"]})
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(where)
    return where


def fresh_url(seed: int) -> str:
    """A picture that no other request has."""
    blocks = np.random.default_rng(seed).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return data_url(Image.fromarray(blocks).resize((336, 336), Image.Resampling.BICUBIC))


def first_token(client: Any, url: str, budget: Any, tokens: int) -> float:
    """Seconds until the first piece of an answer; the whole answer is read."""
    begin, first = time.perf_counter(), 0.0
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages(QUESTION, url),
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "mm_processor_kwargs": {"stacktok": {"budget": budget}}},
    )
    for chunk in stream:
        if not first and chunk.choices:
            first = time.perf_counter() - begin
    return first


def measure(server: Server, budget: Any, concurrency: int, urls: list[str], tokens: int) -> tuple[float, list[float]]:
    """Seconds for all requests, and each one's time to its first token."""
    waiting, found, lock = list(urls), [], threading.Lock()

    def work() -> None:
        client = server.client()
        while True:
            with lock:
                if not waiting:
                    return
                url = waiting.pop()
            first = first_token(client, url, budget, tokens)
            with lock:
                found.append(first)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) != len(urls):
        said = server.log.read_text()[-6000:]
        raise RuntimeError(f"{len(urls) - len(found)} of {len(urls)} requests failed; the server said:\n{said}")
    return time.perf_counter() - begin, found


def run(name: str, arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """All rows of one model."""
    if name == "embedded":
        where, budgets, more = embedded_path(), (None, 192, 64, 16), ()
    else:
        where, budgets = preset_folder(name, folder / name), (None, *PRESETS[name].budgets)
        more = ("--load-format", "dummy")
    if arguments.budgets:
        budgets = (None, *arguments.budgets)
    flags = ("--dtype", arguments.dtype, "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager")
    rows, seed = [], 0
    # On a CPU vLLM plans with nearly all of the memory for keys and values, and ends when it comes to use it.
    room = ("--kv-cache-memory-bytes", str(arguments.cache_gigabytes << 30))
    log = folder / f"{name}.log"
    with serving(where, log, "--cache-megabytes", "0", *flags, *room, *more, seconds=1800) as server:
        for index, budget in enumerate(budgets):
            measure(server, budget, 1, [fresh_url(10**6 + index)], 2)
        for concurrency in arguments.concurrency:
            count = max(concurrency, arguments.requests)
            for budget in budgets:
                urls = [fresh_url(seed + index) for index in range(count)]
                seed += count
                seconds, firsts = measure(server, budget, concurrency, urls, arguments.tokens)
                row = Row(name, concurrency, budget, count, seconds, statistics.median(firsts), max(firsts))
                rows.append(row)
                print(line(row, next(r for r in rows if r.concurrency == concurrency)), flush=True)
    return rows


def line(row: Row, full: Row) -> str:
    """A row of the table, held against the full one."""
    cells = [
        row.model,
        str(row.concurrency),
        "all" if row.budget is None else str(row.budget),
        str(row.requests),
        f"{row.rate:.3f}",
        f"{row.rate / full.rate:.2f}x",
        f"{row.first:.3f}",
        f"{full.first / row.first:.2f}x",
        f"{row.slowest:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["embedded", "llava-1.5-1b"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--budgets", nargs="+", type=int, help="other budgets than each model's own")
    parser.add_argument("--requests", type=int, default=8, help="requests per row, at least the concurrency")
    parser.add_argument("--cache-gigabytes", type=int, default=4, help="room for keys and values on a CPU")
    parser.add_argument("--tokens", type=int, default=8, help="length of an answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.dtype}, answers of {arguments.tokens} tokens")
    print(
        "| model | clients | budget | requests | requests/s | of full | first token s (median) | of full | slowest s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            rows += run(name, arguments, Path(folder))
    if arguments.out:
        arguments.out.write_text(json.dumps([vars(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
