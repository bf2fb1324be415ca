"""The hooks that every method needs, and one forward pass as they see it.

A pre-hook on the base model notes the prompt; one on the language model, by then given the prompt's embeddings with the
image features in place, lets the pruning change its arguments; a hook after it lets the pruning record the outcome. The
loss is computed over the tokens that are left. Sequences that generation returns keep the original prompt, because
nothing outside the language model is shortened.
"""

from __future__ import annotations

import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stacktok.core.tokens import Ints
from stacktok.kernels.transfer import upload
from stacktok.models.base import KeptTokens, ModelAdapter
from stacktok.runtime.cache import CacheState
from stacktok.runtime.capture import Capture, put_back
from stacktok.runtime.pixels import PixelTap
from stacktok.runtime.prompt import GenerateTap, HostPrompt, has_images
from stacktok.runtime.question import QuestionReader
from stacktok.runtime.run import PROMPT, Pruned
from stacktok.runtime.tower import TowerTap


@dataclass(eq=False)
class Call:
    """One forward pass of the base model, as far as it has come.

    Attributes
    ----------
    input_ids
        The tokens, (B, S); None where only embeddings are known.
    prompt
        The same in host memory; None where that has not been read.
    outputs
        Encoder outputs by modality.
    past
        Tokens that the cache holds already.
    state
        The meaning of a cache that was pruned before the language model.
    next_state
        The same after this pass.
    kept
        The tokens that are left of the prompt; None where all are.
    gapped
        Whether positions have gaps.
    plan, layers
        The cuts of a method inside the language model, and the meaning of a cache that it cut.
    """

    input_ids: torch.Tensor | None
    outputs: dict[str, Any]
    prompt: HostPrompt | None = None
    past: int = 0
    state: CacheState | None = None
    next_state: CacheState | None = None
    kept: KeptTokens | None = None
    gapped: bool = False
    plan: Any = None
    layers: Any = None

    @property
    def ids(self) -> Ints:
        """The tokens in host memory, (B, S); waits for a device where they were not read before the tower ran."""
        if self.input_ids is None:
            raise ValueError(
                "images given with inputs_embeds cannot be found in the prompt; pass input_ids together with the images"
            )
        if self.prompt is None:
            self.prompt = HostPrompt(self.input_ids.cpu().numpy(), None)
        return self.prompt.ids


