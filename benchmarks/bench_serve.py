"""``stacktok serve`` against stock vLLM: throughput, first tokens, further questions on a picture, memory.

    python benchmarks/bench_serve.py throughput     # requests/s and time to first token, pictures never seen
    python benchmarks/bench_serve.py questions      # several questions on a picture, prefix caching on
    python benchmarks/bench_serve.py memory         # how many requests a cache of keys and values holds

Two servers run, stock vLLM without our plugin and ours, and every round asks all arms in turn, so that a slow spell of
the machine hits all of them. Ratios are to stock vLLM. With ``--out`` finished rows are kept and not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from served import NAME, Server, data_url, messages, serving, started
from stacktok.bench.presets import PRESETS, QUESTION, preset_config, preset_tokenizer
from stacktok.embedded import path as embedded_path

TEMPLATE = (
    "{% for m in messages %}{{ 'USER: ' }}{% for c in m['content'] if c['type'] == 'image' %}{{ '<image> ' }}"
    "{% endfor %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{% endfor %}"
    "{{ ' ASSISTANT:' }}"
)


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


@dataclass(frozen=True, eq=False)
class Arm:
    """One way of serving a request: stock vLLM, or ours with a budget.

    Attributes
    ----------
    name
        In tables.
    own
        Ours, not stock.
    options
        Our entry of the request.
    """

    name: str
    own: bool = True
    options: dict[str, Any] | None = None

    def first_token(self, client: Any, url: str, question: str, tokens: int) -> float:
        """Seconds until the first piece of an answer; the whole answer is read."""
        body: dict[str, Any] = {"ignore_eos": True}
        if self.own:
            body["mm_processor_kwargs"] = {"stacktok": self.options}
        begin, first = time.perf_counter(), 0.0
        stream = client.chat.completions.create(
            model=NAME,
            messages=messages(question, url),
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body=body,
        )
        for chunk in stream:
            if not first and chunk.choices:
                first = time.perf_counter() - begin
        return first


STOCK, ALL = Arm("stock vLLM", own=False), Arm("ours, all tokens", options={"budget": None})


def pruned(budget: int) -> Arm:
    """Ours with a budget."""
    return Arm(f"ours, {budget} tokens", options={"budget": budget})


@dataclass(frozen=True)
class Servers:
    """Both servers of one model, and the budgets it is measured at."""

    stock: Server
    own: Server
    budgets: tuple[int, ...]

    def of(self, arm: Arm) -> Server:
        """The server that an arm asks."""
        return self.own if arm.own else self.stock


@contextmanager
def servers(name: str, arguments: argparse.Namespace, folder: Path, *flags: str) -> Iterator[Servers]:
    """Both servers of a model, each warmed up by one request per arm."""
    more: tuple[str, ...] = ()
    if name == "embedded":
        where, budgets = embedded_path(), (192, 64, 16)
    else:
        where, budgets = preset_folder(name, folder / name), tuple(map(int, PRESETS[name].budgets))
        more = ("--load-format", "dummy")
    budgets = tuple(arguments.budgets or budgets)
    # On a CPU vLLM plans with nearly all of the memory for keys and values, and ends when it comes to use it.
    common = (
        *("--dtype", arguments.dtype, "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(arguments.cache_gigabytes << 30)),
        *more,
        *flags,
    )
    stock_command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(where)]
    # An empty list of plugins: vLLM as it is without us.
    with (
        started(
            stock_command, folder / f"{name}-stock.log", *common, seconds=1800, environment={"VLLM_PLUGINS": ""}
        ) as stock,
        serving(where, folder / f"{name}.log", *common, seconds=1800) as own,
    ):
        both = Servers(stock, own, budgets)
        for index, arm in enumerate((STOCK, ALL, *map(pruned, budgets))):
            arm.first_token(both.of(arm).client(), fresh_url(10**6 + index), QUESTION, 2)
        yield both


def fresh_url(seed: int) -> str:
    """A picture that no other request has."""
    blocks = np.random.default_rng(seed).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    return data_url(Image.fromarray(blocks).resize((336, 336), Image.Resampling.BICUBIC))


def measure(server: Server, arm: Arm, concurrency: int, urls: list[str], tokens: int) -> tuple[float, list[float]]:
    """Seconds for all requests, and each one's time to its first token."""
    waiting, found, lock = list(urls), [], threading.Lock()

    def work() -> None:
        # The last of many clients of a large model waits for all others.
        client = server.client(seconds=7200)
        while True:
            with lock:
                if not waiting:
                    return
                url = waiting.pop()
            first = arm.first_token(client, url, QUESTION, tokens)
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


