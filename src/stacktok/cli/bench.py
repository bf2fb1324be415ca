"""``stacktok bench``: speed and memory of a model, full tokens against methods and budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stacktok import embedded
from stacktok.cli.common import (
    SET_HELP,
    check_device,
    check_dtype,
    check_folder,
    load,
    open_image,
    parse_dtype,
    parse_settings,
    stderr,
    stdout,
    user_errors,
)
from stacktok.core.budget import parse_budget

if TYPE_CHECKING:
    from stacktok.bench import Report
    from stacktok.bench.all_methods import SelectionTimes

TABLES = {
    "Seconds (medians; decode: per token)": (
        "tokens",
        "vision s",
        "selection s",
        "prefill s",
        "decode s/token",
        "total s",
    ),
    "Against full tokens": ("prefill speed-up", "ideal", "total speed-up", "ideal total"),
    "Tokens per layer, memory, prefill of the stock model's, selection's share": (
        "layer average",
        "cache MB",
        "peak MB",
        "prefill / stock",
        "selection share",
    ),
}
"""Columns of `Report.rows` by table: each fits 80 columns."""

SHORT = {
    "vision s": "vision",
    "selection s": "select",
    "prefill s": "prefill",
    "decode s/token": "decode",
    "total s": "total",
    "prefill speed-up": "prefill",
    "total speed-up": "total",
    "layer average": "per layer",
    "prefill / stock": "of stock",
    "selection share": "selection",
}


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, hub name, embedded/llava, or a shape such as llava-1.5-1b (see `models`); without one, "
            "selection alone is timed, on made-up features."
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Names separated by commas (see `methods`), or all; stacktok if not given.")
    ] = None,
    budget: Annotated[list[str] | None, typer.Option(help="Repeat for several; the paper's if not given.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    image: Annotated[Path | None, typer.Option(help="Picture file, for a real model.")] = None,
    question: Annotated[str | None, typer.Option(help="What to ask, for a real model.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; figures are medians.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto (shapes: bfloat16), float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.md, bench.json and bench.png.")] = None,
    submit: Annotated[
        Path | None, typer.Option(help="File for all figures and those of selection alone, to paste into an issue.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="Without a model: page with the marks <!-- stacktok bench --><!-- end -->.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure vision, selection, prefill, decoding, cache and memory; without a model, selection alone."""
    with user_errors():
        if model is None and methods is None:
            raise ValueError("there is no model to measure; give one, or --methods all for the time of selection alone")
        methods = methods or "stacktok"
        if model is None:
            _selection(methods, parse_settings(settings), repeats, into, as_json)
            return
        budgets = [parse_budget(text) for text in budget or []]
        own, folder = parse_settings(settings), embedded.resolve(model)
        check_dtype(dtype)
        if submit is not None:
            check_folder(submit.parent)
        if out is not None:
            check_folder(out)
            # Needed for the picture after all is measured; without it the time would be spent in vain.
            import matplotlib  # noqa: F401
        picture = None if image is None else open_image(image)
        check_device(device)

        from stacktok.bench import run
        from stacktok.bench.presets import PRESETS, QUESTION
        from stacktok.methods.settings import build_methods
        from stacktok.models.prompt import prompt_inputs

        everything = methods.strip().lower() == "all"
        names = None if everything else [name.strip() for name in methods.split(",")]
        chosen = build_methods(names, own)
        if model in PRESETS:
            loaded, processor, inputs = _shape(model, dtype, device)
            budgets = budgets or list(PRESETS[model].budgets)
        else:
            loaded, processor = load(folder, dtype, device, quiet=as_json)
            inputs = prompt_inputs(processor, picture or _checkers(), question or QUESTION, loaded)
            budgets = budgets or _published(loaded.config.model_type)
        with stderr().status("measuring") as status:
            report = run(
                loaded,
                processor,
                inputs,
                [replace(method, budget=entry) for method in chosen.values() for entry in budgets],
                name=model,
                repeats=repeats,
                new_tokens=new_tokens,
                progress=None if as_json else lambda text: status.update(text),
                leave_out=everything,
            )
        # Printed first: what was measured is there whatever becomes of the files.
        print(report.to_json()) if as_json else _print(report)
        if submit is not None:
            _submit(submit, report, device)
        if out is not None:
            from stacktok.figures.bench import bench_figure
            from stacktok.figures.files import save

            (out / "bench.json").write_text(report.to_json())
            (out / "bench.md").write_text(report.markdown())
            save(bench_figure(report.model, report.stages()), out / "bench.png", dpi=150)


