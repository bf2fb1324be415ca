"""``stacktok bench``: speed and memory of a model, full tokens against methods and budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stacktok.cli.common import load, open_image, parse_dtype, stderr, user_errors
from stacktok.core.budget import parse_budget
from stacktok.models.prompt import prompt_inputs


def bench(
    model: Annotated[str, typer.Argument(help="Folder, hub name, or a shape such as llava-1.5-1b (see `models`).")],
    methods: Annotated[str, typer.Option(help="Names separated by commas (see `methods`), or all.")] = "stacktok",
    budget: Annotated[list[str] | None, typer.Option(help="Repeat for several; the paper's if not given.")] = None,
    image: Annotated[Path | None, typer.Option(help="Picture file, for a real model.")] = None,
    question: Annotated[str | None, typer.Option(help="What to ask, for a real model.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; figures are medians.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto (shapes: bfloat16), float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.md, bench.json and bench.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure vision, selection, prefill, decoding, cache and memory."""
    with user_errors():
        from stacktok.bench import run
        from stacktok.bench.presets import PRESETS, QUESTION
        from stacktok.methods import available, method_class

        everything = methods.strip().lower() == "all"
        chosen = list(available().values()) if everything else [method_class(n.strip()) for n in methods.split(",")]
        budgets = [parse_budget(text) for text in budget or []]
        if model in PRESETS:
            loaded, processor, inputs = _shape(model, dtype, device)
            budgets = budgets or list(PRESETS[model].budgets)
        else:
            picture = open_image(image) if image is not None else _checkers()
            loaded, processor = load(model, dtype, device, quiet=as_json)
            inputs = prompt_inputs(processor, picture, question or QUESTION, loaded)
            budgets = budgets or _published(loaded.config.model_type)
        console = stderr()
        with console.status("measuring") as status:
            report = run(
                loaded,
                processor,
                inputs,
                [method(budget=entry) for method in chosen for entry in budgets],
                name=model,
                repeats=repeats,
                new_tokens=new_tokens,
                progress=None if as_json else lambda text: status.update(text),
                leave_out=everything,
            )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "bench.md").write_text(report.markdown())
            (out / "bench.json").write_text(report.to_json())
            report.plot(out / "bench.png")
    if as_json:
        print(report.to_json())
        return
    rows = report.rows()
    table = Table(*rows[0], title=model)
    from stacktok.bench.measure import show

    for row in rows:
        table.add_row(*(show(name, value) for name, value in row.items()))
    Console(width=None if Console().is_terminal else 240).print(table)
    for name, reason in report.refused.items():
        Console().print(f"{name}: {reason}", markup=False, highlight=False)


def _shape(name: str, dtype: str, device: str) -> tuple[Any, Any, Any]:
    import torch

    from stacktok.bench import preset

    kind = parse_dtype(dtype)
    model, processor, inputs = preset(name, kind if isinstance(kind, torch.dtype) else torch.bfloat16)
    return model.to(device), processor, {key: value.to(device) for key, value in inputs.items()}


def _published(model_type: str) -> list[Any]:
    from stacktok.bench.presets import PRESETS

    return list(next(p.budgets for p in PRESETS.values() if p.family == model_type))


def _checkers() -> Any:
    """A picture for those who give none."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((672, 672), Image.Resampling.NEAREST)
