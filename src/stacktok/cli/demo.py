"""``stacktok demo``: the embedded model answers two questions on one scene with all tokens and with few."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stacktok.cli.common import MODEL_HELP, check_file, load, model_path, stdout, user_errors

if TYPE_CHECKING:
    from stacktok.scenes import Question

BUDGETS = (None, 64, 16)
LOCAL, HOLISTIC = "reading", "background"


def demo(
    scene: Annotated[int, typer.Option(min=0, help="Which scene of the test split.")] = 6,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("stacktok-demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the embedded model a local and a holistic question with 576, 64 and 16 tokens, and draw what was kept."""
    with user_errors():
        name = model_path(model)
        if out.suffix not in (".png", ".svg"):
            raise ValueError(f"out {out} ends in {out.suffix!r}; give a file that ends in .png or .svg")
        check_file(out)

        from stacktok.figures.files import save
        from stacktok.scenes import DETAIL, STANDARD, make_scene, questions, render, seed_for

        # The model with tiles was trained on scenes of smaller things.
        shown = make_scene(seed_for("test", scene), DETAIL if model == "embedded/llava_next" else STANDARD)
        picture = render(shown)
        asked = {question.family: question for question in questions(shown)}
        for family in (LOCAL, HOLISTIC):
            if family not in asked:
                raise ValueError(f"scene {scene} has no {family} question; choose another --scene")
        loaded, processor = load(name, "float32", "cpu", quiet=True)
        runs = [run(loaded, processor, picture, asked[family]) for family in (LOCAL, HOLISTIC)]
        save(draw(processor, picture, runs), out, dpi=110)
    results = [
        {key: value for key, value in answer.items() if key not in ("pruned", "pixels")}
        for answers in runs
        for answer in answers
    ]
    if as_json:
        print(json.dumps({"picture": str(out), "answers": results}))
        return
    from rich.table import Table

    console = stdout()
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
    from stacktok.models.prompt import prompt_inputs

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
                "pixels": inputs["pixel_values"],
            }
        )
    return answers


def draw(processor: Any, picture: Any, runs: list[list[dict[str, Any]]]) -> Any:
    """The figure of all answers."""
    import numpy as np

    from stacktok.figures.demo import Shown, demo_figure
    from stacktok.figures.encoder_views import encoder_views
    from stacktok.figures.image import panel_data, tile_layout

    crops, rows = 1, []
    for answers in runs:
        row = []
        for answer in answers:
            title, last = f"{answer['tokens']} tokens: {answer['answer']}", answer["pruned"].last
            if not last:
                row.append(Shown(title, [np.asarray(picture)], []))
                continue
            (result,) = last
            seen = encoder_views(picture, result.image, answer["pixels"], processor.image_processor)
            crops = len(result.image.crops)
            row.append(Shown(title, [np.asarray(view) for view in seen], panel_data(result.image, result.reduction)))
        rows.append(row)
    tiles = tile_layout(processor, (picture.height, picture.width), crops)
    return demo_figure([answers[0]["question"] for answers in runs], rows, tiles)
