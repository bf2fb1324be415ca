"""Make the pictures of README and docs: ``python docs/make_figures.py --out docs/figures``.

The pictures of results are drawn from the paper's published numbers, the others from runs of the embedded models.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stacktok.evaluation.paper import published_cross_model, published_rows
from stacktok.figures.files import save
from stacktok.figures.results import (
    difference_data,
    draw_differences,
    draw_floating,
    draw_radar,
    floating_data,
    radar_data,
)

SCENE = 3
PHOTOGRAPHIC = ("kept", "relevance")
"""Pictures that hold a scene, which a drawing's form would only make larger."""


def published() -> dict[str, Any]:
    """The paper's three views of its results."""
    radar = Figure(figsize=(6.4, 6.4), layout="constrained")
    draw_radar(radar.add_subplot(projection="polar"), radar_data(published_cross_model()))
    rows = {(r.model, r.method, r.budget): r for r in published_rows() if not r.fine_tuned}
    model = "LLaVA-1.5-7B"
    first, second, full = (
        rows[model, method, budget].scores
        for method, budget in (("StackTok", "64"), ("MMTok", "64"), ("Vanilla", "576"))
    )
    differences = Figure(figsize=(5.6, 4), layout="constrained")
    draw_differences(
        differences.subplots(), difference_data(first, second, full), f"StackTok minus MMTok, {model}, 64 tokens"
    )
    qwen = [(r.budget, r.average) for r in rows.values() if (r.model, r.method) == ("Qwen2.5-VL-7B", "StackTok")]
    floating = Figure(figsize=(5.6, 4), layout="constrained")
    draw_floating(floating.subplots(), floating_data(qwen), "StackTok on Qwen2.5-VL-7B")
    return {"published-radar": radar, "published-differences": differences, "published-budgets": floating}


def run(pretrained: Path) -> dict[str, Any]:
    """Tokens that methods keep of a scene, from a real run."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from stacktok.cli.show import draw
    from stacktok.methods import DivPrune, MMTok, StackTok, VisionZip
    from stacktok.models.prompt import prompt_inputs
    from stacktok.scenes import make_scene, questions, render, seed_for

    model = AutoModelForImageTextToText.from_pretrained(pretrained).eval()
    processor = AutoProcessor.from_pretrained(pretrained)
    scene = make_scene(seed_for("test", SCENE))
    picture, question = render(scene), questions(scene)[0].text
    inputs = prompt_inputs(processor, picture, question, model)
    methods = [StackTok(), MMTok(), DivPrune(), VisionZip()]
    return draw(model, processor, inputs, picture, question, methods, [128, 64, 16])


def main() -> None:
    """Write every picture in the form in which the docs show it."""
    from stacktok import embedded

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=embedded.path("llava"))
    parser.add_argument("--tiles", type=Path, default=embedded.path("llava_next"), help="a model with several crops")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figures = published() | run(options.model)
    figures["nominees"] = run(options.tiles)["nominees"]
    for name, figure in figures.items():
        path = options.out / f"{name}.{'png' if name in PHOTOGRAPHIC else 'svg'}"
        save(figure, path)
        print(path)


if __name__ == "__main__":
    main()
