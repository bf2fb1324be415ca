"""Questions on pictures under a method that is attached: one, or several per call of ``generate``.

`stacktok ask` and `stacktok batch` both answer through here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stacktok.models.prompt import batch_inputs, further_questions, prompt_text
from stacktok.models.registry import adapter_for
from stacktok.runtime.capture import preparations, share
from stacktok.runtime.run import Pruned


@dataclass(frozen=True)
class Answered:
    """An answer.

    Attributes
    ----------
    text
        What the model says.
    before, after
        Tokens of the picture without and with pruning; its placeholders alone where the budget is None.
    seconds
        Time of the selection.
    """

    text: str
    before: int
    after: int
    seconds: float


@dataclass
class Counts:
    """Work done so far: pictures that went through the vision tower, and pictures prepared for the method."""

    encoded: int = 0
    prepared: int = 0


def generate_texts(model: Any, processor: Any, inputs: Any, max_new_tokens: int, **more: Any) -> list[str]:
    """Greedy answers to a batch of prompts.

    Parameters
    ----------
    model, processor
        The model that is asked.
    inputs
        Of `batch_inputs`.
    max_new_tokens
        Longest answer.
    **more
        Further arguments of ``generate``.
    """
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **more)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [processor.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in new]


def ask_rows(
    model: Any,
    processor: Any,
    pruned: Pruned,
    pictures: Sequence[Any],
    rows: Sequence[tuple[int, str]],
    max_new_tokens: int,
    counts: Counts | None = None,
) -> list[Answered]:
    """Answer several questions in one call of ``generate``; a picture is encoded and prepared once where that can be.

    Parameters
    ----------
    model, processor
        The model that is asked.
    pruned
        The method on it.
    pictures
        In RGB, P of them.
    rows
        The questions, B of them, each with the index of its picture.
    max_new_tokens
        Longest answer.
    counts
        Added to.
    """
    counts = Counts() if counts is None else counts
    pruned.query = [question for _, question in rows]
    shared = _shared(model, processor, pictures, rows) if len(pictures) < len(rows) else None
    if shared is None:
        inputs = batch_inputs(processor, [pictures[image] for image, _ in rows], [q for _, q in rows], model)
        texts = generate_texts(model, processor, inputs, max_new_tokens)
        counts.encoded += len(rows)
        counts.prepared += 0 if pruned.budget is None else len(rows)
    else:
        inputs, output = shared
        texts = generate_texts(model, processor, inputs, max_new_tokens, mm_encoder_outputs={"image": output})
        counts.encoded += len(pictures)
        counts.prepared += preparations(output)
    tokens = (inputs["input_ids"] == model.config.image_token_id).sum(1).tolist()
    found = [Answered(text, count, count, 0.0) for text, count in zip(texts, tokens, strict=True)]
    if pruned.budget is not None:
        for result in pruned.last:
            found[result.row] = Answered(texts[result.row], result.before, result.after, result.seconds)
    return found


@torch.no_grad()
def _shared(model: Any, processor: Any, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> Any:
    """Inputs without pixels and the encoder's output for them; None where every prompt needs its own."""
    adapter = adapter_for(model)
    base: Any = adapter.base(model)
    if getattr(model, "hf_device_map", None) or adapter.group(model.config, [], processor) is not None:
        return None
    first = dict(reversed(rows))
    asked = [first[image] for image in range(len(pictures))]
    inputs = batch_inputs(processor, pictures, asked, model)
    prompts = [(image, prompt_text(processor, question)) for image, question in rows]
    further = further_questions(processor, inputs, [prompt_text(processor, one) for one in asked], prompts, model)
    if further is None:
        return None
    names = inspect.signature(base.get_image_features).parameters
    arguments = {name: value for name, value in inputs.items() if name in names}
    output = base.get_image_features(**arguments, return_dict=True)
    return further, share(output, [image for image, _ in rows])
