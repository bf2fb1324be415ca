"""``stacktok batch``: questions over a data set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import (
    DEFAULT_MODEL,
    MODEL_HELP,
    SET_HELP,
    SETTINGS_HELP,
    check_device,
    check_dtype,
    check_folder,
    load_settings,
    model_path,
    parse_settings,
    progress_bar,
    stderr,
    stdout,
    user_errors,
)
from stacktok.core.budget import parse_budget

_EVERY = 5.0
"""Seconds between two lines of progress."""


def batch(
    data: Annotated[str, typer.Option(help="Parquet, jsonl, csv or tar files (a pattern), or a folder of pictures.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the output; with --ray one that all machines see.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about every picture.")] = None,
    question_column: Annotated[str | None, typer.Option(help="Column of the questions.")] = None,
    image_column: Annotated[str, typer.Option(help="Column of the pictures: bytes, paths or base64.")] = "image",
    id_column: Annotated[str, typer.Option(help="Column that is kept; row numbers where there is none.")] = "id",
    method: Annotated[str | None, typer.Option(help="How to prune, see `methods`; stacktok if not given.")] = None,
    budget: Annotated[str | None, typer.Option(help="Tokens to keep: 64, 0.2, 20% or all; 64 if not given.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    settings_file: Annotated[Path | None, typer.Option("--settings", help=SETTINGS_HELP)] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    engine_options: Annotated[str, typer.Option(help="Further arguments of vLLM's LLM, as JSON.")] = "{}",
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster; local starts one here.")] = None,
    workers: Annotated[str, typer.Option(help="Workers on Ray: 4, or 1:8 to grow and shrink.")] = "1",
    gpus: Annotated[float, typer.Option(min=0, help="GPUs that a worker takes on Ray, such as 1 or 0.5.")] = 0,
    batch_rows: Annotated[int, typer.Option(min=1, help="Questions per call of the model.")] = 16,
    shard_rows: Annotated[int, typer.Option(min=1, help="Rows per file of the output.")] = 1000,
    window_megabytes: Annotated[float, typer.Option(min=0.001, help="Pictures held in memory at a time.")] = 64,
    max_errors: Annotated[int | None, typer.Option(min=0, help="End early after more rows with an error.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    estimate: Annotated[bool, typer.Option("--estimate", help="Measure some rows; say what all would take.")] = False,
    estimate_rows: Annotated[int, typer.Option(min=1, help="Rows that --estimate answers.")] = 64,
    price: Annotated[float | None, typer.Option(min=0, help="Of an hour of this machine, for --estimate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Ask a data set of pictures; a killed job goes on where it was, and no row is lost or repeated."""
    with user_errors():
        tokens = None if budget == "all" else parse_budget(budget or "64")
        own, pool = parse_settings(settings), _workers(workers)
        check_dtype(dtype)
        if out is None and not estimate:
            raise ValueError("out is missing; give a folder for the output, or --estimate")

        from stacktok.batch.engines import EngineSpec
        from stacktok.batch.rows import Columns, Input
        from stacktok.batch.run import estimate as measure
        from stacktok.batch.run import run_batch
        from stacktok.core.limits import parse_json
        from stacktok.methods.settings import KEPT, build_methods

        source = Input(data, Columns(image_column, question_column, question, id_column))
        if settings_file is not None:
            chosen = load_settings(settings_file, method=method, budget=budget, set=settings)
        else:
            (plain,) = build_methods([method or "stacktok"], own, KEPT if budget is None else None).values()
            chosen = replace(plain, budget=tokens)
        model_path(model)
        check_device(device)
        spec = EngineSpec(
            engine,
            model or DEFAULT_MODEL,
            chosen,
            max_new_tokens,
            dtype,
            device,
            dict(parse_json("engine-options", engine_options)),
        )
        if estimate or out is None:
            found = measure(source, spec, rows=estimate_rows, price=price, batch_rows=batch_rows)
        else:
            check_folder(out)
            with progress_bar(stderr(), _EVERY) as show:
                found = run_batch(
                    source,
                    out,
                    spec,
                    spec.job(),
                    shard_rows=shard_rows,
                    batch_rows=batch_rows,
                    window_bytes=int(window_megabytes * 1e6),
                    max_errors=max_errors,
                    ray=ray,
                    workers=pool,
                    gpus=gpus,
                    report=lambda progress: show(progress.share, str(progress)),
                )
            found = {**found, "out": str(out)}
    print(json.dumps(found)) if as_json else _show(found)


def _workers(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise ValueError(f"workers {text!r} is not a number or a range; give 4 or 1:8") from None


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.items():
        table.add_row(name.replace("_", " "), str(value))
    stdout().print(table, highlight=False)
