"""Asking a model, pruned or not, and noting what pruning did to every prompt.

The plugin of lmms-eval and this package's own loop both ask through here; an error while answering is never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stacktok.core.record import CropSelection, Selection
from stacktok.methods.base import Method


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered.

    Attributes
    ----------
    messages
        In the form that chat templates take: role, and content as a list of images and texts.
    images
        The pictures, in the order in which the messages name them.
    """

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Any]


def question_prompt(image: Any, question: str) -> Prompt:
    """One question on one picture."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return Prompt([{"role": "user", "content": content}], [image])


@dataclass(frozen=True)
class PruningLog:
    """What pruning did to one prompt.

    Attributes
    ----------
    tokens_full, tokens
        Visual tokens without pruning (separators of the layout included), and as realised.
    tokens_per_layer
        Mean over the language model's layers of the tokens that entered, the one count that is fair to methods that
        prune inside it.
    strictness
        beta, the mean over crops; None for a method without one.
    bound
        Share of steps at which the gate bound; None for a method without a gate.
    selection_seconds
        Time of the selection.
    """

    tokens_full: int
    tokens: int
    tokens_per_layer: float
    strictness: float | None = None
    bound: float | None = None
    selection_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """An answer, its length in tokens, and what pruning did."""

    text: str
    length: int
    log: PruningLog


class Answerer:
    """A loaded model that answers prompts, under any method in turn.

    Parameters
    ----------
    pretrained
        Folder or hub name.
    dtype
        "auto" or a type's name.
    device
        Where to run; None is the first GPU if there is one.
    """

    def __init__(self, pretrained: str, *, dtype: str = "auto", device: str | None = None) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        from stacktok.models.base import supported
        from stacktok.models.processor import load_processor

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            config = AutoConfig.from_pretrained(pretrained)
            if config.model_type not in supported():
                raise ValueError(f"its model type {config.model_type!r} is not among {', '.join(supported())}")
            self.processor = load_processor(pretrained, config.model_type)
            kind = "auto" if dtype == "auto" else getattr(torch, dtype)
            model: Any = AutoModelForImageTextToText.from_pretrained(pretrained, dtype=kind)
        except (OSError, ValueError, KeyError) as error:
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            where = "" if Path(pretrained).exists() else "; it is no folder here, nor to be had from the hub"
            raise ValueError(f"pretrained {pretrained!r} cannot be loaded: {first}{where}") from None
        self.model: Any = model.to(device).eval()
        self.processor.tokenizer.padding_side = "left"
        self._run: Any = None

    @contextmanager
    def pruned(self, method: Method | None) -> Iterator[None]:
        """Answer under a method while the block lasts; None is the unpruned model."""
        with nullcontext() if method is None else method(self.model, self.processor) as run:
            self._run = run
            try:
                yield
            finally:
                self._run = None

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Prompt], **generation: Any) -> list[Answer]:
        """Answers to a batch of prompts.

        Parameters
        ----------
        prompts
            The batch.
        generation
            Arguments of ``generate``.
        """
        texts = [
            self.processor.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            for prompt in prompts
        ]
        images = [image.convert("RGB") for prompt in prompts for image in prompt.images]
        inputs = self.processor(images=images or None, text=texts, return_tensors="pt", padding=True)
        parameter = next(self.model.parameters())
        inputs = inputs.to(parameter.device, parameter.dtype)
        output = self.model.generate(**inputs, **generation)
        new = output[:, inputs["input_ids"].shape[1] :]
        pad = self.processor.tokenizer.pad_token_id
        logs = self._logs(inputs["input_ids"])
        return [
            Answer(self.processor.tokenizer.decode(ids, skip_special_tokens=True), int((ids != pad).sum()), log)
            for ids, log in zip(new, logs, strict=True)
        ]

    def _logs(self, input_ids: torch.Tensor) -> list[PruningLog]:
        full = (input_ids == self.model.config.image_token_id).sum(1).tolist()
        results = () if self._run is None else self._run.last
        logs = []
        for row, count in enumerate(full):
            own = [result for result in results if result.row == row]
            if not own:
                logs.append(PruningLog(count, count, float(count)))
                continue
            records = [record for result in own for record in _selections(result.selection)]
            steps = sum(record.k for record in records)
            logs.append(
                PruningLog(
                    count,
                    sum(result.reduction.tokens for result in own),
                    sum(result.average for result in own),
                    sum(record.strictness for record in records) / len(records) if records else None,
                    sum(int(record.bound.sum()) for record in records) / steps if steps else None,
                    sum(result.seconds for result in own),
                )
            )
        return logs


def _selections(record: Any) -> tuple[Selection, ...]:
    if isinstance(record, CropSelection):
        return record.crops
    return (record,) if isinstance(record, Selection) else ()