@dataclass(frozen=True)
class Row:
    """One row of a table; its first fields name it."""

    model: str
    clients: int
    arm: str
    values: dict[str, float]


class Rows:
    """Rows that have been measured, kept in a file of JSON lines where one is given."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows = (
            [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file and file.exists() else []
        )

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        if self.file:
            with self.file.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")

    def has(self, model: str, clients: int) -> bool:
        """Whether a block of rows is there."""
        return any((row.model, row.clients) == (model, clients) for row in self.rows)


def throughput(name: str, arguments: argparse.Namespace, folder: Path, rows: Rows) -> None:
    """Requests per second and time to first token of every arm at every number of clients."""
    left = [clients for clients in arguments.concurrency if not rows.has(name, clients)]
    if not left:
        return
    seed = 0
    with servers(name, arguments, folder) as both:
        arms = [STOCK, *([] if arguments.without_all else [ALL]), *map(pruned, both.budgets)]
        for clients in left:
            seconds, firsts, rounds = dict.fromkeys(arms, 0.0), {arm: [] for arm in arms}, []
            per_round = max(clients, arguments.requests // arguments.rounds)
            for turn in range(arguments.rounds):
                taken = {}
                # Every other round backwards, so that no arm always follows the same one.
                for arm in arms if turn % 2 == 0 else reversed(arms):
                    urls = [fresh_url(seed + index) for index in range(per_round)]
                    seed += per_round
                    taken[arm], found = measure(both.of(arm), arm, clients, urls, arguments.tokens)
                    seconds[arm] += taken[arm]
                    firsts[arm] += found
                rounds.append(taken)
                print(f"  {name}, {clients} clients, round {turn + 1} of {arguments.rounds}", file=sys.stderr)
            stock = statistics.median(firsts[STOCK])
            for arm in arms:
                first = statistics.median(firsts[arm])
                ratios = [taken[STOCK] / taken[arm] for taken in rounds]
                values = {
                    "requests": per_round * arguments.rounds,
                    "requests/s": per_round * arguments.rounds / seconds[arm],
                    "of stock": seconds[STOCK] / seconds[arm],
                    "lowest round": min(ratios),
                    "highest round": max(ratios),
                    "first token s": first,
                    "stock / this": stock / first,
                    "slowest s": max(firsts[arm]),
                }
                rows.add(Row(name, clients, arm.name, values))


def questions(name: str, arguments: argparse.Namespace, folder: Path, rows: Rows) -> None:
    """Time to first token of the first, second and further questions on a picture, and selection's share of it."""
    if rows.has(name, 1):
        return
    # The same words in other orders: questions of one length, whose words the tokenizer of a preset knows. Three words
    # further on, another one that is part of the query comes first.
    words = QUESTION.rstrip("?").split()
    asked = [" ".join([*words[3 * turn :], *words[: 3 * turn]]) + "?" for turn in range(arguments.questions)]
    with servers(name, arguments, folder) as both:
        budget = both.budgets[len(both.budgets) // 2]
        once = Arm(f"ours, {budget} tokens, query null", options={"budget": budget, "query": None})
        arms = [STOCK, ALL, pruned(budget), once]
        times: dict[Arm, list[list[float]]] = {arm: [] for arm in arms}
        selected: dict[tuple[Arm, bool], list[float]] = {}
        for picture in range(arguments.pictures):
            for index, arm in enumerate(arms):
                url, client, server = fresh_url(len(arms) * picture + index), both.of(arm).client(), both.of(arm)
                own = []
                # vLLM's worker sleeps while nobody asks, and may take a second to wake, with us and without.
                client.chat.completions.create(model=NAME, messages=messages("Hello"), max_tokens=1)
                for turn, question in enumerate(asked):
                    before = server.counters() if arm.own else {}
                    own.append(arm.first_token(client, url, question, 1))
                    after = server.counters() if arm.own else {}
                    images, spent = (
                        after.get(key, 0) - before.get(key, 0)
                        for key in ("stacktok_images_total", "stacktok_selection_seconds_total")
                    )
                    if images:
                        selected.setdefault((arm, turn > 0), []).append(1e3 * spent / images)
                times[arm].append(own)
            print(f"  {name}, picture {picture + 1} of {arguments.pictures}", file=sys.stderr)
        stock = [statistics.median(own[turn] for own in times[STOCK]) for turn in range(len(asked))]
        for arm in arms:
            by_turn = [statistics.median(own[turn] for own in times[arm]) for turn in range(len(asked))]
            further = statistics.median(by_turn[1:])
            behind = further - statistics.median(stock[1:])
            values = {
                "first question s": by_turn[0],
                "second s": by_turn[1],
                "further s": further,
                "selection ms, first": statistics.median(selected.get((arm, False), [0.0])),
                "selection ms, further": statistics.median(selected.get((arm, True), [0.0])),
                # Questions from which on stock's shorter further ones have made up for its longer first one.
                "break-even": 1 + max(0.0, stock[0] - by_turn[0]) / behind if behind > 0 else float("inf"),
            }
            rows.add(Row(name, 1, arm.name, values))


def _blocks(count: int) -> tuple[str, ...]:
    """So many blocks of 32 tokens; vLLM's blocks on CPUs have 128, which a short prompt does not fill."""
    return ("--num-gpu-blocks-override", str(count), "--block-size", "32")


def memory(name: str, arguments: argparse.Namespace, folder: Path, rows: Rows) -> None:
    """Requests that run at a time, and blocks of keys and values they hold, where the cache is small."""
    clients = max(arguments.concurrency)
    if rows.has(name, clients):
        return
    with servers(name, arguments, folder, *_blocks(arguments.blocks)) as both:
        seed = 2 * 10**6
        for arm in (STOCK, ALL, *map(pruned, both.budgets)):
            urls = [fresh_url(seed + index) for index in range(clients)]
            seed += clients
            server, samples, done = both.of(arm), [], threading.Event()

            def watch(server: Server = server, samples: Any = samples, done: Any = done) -> None:
                while not done.wait(0.2):
                    running = server.metric("vllm:num_requests_running")
                    samples.append((running, server.metric("vllm:kv_cache_usage_perc")))

            before = server.metric("vllm:num_preemptions_total")
            watcher = threading.Thread(target=watch)
            watcher.start()
            seconds, _ = measure(server, arm, clients, urls, arguments.tokens)
            done.set()
            watcher.join()
            most = max(running for running, _ in samples)
            full = [usage * arguments.blocks / running for running, usage in samples if running]
            values = {
                "blocks": arguments.blocks,
                "requests at a time": most,
                "blocks per request": statistics.median(full),
                "preemptions": server.metric("vllm:num_preemptions_total") - before,
                "requests/s": clients / seconds,
            }
            rows.add(Row(name, clients, arm.name, values))
            print(f"  {name}, {arm.name}", file=sys.stderr)


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "questions", "memory"])
    parser.add_argument("--models", nargs="+", default=["embedded", "llava-1.5-1b"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--budgets", nargs="+", type=int, help="other budgets than each model's own")
    parser.add_argument("--without-all", action="store_true", help="throughput: leave out ours with all tokens")
    parser.add_argument("--requests", type=int, default=8, help="requests per row, at least clients x rounds")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in which all arms are asked in turn")
    parser.add_argument("--pictures", type=int, default=8, help="questions: how many pictures")
    parser.add_argument("--questions", type=int, default=5, help="questions: how many on a picture")
    parser.add_argument("--blocks", type=int, default=160, help="memory: blocks of 32 tokens that the cache has")
    parser.add_argument("--cache-gigabytes", type=int, default=2, help="room for keys and values on a CPU")
    parser.add_argument("--tokens", type=int, default=8, help="length of an answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="file of JSON lines that keeps the rows")
    arguments = parser.parse_args()
    rows = Rows(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            {"throughput": throughput, "questions": questions, "memory": memory}[arguments.what](
                name, arguments, Path(folder), rows
            )
    print(f"{os.cpu_count()} cores, {arguments.dtype}, answers of {arguments.tokens} tokens\n")
    columns = list(rows.rows[0].values)
    print(f"| model | clients | arm | {' | '.join(columns)} |")
    print("|---" * (3 + len(columns)) + "|")
    for row in rows.rows:
        cells = [f"{row.values[column]:.4g}" for column in columns]
        print(f"| {row.model} | {row.clients} | {row.arm} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
