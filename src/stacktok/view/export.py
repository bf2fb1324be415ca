"""A state of the page to take away: a drawing, the full trace, the Python lines that reproduce it."""

from __future__ import annotations

import base64
import json
from dataclasses import fields
from typing import Any
from xml.sax.saxutils import escape

from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import EncodedCrop
from stacktok.embedded import PREFIX
from stacktok.figures.kept import COVERAGE, MERGED, OTHER, RELEVANCE, outline
from stacktok.methods.base import Method
from stacktok.models.prompt import plain_text
from stacktok.view.engine import Engine
from stacktok.view.state import Picture
from stacktok.view.trace import crop_records

_CELL, _GAP, _CAPTION = 16, 12, 44


def json_trace(engine: Engine, name: str, question: str, method: str, budget: int) -> dict[str, Any]:
    """Everything about a selection: its record at the budget, exactly as the library writes it."""
    picture, asked = engine.picture(name), engine.ask(name, question)
    pruned = engine.pruned_view(picture, question, method, budget)
    record = pruned.reduction.record
    return {
        "model": engine.name,
        "image": name,
        "question": question,
        "words": asked.words,
        "method": method,
        "parameters": _parameters(engine.method(method)),
        "budget": budget,
        "grids": [list(crop.grid) for crop in picture.encoded.crops],
        "indices": [own.tolist() for own in engine.indices(picture, pruned)],
        "tokens": len(pruned.reduction),
        "merged": pruned.merged,
        "per_layer": list(pruned.per_layer),
        "selection": json.loads(record.to_json()) if isinstance(record, (Selection, CropSelection)) else None,
    }


def python_lines(engine: Engine, name: str, question: str, method: str, budget: int) -> str:
    """A program that repeats the selection and prints what it kept."""
    chosen = engine.method(method)
    kind = type(chosen)
    sample = engine.samples.get(name)
    own = {key: value for key, value in _parameters(chosen).items() if value != getattr(kind(), key)}
    arguments = ", ".join(f"{key}={value!r}" for key, value in {"budget": budget, **own}.items())
    if kind.__name__ == "StackTok":
        method_import = "from stacktok import StackTok"
    else:
        method_import = f"from {kind.__module__} import {kind.__name__}"
    embedded = engine.name.startswith(PREFIX)
    imports = [
        "from transformers import AutoModelForImageTextToText, AutoProcessor",
        "",
        method_import,
        "from stacktok import embedded" if embedded else "",
        sample.imports if sample is not None else "",
        "from stacktok.models.pictures import read_picture" if sample is None or not sample.source else "",
    ]
    picture = sample.source if sample is not None and sample.source else 'read_picture("picture.png")'
    where = f"embedded.path({engine.name.removeprefix(PREFIX)!r})" if embedded else repr(engine.name)
    return "\n".join(
        [
            *(line for at, line in enumerate(imports) if line or at == 1),
            "",
            f"name = {where}",
            "model = AutoModelForImageTextToText.from_pretrained(name).eval()",
            "processor = AutoProcessor.from_pretrained(name)",
            f"picture = {picture}",
            f"question = {plain_text(question, engine.processor)!r}",
            'content = [{"type": "image"}, {"type": "text", "text": question}]',
            "prompt = processor.apply_chat_template(",
            '    [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True',
            ")",
            'inputs = processor(images=[picture], text=[prompt], return_tensors="pt")',
            f"with {kind.__name__}({arguments})(model, processor) as pruned:",
            f"    out = model.generate(**inputs, max_new_tokens={engine.max_new_tokens}, do_sample=False)",
            'print(processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
            "print(pruned.last[0].reduction.anchors.tolist())",
            "",
        ]
    )


def svg(engine: Engine, name: str, question: str, method: str, budget: int) -> str:
    """Kept tokens on what the encoder saw: circles by relevance, triangles by coverage, squares by neither."""
    picture = engine.picture(name)
    pruned = engine.pruned_view(picture, question, method, budget)
    record, indices = pruned.reduction.record, engine.indices(picture, pruned)
    scored: list[dict[int, str]] = [{} for _ in indices]
    if isinstance(record, (Selection, CropSelection)):
        for by, crop in zip(scored, crop_records(record), strict=True):
            by.update(zip(crop.order.tolist(), crop.criterion, strict=True))
    parts, x, height = [], 0, 0
    for c, own in enumerate(indices):
        regions = [[t for crop, t in entry["sources"] if crop == c] for entry in pruned.merged]
        parts.append(f'<g transform="translate({x} 0)">{_crop(picture, c, own.tolist(), scored[c], regions)}</g>')
        rows, columns = picture.encoded.crops[c].grid
        x += columns * _CELL + _GAP
        height = max(height, rows * _CELL)
    width = max(x - _GAP, 320)
    caption = f"{method}: {len(pruned.reduction)} of {picture.encoded.n} tokens"
    text = '<text x="4" y="{y}" font-family="sans-serif" font-size="14" fill="#222">{text}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + _CAPTION}" width="{width}" '
        f'height="{height + _CAPTION}"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}'
        + text.format(y=height + 18, text=escape(question))
        + text.format(y=height + 38, text=escape(caption))
        + "</svg>"
    )


def _crop(picture: Picture, c: int, kept: list[int], scored: dict[int, str], regions: list[list[int]]) -> str:
    crop: EncodedCrop = picture.encoded.crops[c]
    rows, columns = crop.grid
    width, height = columns * _CELL, rows * _CELL
    data = base64.b64encode(picture.crops[c]).decode("ascii")
    held = set(kept)
    dropped = "".join(
        f"M{token % columns * _CELL} {token // columns * _CELL}h{_CELL}v{_CELL}h-{_CELL}z"
        for token in range(crop.n)
        if token not in held
    )
    marks = "".join(_mark(token % columns, token // columns, scored.get(token, "")) for token in kept)
    edges = [edge for region in regions for edge in outline(region, columns)]
    lines = "".join(f"M{a * _CELL} {b * _CELL}L{u * _CELL} {v * _CELL}" for (a, b), (u, v) in edges)
    borders = f'<path d="{lines}" stroke="{MERGED}" stroke-width="1.5" fill="none"/>' if lines else ""
    return (
        f'<image href="data:image/png;base64,{data}" width="{width}" height="{height}" preserveAspectRatio="none"/>'
        f'<path d="{dropped}" fill="#fff" fill-opacity="0.72"/>{borders}'
        f'<g stroke="#fff" stroke-width="1">{marks}</g>'
    )


def _mark(column: int, row: int, criterion: str) -> str:
    x, y, r = (column + 0.5) * _CELL, (row + 0.5) * _CELL, _CELL * 0.3
    if criterion == "relevance":
        return f'<circle cx="{x}" cy="{y}" r="{r}" fill="{RELEVANCE}"/>'
    if criterion == "coverage":
        return f'<path d="M{x} {y - r}L{x + r} {y + r}H{x - r}z" fill="{COVERAGE}"/>'
    return f'<rect x="{x - r}" y="{y - r}" width="{2 * r}" height="{2 * r}" fill="{OTHER}"/>'


def _parameters(method: Method) -> dict[str, Any]:
    names = [field.name for field in fields(method) if field.name not in ("budget", "before")]
    return {name: getattr(method, name) for name in names}
