"""The worst changes as one HTML page without scripts: picture, kept tokens, question, both answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch

from stacktok.methods.base import FeatureMethod
from stacktok.models.prompt import prompt_inputs
from stacktok.tune.data import Sample
from stacktok.tune.engine import Engine, Setting

WORST = 12
"""Changes on a page."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2rem auto; max-width: 64rem; padding: 0 1rem; color: #1d2429; }
h1 { font-size: 1.4rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem; }
article { border: 1px solid #d5dbdf; border-radius: 6px; padding: .8rem; }
img { width: 100%; display: block; border-radius: 3px; }
dl { margin: .6rem 0 0; display: grid; grid-template-columns: auto 1fr; gap: .1rem .7rem; }
dt { color: #5c6870; }
dd { margin: 0; overflow-wrap: anywhere; }
.pruned { color: #b4530a; font-weight: 600; }
"""


@dataclass(frozen=True, eq=False)
class Change:
    """A sample whose answer changed.

    Attributes
    ----------
    sample
        Which.
    full, pruned
        Both answers.
    log_prob
        Log-probability of the full model's answer in the pruned model.
    tokens
        Tokens per layer.
    """

    sample: Sample
    full: str
    pruned: str
    log_prob: float
    tokens: float


def worst_changes(
    engine: Engine, setting: Setting, samples: Sequence[Sample], full: dict[str, list[Any]], own: dict[str, list[Any]]
) -> list[Change]:
    """The changed answers to which the pruned model gives the full model's answer the least probability.

    Parameters
    ----------
    engine, setting
        The model and the setting.
    samples
        Held-out samples.
    full, own
        Outcomes of the full model and of the setting on them.
    """
    changed = [n for n, same in enumerate(own["unchanged"]) if not same]
    changed.sort(key=lambda n: own["log_prob"][n])
    return [
        Change(
            samples[n],
            full["answer"][n],
            engine.answer(setting, samples[n]) if own["answer"][n] is None else own["answer"][n],
            own["log_prob"][n],
            own["tokens"][n],
        )
        for n in changed[:WORST]
    ]


def page(title: str, lines: Sequence[str], changes: Sequence[tuple[Change, bytes]]) -> str:
    """The page.

    Parameters
    ----------
    title, lines
        Above the changes.
    changes
        Each with a PNG of its picture.
    """
    articles = []
    for change, picture in changes:
        right = f"<dt>right</dt><dd>{escape(', '.join(change.sample.answers))}</dd>" if change.sample.answers else ""
        articles.append(
            f'<article><img alt="kept tokens" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
            f"<dl><dt>question</dt><dd>{escape(change.sample.question)}</dd>"
            f"<dt>full model</dt><dd>{escape(change.full) or '&nbsp;'}</dd>"
            f'<dt>pruned</dt><dd class="pruned">{escape(change.pruned) or "&nbsp;"}</dd>{right}'
            f"<dt>tokens</dt><dd>{change.tokens:.0f}</dd>"
            f"<dt>log-prob</dt><dd>{change.log_prob:.2f}</dd></dl></article>"
        )
    told = [*lines, "log-prob is the log-probability that the pruned model gives to the full model's answer."]
    head = "".join(f"<p>{escape(line)}</p>" for line in told)
    body = "".join(articles) or "<p>No answer changed on the held-out samples.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{head}"
        f'<div class="grid">{body}</div></body></html>\n'
    )


@torch.inference_mode()
def drawn(model: Any, processor: Any, setting: Setting, sample: Sample) -> bytes:
    """A PNG of a picture with its kept tokens; of a method inside the language model, the picture alone."""
    picture = sample.open()
    buffer = io.BytesIO()
    if not isinstance(setting.method, FeatureMethod):
        picture.save(buffer, format="PNG")
        return buffer.getvalue()
    from matplotlib.figure import Figure

    from stacktok.figures.encoder_views import encoder_views
    from stacktok.figures.image import draw_image, panel_data, tile_layout

    inputs = prompt_inputs(processor, picture, sample.question, model)
    with setting.method(model, processor) as pruned:
        pruned.query = sample.question
        model(**inputs, use_cache=False)
    result = pruned.last[0]
    seen = encoder_views(picture, result.image, inputs["pixel_values"], processor.image_processor)
    tiles = tile_layout(processor, (picture.height, picture.width), len(result.image.crops))
    figure = Figure(figsize=(3.6 if tiles is None else 6.4, 3.6), layout="constrained")
    draw_image(
        figure, [np.asarray(view) / 255 for view in seen], panel_data(result.image, result.reduction), tiles=tiles
    )
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()