def _submit(file: Path, report: Report, device: str) -> None:
    """Write the report, and selection alone over its sizes; on a CPU over the small ones."""
    import torch

    from stacktok.bench.selection import SIZES, table

    sizes = SIZES if torch.device(device).type == "cuda" else tuple(s for s in SIZES if s.n == 576 and s.batch == 1)
    lines = table(torch.device(device), sizes, repeats=5)
    file.write_text(report.markdown() + "\nSelection alone, from affinities:\n\n" + "\n".join(lines) + "\n")


def _selection(methods: str, own: dict[str, Any], repeats: int, into: Path | None, as_json: bool) -> None:
    """Time the selection of methods in one table."""
    from stacktok.bench.all_methods import SIZES, selection_times
    from stacktok.cli.selection import check_marks, markdown, write_into
    from stacktok.methods.settings import KEPT, build_methods

    names = None if methods.strip().lower() == "all" else [name.strip() for name in methods.split(",")]
    chosen = build_methods(names, own, KEPT)
    if into is not None:
        check_marks(into)
    with stderr().status("measuring") as status:
        times = selection_times(chosen, repeats=repeats, progress=None if as_json else lambda text: status.update(text))
    if as_json:
        shown = {
            name: {"refused": own.refused}
            if own.refused
            else {str(list(size)): {"first": own.first[size], "further": own.further[size]} for size in SIZES}
            for name, own in times.items()
        }
        print(json.dumps(shown))
    else:
        _print_selection(times, SIZES)
    if into is not None:
        write_into(into, markdown(chosen, times, SIZES))


def _print_selection(times: Mapping[str, SelectionTimes], sizes: Sequence[tuple[int, int]]) -> None:
    from rich.table import Table

    console = stdout()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for size in sizes:
        for column in (f"{size}", "further"):
            table.add_column(column, justify="right", no_wrap=True)
    for name, own in times.items():
        if not own.refused:
            cells = [f"{value[size]:.1f}" for size in sizes for value in (own.first, own.further)]
            table.add_row(name, *cells)
    console.print(
        "Selection in milliseconds of processor time (medians) at (tokens, budget): first question, further question"
    )
    console.print(table)
    for name, own in times.items():
        if own.refused:
            console.print(f"{name}: {own.refused}", markup=False, highlight=False)


def _print(report: Report) -> None:
    from rich.table import Table

    from stacktok.bench.measure import show

    console = stdout()
    console.print(f"{report.model}: " + ", ".join(f"{k} {v}" for k, v in report.settings.items()), highlight=False)
    for title, columns in TABLES.items():
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("method", no_wrap=True)
        for name in ("budget", *(SHORT.get(column, column) for column in columns)):
            table.add_column(name, justify="right", no_wrap=True)
        for row in report.rows():
            table.add_row(row["method"], row["budget"], *(show(column, row[column]) for column in columns))
        console.print(f"\n{title}", highlight=False)
        console.print(table)
    for name, reason in report.refused.items():
        console.print(f"{name}: {reason}", markup=False, highlight=False)


def _shape(name: str, dtype: str, device: str) -> tuple[Any, Any, Any]:
    import torch

    from stacktok.bench import preset

    kind = parse_dtype(dtype)
    model, processor, inputs = preset(name, kind if isinstance(kind, torch.dtype) else torch.bfloat16)
    return model.to(device), processor, {key: value.to(device) for key, value in inputs.items()}


def _published(model_type: str) -> list[Any]:
    from stacktok.bench.presets import PRESETS

    return list(next((p.budgets for p in PRESETS.values() if p.family == model_type), ("20%", "10%", "5%")))


def _checkers() -> Any:
    """A picture for those who give none."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((672, 672), Image.Resampling.NEAREST)
