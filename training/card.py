"""Write the model card of a run and put the model in place: ``python -m training.card --run runs/llava ...``.

Every figure of the card comes from the run's log, its configuration or the evaluation's JSON beside the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stacktok.scenes.questions import FAMILIES
from training.config import TrainConfig, load_config

EMBEDDED = Path(__file__).resolve().parents[1] / "src" / "stacktok" / "embedded"
SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "evaluation.json",
)
TITLES = {
    "llava": "A small LLaVA-1.5 that answers questions about synthetic scenes",
    "llava_next": "A small LLaVA-NeXT that answers questions about small details of synthetic scenes",
}


def card(config: TrainConfig, records: list[dict[str, Any]], evaluation: dict[str, Any], weights: Path) -> str:
    """Text of the model card."""
    with safe_open(weights, "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    megabytes = weights.stat().st_size / 1e6
    minutes = max(record["minutes"] for record in records)
    parts = [
        f"# {TITLES[config.name]}",
        _what(config, count, megabytes),
        "## Accuracy with all visual tokens\n\n" + _accuracy(evaluation),
        "## Data\n\n" + _data(evaluation),
        "## Training\n\n" + _training(config, minutes),
        "## Intended use\n\n"
        "Demonstrations, tests, and comparing token selectors on one model without a download. Load it with\n"
        f'`AutoModelForImageTextToText.from_pretrained(stacktok.embedded.path("{config.name}"))` and '
        f"`AutoProcessor`; prompts come from\nthe processor's chat template (`<s>USER: <image>` line break, question, "
        "`ASSISTANT:`).",
        "## What it is not\n\n" + _limits(config),
        "## Licence\n\nApache-2.0, as the project. Pictures: Noto Emoji, Apache-2.0. Glyphs: DejaVu fonts, their own "
        "free licence. Both licences\nlie beside the assets in `stacktok/scenes/assets`.",
    ]
    return "\n\n".join(parts) + "\n"


def _what(config: TrainConfig, count: int, megabytes: float) -> str:
    sizes = config.model
    grid = sizes.image_size // sizes.patch_size
    if sizes.architecture == "llava":
        views = f"{sizes.image_size} px, {grid} x {grid} = {grid * grid} visual tokens"
        name = "LlavaForConditionalGeneration"
    else:
        views = (
            f"a base view and tiles of {sizes.image_size} px, {grid * grid} tokens each; a {2 * sizes.image_size} px "
            f"square gives 5 crops = {5 * grid * grid} visual tokens"
        )
        name = "LlavaNextForConditionalGeneration"
    return (
        f"`{name}`, trained from scratch: {views}. {count / 1e6:.2f} M parameters, {megabytes:.1f} MB in float32.\n\n"
        f"| part | sizes |\n|---|---|\n"
        f"| vision tower (CLIP, with CLS) | width {sizes.vision_hidden}, MLP {sizes.vision_mlp}, "
        f"{sizes.vision_layers} layers (features from the last but one), {sizes.vision_heads} heads of "
        f"{sizes.vision_hidden // sizes.vision_heads}, patch {sizes.patch_size} |\n"
        f"| projector | {sizes.vision_hidden} - {sizes.text_hidden} - {sizes.text_hidden} |\n"
        f"| language model (Llama) | width {sizes.text_hidden}, MLP {sizes.text_mlp}, {sizes.text_layers} layers, "
        f"{sizes.text_heads} heads of {sizes.text_hidden // sizes.text_heads}, tied embeddings |"
    )


def _accuracy(evaluation: dict[str, Any]) -> str:
    full = evaluation["picture"]
    lines = [
        f"Exact match of greedy answers, {full['all']['questions']} questions about {evaluation['scenes']} scenes of",
        f"the {evaluation['split']} split (style `{evaluation['style']}`, seeds from {evaluation['first_seed']}),",
        'no question seeing another; 95 % bootstrap intervals over scenes. "Best constant" is the share that the most',
        "frequent answer to each wording gets. Controls: the same questions about a grey picture, and about another",
        "scene's picture.",
        "",
        "| family | kind | questions | accuracy % | 95 % interval | best constant % | blank % | another scene % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ("all", *FAMILIES):
        one = full[name]
        kind = "" if name == "all" else "local" if FAMILIES[name] else "holistic"
        low, high = one["interval"]
        blind = (evaluation["chance"][name], *(evaluation[c][name]["accuracy"] for c in ("blank", "shuffled")))
        cells = [name, kind, one["questions"], f"{100 * one['accuracy']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {' | '.join(f'{100 * share:.1f}' for share in blind)} |")
    return "\n".join(
        [*lines, "", "Made from `evaluation.json` beside this file (`python -m training.evaluate --packed`)."]
    )


def _data(evaluation: dict[str, Any]) -> str:
    return (
        "Scenes of `stacktok.scenes`: Noto emoji of 64 kinds on eight procedural textures, with signs that carry a "
        "two-digit number or\none of twenty words. A seed gives a scene; train, dev and test seeds come from disjoint "
        "ranges. Training scenes are generated\non the fly and never repeat."
    )


def _training(config: TrainConfig, minutes: float) -> str:
    rows = []
    for s in config.stages:
        cells = (
            s.name,
            _sizes(s, config),
            s.batch,
            s.steps,
            f"{s.align:g} / {s.language:g} / {s.grounding:g}",
            f"{s.adam:g} / {s.muon:g}",
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    scenes = sum(s.steps * s.batch for s in config.stages)
    counts = [s.name for s in config.stages if s.tally]
    tally = (
        f" In {', '.join(counts)} one more head learns to share its attention between a kind's objects and the start\n"
    )
    tally = tally + "token, so that the start token's share tells the number." if counts else ""
    start = f" Weights start from the embedded `{config.init_from}` model." if config.init_from else ""
    return (
        f"`python -m training.train --config training/configs/{config.name}.yaml`: {minutes:.0f} minutes on two CPU\n"
        "cores that other programs shared at times, "
        f"{scenes} scenes, float32, Muon for matrices and AdamW for the rest.{start}\n\n"
        "| stage | px | scenes per step | steps | alignment / language / grounding | peak rate Adam / Muon |\n"
        "|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\nThe alignment loss pulls every projected patch token towards the word embeddings of what the patch\n"
        "shows (cosine over the tied embedding table), so that question words and patches share a space; read-outs\n"
        "for an object's box, its centre patch and the nouns in the picture (from CLS) exist in training only. The\n"
        "language loss is cross-entropy on answers. The grounding loss makes half of the first layer's heads look\n"
        f"from a question's word at the patches that show it.{tally}\n\n"
        "No pruned picture is ever seen in training. Stages that see windows smaller than the picture have shorter\n"
        f"visual sequences; the later ones have full ones only.\n\n{config.notes}\n![Learning curves](curves.png)"
    )


def _sizes(stage: Any, config: TrainConfig) -> str:
    default = config.model.image_size * (1 if config.model.architecture == "llava" else 2)
    return ", ".join(str(size) for size in sorted({scene.size or default for scene in stage.scenes}))


def _limits(config: TrainConfig) -> str:
    return (
        "It is not a general model: it knows the words of the scene questions and nothing else (any other word is "
        "`<unk>`), English only,\none question per prompt, answers of one or two words. It has not seen photographs. "
        "What a token selector does on it need not\nhold on a large model. Signs lie on the patch grid to within a "
        "pixel, which makes them easier to read than signs in general."
    )


def main() -> None:
    """Read the command line, write the card, copy the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    export = arguments.run / "export"
    records = [json.loads(line) for line in (arguments.run / "log.jsonl").read_text().splitlines()]
    evaluation = json.loads((export / "evaluation.json").read_text())
    target = EMBEDDED / config.name
    target.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copy(export / name, target / name)
    shutil.copy(arguments.run / "curves.png", target / "curves.png")
    (target / "README.md").write_text(card(config, records, evaluation, target / "model.safetensors"))


if __name__ == "__main__":
    main()
