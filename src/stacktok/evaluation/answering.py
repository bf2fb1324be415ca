"""Asking a model, pruned or not, and noting what pruning did to every prompt.

The plugin of lmms-eval and this package's own loop both ask through here; an error while answering is never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stacktok.core.limits import QUERY_CHARACTERS
from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import Reduction
from stacktok.methods.base import Method
from stacktok.methods.downsample import DownSample
from stacktok.models.pictures import check_picture, rgb
from stacktok.models.prompt import last_question, plain_messages
from stacktok.runtime import PROMPT


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
    """The counts and times of pruning one prompt.

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
    query_rows, relevance_picks
        Rows of the query, and steps decided by relevance, over all crops; None for a method without a record.
    selection_seconds
        Time of the selection; where one run serves several budgets, that of the largest.
    """

    tokens_full: int
    tokens: int
    tokens_per_layer: float
    strictness: float | None = None
    bound: float | None = None
    query_rows: int | None = None
    relevance_picks: int | None = None
    selection_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of(cls, full: int, reductions: Sequence[Reduction], per_layer: float) -> PruningLog:
        """The log of a prompt of ``full`` visual tokens from what is left of its images."""
        records = [record for reduction in reductions for record in _selections(reduction.record)]
        steps = sum(record.k for record in records)
        gate: dict[str, Any] = {}
        if records:
            gate = {
                "strictness": round(sum(record.strictness for record in records) / len(records), 4),
                "bound": round(sum(int(record.bound.sum()) for record in records) / steps, 4) if steps else None,
                "query_rows": records[0].m,
                "relevance_picks": sum(record.criterion.count("relevance") for record in records),
            }
        seconds = round(sum(reduction.seconds for reduction in reductions), 6)
        tokens = sum(reduction.tokens for reduction in reductions)
        return cls(full, tokens, per_layer, **gate, selection_seconds=seconds)


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
        from stacktok.models.loading import load_model

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model, self.processor = load_model(pretrained, "auto" if dtype == "auto" else getattr(torch, dtype))
        except ValueError as error:
            raise ValueError(f"pretrained {pretrained!r} cannot be loaded: {error}") from None
        self.model: Any = model.to(device)
        self._run: Any = None
        self._method: Method | None = None

    @contextmanager
    def pruned(self, method: Method | None) -> Iterator[None]:
        """Answer under a method while the block lasts; None is the unpruned model."""
        with nullcontext() if method is None else method(self.model, self.processor) as run:
            self._run, self._method = run, method
            try:
                yield
            finally:
                self._run = self._method = None

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
            self.processor.apply_chat_template(
                plain_messages(prompt.messages, self.processor), tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        # Some processors want the images of every prompt in a list of their own; none minds.
        images = [[rgb(image) for image in prompt.images] for prompt in prompts]
        for image in (image for own in images for image in own):
            check_picture(image.width, image.height)
        if isinstance(self._method, DownSample):
            images = [[self._method.apply(image, self.processor) for image in own] for own in images]
        given = images if any(images) else None
        inputs = self.processor(images=given, text=texts, return_tensors="pt", padding=True)
        parameter = next(self.model.parameters())
        inputs = inputs.to(parameter.device, parameter.dtype)
        if self._run is not None:
            # Known here, they need not be read back from the prompts, unless they are too long to be handed over.
            asked = [last_question(prompt.messages) for prompt in prompts]
            self._run.query = [text if len(text) <= QUERY_CHARACTERS else PROMPT for text in asked]
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
            reductions = [result.reduction.timed(result.seconds) for result in own]
            logs.append(PruningLog.of(count, reductions, sum(result.average for result in own)))
        return logs


def _selections(record: Any) -> tuple[Selection, ...]:
    if isinstance(record, CropSelection):
        return record.crops
    return (record,) if isinstance(record, Selection) else ()
