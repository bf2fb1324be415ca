"""``stacktok`` as a model of lmms-eval: ``--model stacktok --model_args pretrained=...,method=stacktok,budget=64``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import yaml
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages

from stacktok import embedded
from stacktok.core.budget import parse_budget
from stacktok.evaluation.answering import Answerer, Prompt
from stacktok.evaluation.cells import build_method
from stacktok.evaluation.plan import MethodPart
from stacktok.methods.base import Method


class StackTokModel(lmms):  # type: ignore[misc]
    """A vision-language model of any supported family, pruned by any method.

    Parameters
    ----------
    pretrained
        Folder or hub name; ``embedded/llava`` is the model that ships with the package.
    method
        Name of a method; "none" runs the unpruned model.
    budget
        Tokens to keep, as in ``64`` or ``20%``.
    dtype, device
        How to load; under torchrun each process takes the GPU of its local rank.
    batch_size
        Prompts per call of ``generate``.
    log
        File for the per-sample log, one JSON line per prompt; processes after the first append their rank to its name.
    settings
        The method's own parameters.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "",
        method: str = "stacktok",
        budget: int | float | str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        log: str | None = None,
        **settings: Any,
    ) -> None:
        if not pretrained:
            raise ValueError("pretrained is missing; give model_args pretrained=FOLDER_OR_HUB_NAME")
        super().__init__()
        settings.pop("max_batch_size", None)
        chosen: Method | None = None
        if method != "none":
            if budget is None:
                raise ValueError(f"budget is missing; give model_args budget=64 with method={method}, or method=none")
            values = {
                key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in settings.items()
            }
            part = MethodPart(name=method, method=method, settings=values)
            chosen = build_method(part, parse_budget(budget) if isinstance(budget, str) else budget)
        elif settings:
            raise ValueError(f"method=none knows no parameter {next(iter(settings))!r}; leave it out")
        self._rank, self._world_size = start_processes(device)
        self._device = torch.device(own_device(device))
        self.answerer = Answerer(embedded.resolve(pretrained), dtype=dtype, device=str(self._device))
        self.use(chosen, int(batch_size), log)

    @classmethod
    def around(cls, answerer: Answerer, method: Method | None, batch_size: int, device: str | None) -> StackTokModel:
        """The same on a model that is loaded already."""
        self = cls.__new__(cls)
        lmms.__init__(self)
        self._rank, self._world_size = start_processes(device)
        self._device = torch.device(own_device(device))
        self.answerer = answerer
        self.use(method, batch_size, None)
        return self

    def use(self, method: Method | None, batch_size: int, log: str | None) -> None:
        """Choose the method for the requests to come."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.method, self.batch_size_per_gpu = method, batch_size
        self._log = f"{log}.{self._rank}" if log is not None and self._rank else log
        self.samples: dict[tuple[str, int], dict[str, Any]] = {}
        self.required_field: str | None = None

    @property
    def batch_size(self) -> int:
        """Prompts per call of ``generate``."""
        return self.batch_size_per_gpu

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._device

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of processes that share the items."""
        return self._world_size

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests; an error in any of them ends the run."""
        answers: list[GenerationResult] = []
        with self.answerer.pruned(self.method):
            for _, alike in groupby(
                requests, key=lambda request: json.dumps(request.args[2], sort_keys=True, default=str)
            ):
                group = list(alike)
                for first in range(0, len(group), self.batch_size):
                    answers += self._batch(group[first : first + self.batch_size])
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not offered: the paper's benchmarks all generate."""
        raise NotImplementedError("the model stacktok generates; choose a task with output_type generate_until")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Not offered: the paper's benchmarks all have one round."""
        raise NotImplementedError(
            "the model stacktok answers in one round; choose a task of output_type generate_until"
        )

    def _batch(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        prompts = []
        for request in requests:
            _, to_messages, _, doc_id, task, split = request.args
            document = self.task_dict[task][split][doc_id]
            if self.required_field is not None and self.required_field not in document:
                raise ValueError(
                    f"group {self.required_field!r} is not a field of task {task!r}; give one of {', '.join(document)}"
                )
            chat = ChatMessages(messages=to_messages(document))
            images, videos, audios = chat.extract_media()
            if videos or audios:
                raise ValueError(f"task {task!r} asks about video or audio; the model stacktok takes images")
            prompts.append(Prompt([_plain(message) for message in chat.messages], images))
        wanted = dict(requests[0].args[2])
        until = wanted.pop("until", None) or []
        found = self.answerer.answer(prompts, **generation_arguments(wanted))
        results = []
        for request, answer in zip(requests, found, strict=True):
            doc_id, task = request.args[3], request.args[4]
            sample = {"task": task, "doc_id": int(doc_id), "answer": answer.text, **answer.log.to_dict()}
            if (task, int(doc_id)) not in self.samples:
                self.samples[task, int(doc_id)] = sample
                if self._log is not None:
                    with open(self._log, "a", encoding="utf-8") as stream:
                        stream.write(json.dumps(sample) + "\n")
            text = answer.text
            for stop in [until] if isinstance(until, str) else until:
                text = text.split(stop)[0] if stop else text
            results.append(GenerationResult(text=text.strip(), token_counts=TokenCounts(output_tokens=answer.length)))
        return results


def generation_arguments(wanted: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``generate`` from a task's, greedy unless it asks for a temperature."""
    arguments: dict[str, Any] = {"max_new_tokens": int(wanted.get("max_new_tokens", 128))}
    temperature = float(wanted.get("temperature") or 0)
    arguments["do_sample"] = bool(wanted.get("do_sample", temperature > 0)) and temperature > 0
    if arguments["do_sample"]:
        arguments["temperature"] = temperature
        if wanted.get("top_p") is not None:
            arguments["top_p"] = float(wanted["top_p"])
    if (wanted.get("num_beams") or 1) > 1:
        arguments["num_beams"] = int(wanted["num_beams"])
    return arguments


def start_processes(device: str | None) -> tuple[int, int]:
    """Rank and number of the processes that torchrun started; joins their group."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        return 0, 1
    if not torch.distributed.is_initialized():
        cuda = own_device(device).startswith("cuda")
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return torch.distributed.get_rank(), count


def own_device(device: str | None) -> str:
    """The device of this process."""
    if device in (None, "cuda"):
        if not torch.cuda.is_available():
            return "cpu" if device is None else "cuda"
        local = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(local)
        return f"cuda:{local}"
    return str(device)


def _plain(message: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part.text} if part.type == "text" else {"type": part.type} for part in message.content
    ]
    return {"role": message.role, "content": content}