class Pruning(ABC):
    """A method on a model while it is attached; `before` and `inside` are its two kinds.

    Parameters
    ----------
    method, model, processor, adapter
        Checked by `Attachment`.
    """

    def __init__(self, method: Any, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        self.model, self.adapter = model, adapter
        self.run = Pruned(method.budget)
        self.reader = QuestionReader(
            model,
            processor,
            adapter,
            getattr(method, "query_rows", "words"),
            keep_blanks=method.keeps_blank_rows,
        )
        tower = TowerTap(adapter, model, method.tower_signal) if method.reads_tower else None
        pixels = None if method.before is None else PixelTap(method.before, adapter, model, processor)
        self.capture = Capture(model, processor, adapter, tower, pixels, lambda: self.run.budget is None)
        self.depth = len(adapter.layers(model))
        config: Any = adapter.language_model(model).config
        kinds = getattr(config, "layer_types", None) or [""] * self.depth
        # Such layers keep a state in place of keys and values.
        self.recurrent = tuple(kinds[layer] == "linear_attention" for layer in range(self.depth))
        # The last layers may use the keys and values of earlier ones.
        own = self.depth - (getattr(config, "num_kv_shared_layers", None) or 0)
        self.caching = tuple(layer < own and not self.recurrent[layer] for layer in range(self.depth))
        self._names = tuple(inspect.signature(adapter.base(model).forward).parameters)
        self._local = threading.local()

    @abstractmethod
    def begin(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of the base model, by name; None leaves them as they are."""

    @abstractmethod
    def enter(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of the language model; None leaves them as they are."""

    @abstractmethod
    def leave(self, call: Call, output: Any) -> None:
        """Called with the language model's output."""

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set every hook; ``undo`` receives the functions that remove them."""
        base, language_model = self.adapter.base(self.model), self.adapter.language_model(self.model)
        self.capture.attach(undo, self._encoded)
        if hasattr(self.model, "generate"):
            undo.append(functools.partial(put_back, self.model, "generate", vars(self.model).get("generate")))
            vars(self.model)["generate"] = GenerateTap(self.model.generate, self._note_prompt)
        self.before_module(undo, self.model, self._take_labels)
        self.after_module(undo, self.model, self._add_loss)
        self.before_module(undo, base, self._begin)
        self.before_module(undo, language_model, self._enter)
        self.after_module(undo, language_model, self._leave)

    @staticmethod
    def before_module(undo: list[Callable[[], object]], module: nn.Module, hook: Callable[..., Any]) -> None:
        """Set a hook that runs before a module; a compiled model runs it between its graphs, not inside them."""
        uncompiled: Any = torch.compiler.disable
        undo.append(module.register_forward_pre_hook(uncompiled(hook), with_kwargs=True).remove)

    @staticmethod
    def after_module(undo: list[Callable[[], object]], module: nn.Module, hook: Callable[..., Any]) -> None:
        """Set a hook that runs after a module."""
        uncompiled: Any = torch.compiler.disable
        undo.append(module.register_forward_hook(uncompiled(hook), with_kwargs=True).remove)

    def join(self, other: Pruning) -> None:
        """Share run, capture and forward passes with another pruning of the same model, which sets the hooks."""
        self.run, self.capture, self._local = other.run, other.capture, other._local

    @property
    def call(self) -> Call | None:
        """The forward pass of this thread."""
        call: Call | None = getattr(self._local, "call", None)
        return call

    def queries(self, prompts: int | None) -> list[Any]:
        """The query of every prompt; of an unknown number of prompts those that occur."""
        query = self.run.query
        if not isinstance(query, (list, tuple)):
            return [query] * (prompts or 1)
        if prompts is not None and len(query) != prompts:
            raise ValueError(f"pruned.query has {len(query)} entries for {prompts} prompts; give one per prompt")
        return list(query)

    @property
    def asks_prompt(self) -> bool:
        """Whether any query is read from its prompt."""
        return any(query is PROMPT for query in self.queries(None))

    def refuse_another_question(self, input_ids: torch.Tensor) -> None:
        """Refuse to continue a pruned cache with another user turn."""
        if any(self.reader.has_user_turn(row) for row in input_ids.tolist()):
            raise ValueError(
                "past_key_values holds an image that was pruned for another question; start without past_key_values, "
                "or set pruned.query (a text, embeddings or None) before the first question"
            )

    def _note_prompt(self, prompt: HostPrompt | None) -> None:
        self._local.prompt = prompt

    def _prompt(self, call: Call, kwargs: dict[str, Any]) -> HostPrompt | None:
        """The call's prompts in host memory, where they are known or can be read before the vision tower runs."""
        ids, mask = call.input_ids, kwargs.get("attention_mask")
        noted: HostPrompt | None = getattr(self._local, "prompt", None)
        if ids is None or not has_images(kwargs):
            return None
        if noted is not None and ids.shape[1] == noted.ids.shape[1] and len(ids) % len(noted.ids) == 0:
            return noted.repeated(len(ids), mask)
        return None if call.outputs else HostPrompt.read(ids, mask)

    def _encoded(self, modality: str, output: Any) -> None:
        if self.call is not None:
            self.call.outputs[modality] = output

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        given = kwargs.get("mm_encoder_outputs") or {}
        outputs = {m: given[m] for m in self.adapter.modalities if given.get(m) is not None}
        self._local.call = call = Call(kwargs.get("input_ids"), outputs)
        call.prompt = None if self.run.budget is None else self._prompt(call, kwargs)
        changed = self.begin(call, kwargs)
        return None if changed is None else ((), changed)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.call is None:
            return None
        if self.call.outputs or not self.call.past:
            self.run.kept_positions = None
        changed = self.enter(self.call, kwargs)
        return None if changed is None else (args, changed)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.call is not None:
            self.leave(self.call, output)

    def _take_labels(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hold labels back until it is known which tokens are left."""
        self._local.call = self._local.labels = None
        if kwargs.get("labels") is None or self.run.budget is None:
            return None
        self._local.labels = kwargs["labels"]
        return args, {**kwargs, "labels": None}

    def _add_loss(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The loss over the tokens that are left."""
        labels: torch.Tensor | None = self._local.labels
        call = self.call
        self._local.call = self._local.labels = None
        if labels is None:
            return None
        if call is not None and call.kept is not None:
            kept = upload(call.kept.valid, labels.device)
            # The first token of a row is predicted from padding, which says nothing.
            told = kept & kept.roll(1, dims=1)
            labels = call.kept.gather(labels).masked_fill(~told, -100)
        named = inspect.signature(module.forward).parameters
        extra = {name: value for name, value in kwargs.items() if name not in named}
        logits = output.logits if hasattr(output, "logits") else output[0]
        loss = module.loss_function(
            logits=logits, labels=labels, vocab_size=module.config.get_text_config().vocab_size, **extra
        )
        if isinstance(output, tuple):
            return (loss, *output)
        return type(output)(**{**output, "loss": loss})
