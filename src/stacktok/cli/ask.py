"""``stacktok ask``: one question on one picture."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import (
    MODEL_HELP,
    SET_HELP,
    SETTINGS_HELP,
    check_dtype,
    load,
    load_settings,
    model_path,
    open_image,
    parse_settings,
    stderr,
    stdout,
    user_errors,
)
from stacktok.core.budget import parse_budget


def ask(
    image: Annotated[Path, typer.Option(help="Picture file.")],
    question: Annotated[str, typer.Option(help="What to ask.")],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    method: Annotated[str | None, typer.Option(help="How to prune, see `methods`; stacktok if not given.")] = None,
    budget: Annotated[str | None, typer.Option(help="Tokens to keep: 64, 0.2 or 20%; 64 if not given.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    settings_file: Annotated[Path | None, typer.Option("--settings", help=SETTINGS_HELP)] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with all tokens.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask one question about one picture with pruned tokens."""
    with user_errors():
        tokens = parse_budget(budget or "64")
        own, name = parse_settings(settings), model_path(model)
        check_dtype(dtype)
        picture = open_image(image)

        from stacktok.methods.downsample import DownSample
        from stacktok.methods.settings import KEPT, build_methods
        from stacktok.models.prompt import prompt_inputs

        if settings_file is not None:
            chosen = load_settings(settings_file, method=method, budget=budget, set=settings)
            tokens = chosen.budget
        else:
            (plain,) = build_methods([method or "stacktok"], own, KEPT if budget is None else None).values()
            chosen = replace(plain, budget=tokens)
        loaded, processor = load(name, dtype, device, quiet=as_json)
        full = inputs = prompt_inputs(processor, picture, question, loaded)
        if isinstance(chosen, DownSample):
            inputs = prompt_inputs(processor, chosen.apply(picture, processor), question, loaded)
        console = stderr()
        with console.status("answering") if not as_json else console.capture():
            result = answer(
                loaded, processor, inputs, chosen, max_new_tokens, full=full, question=question, compare=compare
            )
    result = {"model": name, "question": question, "method": chosen.info.name, "budget": _plain(tokens), **result}
    print(json.dumps(result)) if as_json else _show(result)


def _plain(budget: Any) -> Any:
    return budget if isinstance(budget, (int, float, str)) else str(budget)


def answer(
    model: Any,
    processor: Any,
    inputs: Any,
    method: Any,
    max_new_tokens: int,
    *,
    full: Any = None,
    question: str,
    compare: bool,
) -> dict[str, Any]:
    """The answer with a method, and with all tokens if they are to be compared; each timed once after a warm-up.

    ``full`` are the inputs of the picture as it is, where a method made it smaller.
    """
    from stacktok.runtime.asking import generate_texts

    whole = inputs if full is None else full

    def generate(length: int, inputs: Any = inputs) -> str:
        (text,) = generate_texts(model, processor, inputs, length)
        return text

    with method(model, processor) as pruned:
        pruned.query = question
        # The first selection of a process loads the compiled kernels.
        generate(1)
        begin = time.perf_counter()
        text = generate(max_new_tokens)
        seconds = time.perf_counter() - begin
    found: dict[str, Any] = {
        "answer": text,
        "tokens_before": pruned.before + whole["input_ids"].shape[1] - inputs["input_ids"].shape[1],
        "tokens_after": pruned.after,
        "tokens_per_layer": pruned.per_layer,
        "layer_average": pruned.average,
        "query": pruned.last[0].query,
        "seconds": seconds,
        "selection_seconds": pruned.seconds,
    }
    if compare:
        generate(1, whole)
        begin = time.perf_counter()
        text = generate(max_new_tokens, whole)
        found["full_answer"], found["full_seconds"] = text, time.perf_counter() - begin
        found["speed_up"] = found["full_seconds"] / seconds
    return found


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    console.print(result["answer"], style="bold", markup=False, highlight=False)
    table = Table("", "tokens", "seconds", "answer")
    table.add_row("pruned", str(result["tokens_after"]), f"{result['seconds']:.3f}", Text(result["answer"]))
    if "full_answer" in result:
        full = Text(result["full_answer"])
        table.add_row("all", str(result["tokens_before"]), f"{result['full_seconds']:.3f}", full)
    console.print(table)
    steady = result["layer_average"] == result["tokens_after"]
    average = "" if steady else f" in the last layer ({result['layer_average']:.1f} on average)"
    console.print(
        f"{result['method']}: {result['tokens_before']} -> {result['tokens_after']} tokens{average}, selection "
        f"{1000 * result['selection_seconds']:.1f} ms, query: {result['query']}",
        markup=False,
        highlight=False,
    )
    if "speed_up" in result:
        console.print(f"speed-up {result['speed_up']:.2f}x", highlight=False)
