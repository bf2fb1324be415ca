"""``stacktok demo``: the embedded model answers two questions on one scene with all tokens and with few."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stacktok.cli.common import load, model_path, user_errors
from stacktok.models.prompt import prompt_inputs

if TYPE_CHECKING:
    from stacktok.scenes import Question

BUDGETS = (None, 64, 16)
LOCAL, HOLISTIC = "reading", "background"


def demo(
    scene: Annotated[int, typer.Option(min=0, help="Which scene of the test split.")] = 6,
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("stacktok-demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the embedded model a local and a holistic question with 576, 64 and 16 tokens, and draw what was kept."""
    with user_errors():
        from stacktok.scenes import make_scene, questions, render, seed_for

        shown = make_scene(seed_for("test", scene))
        picture = render(shown)
        asked = {question.family: question for question in questions(shown)}
        for family in (LOCAL, HOLISTIC):
            if family not in asked:
                raise ValueError(f"scene {scene} has no {family} question; choose another --scene")
        model, processor = load(model_path(None), "float32", "cpu", quiet=True)
        runs = [run(model, processor, picture, asked[family]) for family in (LOCAL, HOLISTIC)]
        draw(picture, runs, out)
    results = [
        {name: value for name, value in answer.items() if name != "pruned"} for answers in runs for answer in answers
    ]
    if as_json:
        print(json.dumps({"picture": str(out), "answers": results}))
        return
    console = Console()
    table = Table("question", "truth", "tokens", "answer", "ms", "of which selection")
    for answer in results:
        table.add_row(
            answer["question"],
            answer["truth"],
            str(answer["tokens"]),
            answer["answer"],
            f"{1000 * answer['seconds']:.0f}",
            "" if answer["selection_seconds"] is None else f"{1000 * answer['selection_seconds']:.1f}",
        )
    console.print(table)
    console.print(f"picture of what was kept: {out}", highlight=False)


def run(model: Any, processor: Any, picture: Any, question: Question) -> list[dict[str, Any]]:
    """One question with every budget; each timed after a warm-up."""
    from stacktok import StackTok

    inputs = prompt_inputs(processor, picture, question.text, model)

    def generate() -> str:
        out = model.generate(**inputs, do_sample=False)
        text: str = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text.strip()

    answers = []
    for budget in BUDGETS:
        with StackTok(budget=budget)(model, processor) as pruned:
            generate()
            begin = time.perf_counter()
            text = generate()
            seconds = time.perf_counter() - begin
        answers.append(
            {
                "question": question.text,
                "truth": question.answer,
                "tokens": pruned.after if budget else int((inputs["input_ids"] == model.config.image_token_id).sum()),
                "answer": text,
                "seconds": seconds,
                "selection_seconds": pruned.seconds if budget else None,
                "pruned": pruned,
            }
        )
    return answers


def draw(picture: Any, runs: list[list[dict[str, Any]]], out: Path) -> None:
    """A row per question, a column per budget."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from stacktok.figures.kept import COVERAGE, OTHER, RELEVANCE, criteria_of, draw_kept

    pixels = np.asarray(picture)
    figure = Figure(figsize=(9.6, 7.0), layout="constrained")
    grid = figure.subplots(len(runs), len(BUDGETS), squeeze=False)
    for row, answers in enumerate(runs):
        for column, answer in enumerate(answers):
            axes = grid[row][column]
            if column:
                (result,) = answer["pruned"].last
                crop = result.image.crops[0]
                draw_kept(axes, pixels, crop.grid, result.selection.indices, criteria_of(result.selection))
            else:
                axes.imshow(pixels)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_ylabel(answer["question"], fontsize=11)
            axes.set_title(f"{answer['tokens']} tokens: {answer['answer']}", fontsize=11)
    marks = [
        Line2D([], [], marker="o", ls="", color=RELEVANCE, label="picked by relevance to the question"),
        Line2D([], [], marker="^", ls="", color=COVERAGE, label="picked to cover the image"),
    ]
    if any(answer["pruned"].last and answer["pruned"].last[0].selection.swaps for one in runs for answer in one[1:]):
        marks.append(Line2D([], [], marker="s", ls="", color=OTHER, label="swapped in"))
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=110)
