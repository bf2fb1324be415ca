"""Measuring settings on samples: the full model's answers, and how a pruned model takes them.

An answer is unchanged exactly where every one of its tokens is the pruned model's first choice after those before it,
so that one forward pass over prompt and answer tells both that and the answer's log-probability. Only changed answers
are generated, and only where they are to be scored. Pictures are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from stacktok.evaluation.cells import digest_of
from stacktok.evaluation.loop import Loop, Prompt
from stacktok.evaluation.scenes_loop import Columns, reductions
from stacktok.methods.base import FeatureMethod, Method
from stacktok.methods.settings import method_name, own_parameters
from stacktok.models.prompt import prompt_inputs
from stacktok.models.registry import adapter_for
from stacktok.tune.data import Sample
from stacktok.tune.quality import Metric

BATCH = 16
"""Prompts per forward pass on the way without hooks."""


@dataclass(frozen=True)
class Setting:
    """A method with its budget and positions."""

    method: Method

    @property
    def key(self) -> str:
        """Digest of everything that decides its outcomes."""
        own = self.method
        return digest_of([method_name(own), own.revision, str(own.budget), own.positions, own_parameters(own)])

    def __str__(self) -> str:
        positions = "" if self.method.positions is None else f", positions {self.method.positions}"
        return f"{self.method.info.name}, {self.method.budget}{positions}"


class Engine:
    """A model that is asked about samples; the chunk at hand stays encoded.

    Parameters
    ----------
    model, processor
        The user's.
    metric
        Scores answers; None where samples have no right ones.
    max_new_tokens
        Longest answer.
    """

    def __init__(self, model: Any, processor: Any, metric: Metric | None, max_new_tokens: int) -> None:
        self.model, self.processor, self.metric, self.max_new_tokens = model, processor, metric, max_new_tokens
        adapter = adapter_for(model)
        self._hooked = _Hooked(model, processor, max_new_tokens)
        self._loop: Loop | None = None
        if model.device.type == "cpu" and not adapter.mrope and not adapter.text_separators:
            try:
                self._loop = Loop(model, processor, max_new_tokens)
            except ValueError:
                self._loop = None
        self._encoded: dict[str, tuple[Any, Any]] = {}
        self._prompts: dict[int, Prompt] = {}

    def full(self, chunk: Sequence[Sample]) -> Columns:
        """Answers of the full model: tokens, text and score of every sample."""
        tokens: list[list[int]] = []
        if self._loop is None:
            tokens = [self._hooked.answer(None, sample) for sample in chunk]
        else:
            prompts = [self._prompt(self._loop, sample, chunk) for sample in chunk]
            for first in range(0, len(chunk), BATCH):
                part = prompts[first : first + BATCH]
                tokens += self._loop.tokens(part, [None] * len(part))
        texts = [self._text(own) for own in tokens]
        return {"ids": tokens, "answer": texts, "score": self._scores(texts, chunk)}

    def measure(self, settings: Sequence[Setting], chunk: Sequence[Sample], full: Columns) -> dict[str, Columns]:
        """Outcomes of settings on a chunk, by their keys."""
        found: dict[str, Columns] = {}
        for _, alike in groupby(
            settings, key=lambda own: digest_of([method_name(own.method), own_parameters(own.method)])
        ):
            group = list(alike)
            if self._loop is not None and isinstance(group[0].method, FeatureMethod):
                found |= self._without_hooks(self._loop, group, chunk, full)
            else:
                found |= {setting.key: self._with_hooks(setting, chunk, full) for setting in group}
        return found

    def answer(self, setting: Setting | None, sample: Sample) -> str:
        """The answer to one sample in the plain way, through ``generate``."""
        return self._text(self._hooked.answer(None if setting is None else setting.method, sample))

    def forget(self) -> None:
        """Drop what is kept of the picture at hand, so that the next answer pays for all of it."""
        self._hooked.forget()

    def _without_hooks(
        self, loop: Loop, settings: Sequence[Setting], chunk: Sequence[Sample], full: Columns
    ) -> dict[str, Columns]:
        method = settings[0].method
        if not isinstance(method, FeatureMethod):
            raise TypeError(f"{type(method).__name__} works inside the language model; it needs hooks")
        prompts = [self._prompt(loop, sample, chunk) for sample in chunk]
        budgets = list(dict.fromkeys(own.method.budget for own in settings if own.method.budget is not None))
        prepared: dict[str, Any] = {}
        kept = []
        for sample, prompt in zip(chunk, prompts, strict=True):
            if sample.group not in prepared:
                prepared[sample.group] = method.prepare(prompt.image)
            kept.append(reductions(method, prepared[sample.group], prompt.query, budgets))
        found = {}
        for setting in settings:
            left = [one[setting.method.budget] for one in kept]
            positions = setting.method.positions or "compact"
            scores: list[float] = []
            same: list[bool] = []
            for first in range(0, len(chunk), BATCH):
                part = slice(first, first + BATCH)
                more = loop.score(prompts[part], left[part], full["ids"][part], positions)
                scores, same = scores + more[0], same + more[1]
            changed = [n for n, unchanged in enumerate(same) if not unchanged] if self.metric is not None else []
            texts: list[str | None] = [full["answer"][n] if unchanged else None for n, unchanged in enumerate(same)]
            for first in range(0, len(changed), BATCH):
                part_of = changed[first : first + BATCH]
                given = loop.answers([prompts[n] for n in part_of], [left[n] for n in part_of], positions)
                for n, text in zip(part_of, given, strict=True):
                    texts[n] = text
            cost = [float(len(one)) for one in left if one is not None]
            found[setting.key] = self._columns(chunk, texts, same, scores, cost)
        return found

    def _with_hooks(self, setting: Setting, chunk: Sequence[Sample], full: Columns) -> Columns:
        texts: list[str | None] = []
        scores, same, cost = [], [], []
        for number, sample in enumerate(chunk):
            score, unchanged, tokens = self._hooked.score(setting.method, sample, full["ids"][number])
            text = full["answer"][number] if unchanged else None
            if text is None and self.metric is not None:
                text = self._text(self._hooked.answer(setting.method, sample))
            texts.append(text)
            scores.append(score)
            same.append(unchanged)
            cost.append(tokens)
        return self._columns(chunk, texts, same, scores, cost)

    def _columns(
        self,
        chunk: Sequence[Sample],
        texts: Sequence[str | None],
        same: Sequence[bool],
        scores: Sequence[float],
        cost: Sequence[float],
    ) -> Columns:
        return {
            "answer": list(texts),
            "unchanged": [int(one) for one in same],
            "log_prob": [round(one, 6) for one in scores],
            "score": self._scores(texts, chunk),
            "tokens": list(cost),
        }

    def _scores(self, texts: Sequence[str | None], chunk: Sequence[Sample]) -> list[float | None]:
        if self.metric is None:
            return [None] * len(texts)
        return [self.metric(text or "", sample.answers) for text, sample in zip(texts, chunk, strict=True)]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()

    def _prompt(self, loop: Loop, sample: Sample, chunk: Sequence[Sample]) -> Prompt:
        if sample.number not in self._prompts:
            if sample.group not in self._encoded:
                here = {own.group for own in chunk}
                self._encoded = {name: one for name, one in self._encoded.items() if name in here}
                self._prompts = {n: one for n, one in self._prompts.items() if any(own.number == n for own in chunk)}
                picture = sample.open()
                self._encoded[sample.group] = picture, loop.encode(picture)
            self._prompts[sample.number] = loop.prompt(*self._encoded[sample.group], sample.question)
        return self._prompts[sample.number]


class _Hooked:
    """The way through the runtime, for every family and device; the last picture's encoder output is kept."""

    def __init__(self, model: Any, processor: Any, max_new_tokens: int) -> None:
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens
        self.adapter = adapter_for(model)
        self._output: tuple[str, Any] | None = None
        self._inputs: tuple[int, Any] | None = None

    def forget(self) -> None:
        """Drop the last picture's inputs and encoder output."""
        self._output = self._inputs = None

    @torch.inference_mode()
    def answer(self, method: Method | None, sample: Sample) -> list[int]:
        """Tokens of the greedy answer, the one that ends it included."""
        inputs = self._prompt(sample)
        with self._pruned(method, sample):
            out = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def score(self, method: Method, sample: Sample, answer: Sequence[int]) -> tuple[float, bool, float]:
        """Log-probability of an answer, whether it is the greedy one, and tokens per layer."""
        inputs = dict(self._prompt(sample))
        ids = inputs["input_ids"]
        given = torch.tensor([list(answer)], dtype=ids.dtype, device=ids.device)
        for name, value in list(inputs.items()):
            if isinstance(value, torch.Tensor) and value.shape == ids.shape and name != "input_ids":
                fill = value.new_ones if name == "attention_mask" else value.new_zeros
                inputs[name] = torch.cat([value, fill(given.shape)], dim=1)
        inputs["input_ids"] = torch.cat([ids, given], dim=1)
        with self._pruned(method, sample) as pruned:
            logits = self.model(**inputs, use_cache=False).logits[0, -len(answer) - 1 : -1].float()
            tokens = pruned.average
        chosen = logits.log_softmax(-1).gather(-1, given.T.to(logits.device))[:, 0]
        return float(chosen.sum()), bool((logits.argmax(-1) == given[0].to(logits.device)).all()), float(tokens)

    def _prompt(self, sample: Sample) -> Any:
        if self._inputs is None or self._inputs[0] != sample.number:
            inputs = prompt_inputs(self.processor, sample.open(), sample.question, self.model)
            self._inputs = sample.number, inputs
        return self._inputs[1]

    @contextmanager
    def _pruned(self, method: Method | None, sample: Sample) -> Iterator[Any]:
        with self._encoded_once(method, sample):
            if method is None:
                yield None
                return
            with method(self.model, self.processor) as pruned:
                pruned.query = sample.question
                yield pruned

    @contextmanager
    def _encoded_once(self, method: Method | None, sample: Sample) -> Iterator[None]:
        """Hand out the picture's encoder output again; methods that read the tower need it to run."""
        base = self.adapter.base(self.model)
        if (method is not None and method.reads_tower) or "get_image_features" in vars(base):
            yield
            return
        encode: Any = base.get_image_features

        def once(*args: Any, **kwargs: Any) -> Any:
            if self._output is None or self._output[0] != sample.group:
                self._output = sample.group, encode(*args, **kwargs)
            return self._output[1]

        once.__wrapped__ = encode  # type: ignore[attr-defined]
        vars(base)["get_image_features"] = once
        try:
            yield
        finally:
            vars(base).pop("get_image_features", None)


def settings_of(methods: Sequence[Method], budgets: Sequence[Any], positions: Sequence[Any]) -> list[Setting]:
    """Every method at every budget and position policy; those of one method stand together."""
    return [
        Setting(replace(method, budget=budget, positions=place))
        for method in methods
        for place in positions
        for budget in budgets
    ]
