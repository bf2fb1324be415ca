"""``stacktok check``: the package's invariants on this model and this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stacktok.cli.common import (
    DEFAULT_MODEL,
    MODEL_HELP,
    SET_HELP,
    check_dtype,
    load,
    model_path,
    open_image,
    parse_settings,
    stderr,
    stdout,
    user_errors,
)
from stacktok.core.budget import parse_budget

if TYPE_CHECKING:
    from stacktok.check import Outcomes

QUESTIONS = ("What is in the picture?", "How many things are there?")


def check(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Picture files, again for more; own samples if none.")
    ] = None,
    question: Annotated[list[str] | None, typer.Option(help="What to ask about them, again for more.")] = None,
    method: Annotated[str, typer.Option(help="How to prune; see `methods`.")] = "stacktok",
    budget: Annotated[str, typer.Option(help="Tokens to keep: 64, 0.2 or 20%.")] = "10%",
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    attention: Annotated[str | None, typer.Option(help="sdpa, eager, flash_attention_2, ...; the model's own.")] = None,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="Quantise with bitsandbytes.")] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help="Quantise with bitsandbytes.")] = False,
    vllm: Annotated[str | None, typer.Option(help="Address of a running `stacktok serve` to check instead.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the timed runs.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that pruning is correct on this model, device and type; exit code 1 if it is not."""
    with user_errors():
        tokens, own, path = parse_budget(budget), parse_settings(settings), model_path(model)
        check_dtype(dtype)
        if load_in_4bit and load_in_8bit:
            raise ValueError("load-in-4bit and load-in-8bit exclude each other; give one")
        pictures = [open_image(file) for file in images or ()]

        from stacktok.check import check_model, check_server
        from stacktok.methods.base import FeatureMethod
        from stacktok.methods.settings import build_methods

        (plain,) = build_methods([method], own).values()
        chosen = replace(plain, budget=tokens)
        if not isinstance(chosen, FeatureMethod):
            raise ValueError(f"method {method!r} works inside the language model; give one that works before it")
        samples = _samples(pictures, question or [])
        loaded, processor = load(
            path,
            dtype,
            device,
            quiet=as_json,
            attention=attention,
            bits=4 if load_in_4bit else 8 if load_in_8bit else None,
        )
        name = _public_name(model)
        with stderr().status("checking") as status:
            progress = (lambda text: None) if as_json else status.update
            if vllm is not None:
                found = check_server(vllm, loaded, processor, samples, chosen, name=name, progress=progress)
            else:
                found = check_model(loaded, processor, samples, chosen, name=name, repeats=repeats, progress=progress)
    print(json.dumps(found.to_dict(), indent=1)) if as_json else _print(found)
    raise typer.Exit(0 if found.passed else 1)


def _samples(pictures: list[Any], questions: list[str]) -> list[tuple[Any, str]]:
    """Pictures with questions: the user's, or the first scenes of the test split."""
    if pictures:
        asked = questions or list(QUESTIONS)
        count = max(len(pictures), min(2, len(asked)))
        return [(pictures[i % len(pictures)], asked[i % len(asked)]) for i in range(count)]
    from stacktok.scenes import make_scene, render, seed_for
    from stacktok.scenes import questions as ask_about

    scenes = [make_scene(seed_for("test", index)) for index in range(2)]
    return [
        (render(scene), questions[i % len(questions)] if questions else ask_about(scene)[i].text)
        for i, scene in enumerate(scenes)
    ]


def _public_name(model: str | None) -> str:
    """A model's name without the folders that it stands in."""
    if model is None:
        return DEFAULT_MODEL
    path = Path(model)
    return path.resolve().name if path.is_dir() or path.is_absolute() or model.startswith((".", "~")) else model


def _print(found: Outcomes) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    table = Table("", "check", "", box=None, padding=(0, 2, 0, 0), header_style="bold")
    style = {"pass": "green", "fail": "bold red", "skipped": "yellow"}
    for row in found.rows:
        table.add_row(Text(row.status, style[row.status]), row.name, Text(row.detail))
    console.print(table)
    if found.stages:
        times = Table(*found.stages[0], box=None, padding=(0, 2, 0, 0), header_style="bold")
        for stage in found.stages:
            times.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in stage.values()))
        console.print("\nSeconds (medians; decode per token)", highlight=False)
        console.print(times)
    print("\nTo paste into an issue:\n")
    print(found.block())
