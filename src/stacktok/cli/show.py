"""``stacktok show``: pictures of what methods keep of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import MODEL_HELP, load, model_path, open_image, stderr, user_errors
from stacktok.core.budget import parse_budget
from stacktok.models.prompt import prompt_inputs


def show(
    image: Annotated[Path, typer.Option(help="Picture file.")],
    question: Annotated[str, typer.Option(help="What to ask.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out/show"),
    method: Annotated[list[str] | None, typer.Option(help="Repeat for several; stacktok if not given.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="Repeat for several; 64 if not given.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    numbered: Annotated[bool, typer.Option("--numbered", help="Write the order of selection.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Draw kept tokens, relevance per query word, the trajectory, and the nominees of crops."""
    with user_errors():
        from stacktok.figures.files import save
        from stacktok.methods.registry import method_class

        kinds = [method_class(name) for name in method or ["stacktok"]]
        budgets = [parse_budget(text) for text in budget or ["64"]]
        picture = open_image(image)
        loaded, processor = load(model_path(model), dtype, device, quiet=True)
        inputs = prompt_inputs(processor, picture, question, loaded)
        with stderr().status("drawing"):
            figures = draw(loaded, processor, inputs, picture, question, kinds, budgets, numbered=numbered)
            out.mkdir(parents=True, exist_ok=True)
            for name, figure in figures.items():
                for ending in ("svg", "png"):
                    save(figure, out / f"{name}.{ending}", dpi=150)
    for name in figures:
        print(out / f"{name}.svg")
        print(out / f"{name}.png")


def draw(
    model: Any,
    processor: Any,
    inputs: Any,
    picture: Any,
    question: str,
    kinds: list[Any],
    budgets: list[Any],
    *,
    numbered: bool = False,
) -> dict[str, Any]:
    """Figures by name: ``kept``, ``relevance``, ``trajectory``, and for several crops ``nominees``.

    Parameters
    ----------
    model, processor, inputs
        A model, its processor, and one prompt with one picture.
    picture, question
        What the prompt is about.
    kinds, budgets
        Classes of methods, one row each, and budgets, one column each.
    numbered
        Write the order of selection.
    """
    import numpy as np
    import torch
    from matplotlib.figure import Figure

    from stacktok.core.affinity import affinities
    from stacktok.core.record import CropSelection, Selection
    from stacktok.figures.image import (
        comparison_figure,
        heat_figure,
        panel_data,
        relevance_maps,
        tile_layout,
    )
    from stacktok.figures.seen import seen_pictures
    from stacktok.figures.trajectory import candidate_data, draw_nominees, draw_trajectory
    from stacktok.models.base import adapter_for
    from stacktok.models.query import word_ids

    rows, first = [], None
    record: Selection | CropSelection | None = None
    for kind in kinds:
        row = []
        for budget in budgets:
            with kind(budget=budget)(model, processor) as pruned, torch.inference_mode():
                model.generate(**inputs, max_new_tokens=1, do_sample=False)
            result = pruned.last[0]
            first = first or result
            selection = result.selection
            # The tightest budget has the steps that can be told apart.
            if isinstance(selection, (Selection, CropSelection)) and (record is None or selection.k < record.k):
                record = selection
            seen = seen_pictures(picture, result.image, inputs["pixel_values"], processor.image_processor)
            pictures = [np.asarray(view) / 255 for view in seen]
            name = f"{kind.__name__}, {budget}: {result.reduction.tokens} of {result.image.n} tokens"
            row.append((name, pictures, panel_data(result.image, result.reduction)))
        rows.append(row)
    if first is None:
        raise ValueError("nothing was pruned; give at least one method and one budget")
    tiles = tile_layout(processor, (picture.height, picture.width), len(first.image.crops))
    figures: dict[str, Any] = {"kept": comparison_figure(rows, tiles=tiles, numbered=numbered, title=question)}
    words = adapter_for(model).query_words(question)
    embed = model.get_input_embeddings()
    where = next(embed.parameters()).device
    with torch.inference_mode():
        embeddings = {word: embed(torch.tensor(word_ids(processor.tokenizer, [word]), device=where)) for word in words}
    if words:
        figures["relevance"] = heat_figure(rows[0][0][1], relevance_maps(first.image, words, embeddings))
    if isinstance(record, CropSelection):
        figure = Figure(figsize=(8, 0.5 * len(record.crops) + 1.4), layout="constrained")
        draw_nominees(figure.subplots(), record)
        figures["nominees"] = figure
    if record is not None:
        single = record.crops[0] if isinstance(record, CropSelection) else record
        crop = first.image.crops[0]
        _, vision = affinities(crop.vision, crop.projected, None)
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        draw_trajectory(figure.subplots(), single, candidate_data(single, vision, crop.eligible))
        figures["trajectory"] = figure
    return figures
