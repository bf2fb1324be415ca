"""``stacktok show``: pictures of what methods keep of an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import (
    MODEL_HELP,
    SET_HELP,
    check_dtype,
    check_folder,
    load,
    model_path,
    open_image,
    parse_settings,
    stderr,
    user_errors,
)
from stacktok.core.budget import parse_budget


def show(
    image: Annotated[Path, typer.Option(help="Picture file.")],
    question: Annotated[str, typer.Option(help="What to ask.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out/show"),
    method: Annotated[list[str] | None, typer.Option(help="Repeat for several; stacktok if not given.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="Repeat for several; 64 if not given.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    numbered: Annotated[bool, typer.Option("--numbered", help="Write the order of selection.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Draw kept tokens, relevance per query word, the trajectory, nominees of crops, and weights of tokens."""
    with user_errors():
        budgets = [parse_budget(text) for text in budget or ["64"]]
        own, name = parse_settings(settings), model_path(model)
        check_dtype(dtype)
        check_folder(out)
        picture = open_image(image)

        from stacktok.figures.files import save
        from stacktok.methods.settings import KEPT, build_methods
        from stacktok.models.prompt import prompt_inputs

        chosen = list(build_methods(method or ["stacktok"], own, KEPT if budget is None else None).values())
        loaded, processor = load(name, dtype, device, quiet=True)
        inputs = prompt_inputs(processor, picture, question, loaded)
        with stderr().status("drawing"):
            figures = draw(loaded, processor, inputs, picture, question, chosen, budgets, numbered=numbered)
            for title, figure in figures.items():
                for ending in ("svg", "png"):
                    save(figure, out / f"{title}.{ending}", dpi=150)
    for name in figures:
        print(out / f"{name}.svg")
        print(out / f"{name}.png")


def draw(
    model: Any,
    processor: Any,
    inputs: Any,
    picture: Any,
    question: str,
    methods: list[Any],
    budgets: list[Any],
    *,
    numbered: bool = False,
) -> dict[str, Any]:
    """Figures by name: ``kept``, ``relevance``, ``trajectory``, for several crops ``nominees``, ``weights`` if any.

    Parameters
    ----------
    model, processor, inputs
        A model, its processor, and one prompt with one picture.
    picture, question
        What the prompt is about.
    methods, budgets
        Methods without a budget, one row each, and budgets, one column each.
    numbered
        Write the order of selection.
    """
    import numpy as np
    import torch

    from stacktok.core.record import CropSelection, Selection
    from stacktok.figures.encoder_views import encoder_views
    from stacktok.figures.image import panel_data, relevance_maps, tile_layout
    from stacktok.figures.selection import selection_figures
    from stacktok.models.query import word_ids
    from stacktok.models.registry import adapter_for

    rows, first = [], None
    record: Selection | CropSelection | None = None
    for method in methods:
        row = []
        for budget in budgets:
            with replace(method, budget=budget)(model, processor) as pruned, torch.inference_mode():
                model.generate(**inputs, max_new_tokens=1, do_sample=False)
            result = pruned.last[0]
            first = first or result
            selection = result.selection
            # The tightest budget has the steps that can be told apart.
            if isinstance(selection, (Selection, CropSelection)) and (record is None or selection.k < record.k):
                record = selection
            seen = encoder_views(picture, result.image, inputs["pixel_values"], processor.image_processor)
            pictures = [np.asarray(view) / 255 for view in seen]
            asked = "" if str(budget) == str(result.reduction.tokens) else f", {budget}"
            name = f"{type(method).__name__}{asked}: {result.reduction.tokens} of {result.image.n} tokens"
            row.append((name, pictures, panel_data(result.image, result.reduction)))
        rows.append(row)
    if first is None:
        raise ValueError("nothing was pruned; give at least one method and one budget")
    tiles = tile_layout(processor, (picture.height, picture.width), len(first.image.crops))
    words = adapter_for(model).query_words(question)
    embed = model.get_input_embeddings()
    where = next(embed.parameters()).device
    with torch.inference_mode():
        embeddings = {word: embed(torch.tensor(word_ids(processor.tokenizer, [word]), device=where)) for word in words}
    maps = relevance_maps(first.image, words, embeddings)
    return selection_figures(rows, first.image, record, maps, tiles=tiles, numbered=numbered, title=question)
