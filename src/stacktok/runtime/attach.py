"""Attaching a method to a model: hooks on this model object alone, all of them gone on exit."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stacktok.models.base import ModelAdapter
from stacktok.models.registry import adapter_for
from stacktok.runtime.before import BeforePruning
from stacktok.runtime.capture import EncoderTap
from stacktok.runtime.inside import InsidePruning
from stacktok.runtime.run import Pruned

if TYPE_CHECKING:
    from stacktok.methods.base import Method


class Attachment:
    """A method on a model, as a context manager; made by calling a method.

    Entering checks the model, sets the hooks and returns a `Pruned`; leaving, by exception too, takes them away.

    Parameters
    ----------
    method, model, processor, adapter
        As in `Method.__call__`.
    """

    def __init__(self, method: Method, model: Any, processor: Any, adapter: ModelAdapter | None = None) -> None:
        # torch.compile wraps a model in a module that passes attributes through; hooks belong on the model inside.
        self.model = getattr(model, "_orig_mod", model)
        self.method, self.processor = method, processor
        self.adapter = adapter if adapter is not None else adapter_for(self.model)
        head = getattr(self.model, "get_output_embeddings", None)
        if head is not None and not hasattr(self.model, "lm_head") and head() is None:
            raise TypeError(
                f"model is a {type(self.model).__name__}, which has no language-model head and cannot generate; give "
                "the model that AutoModelForImageTextToText loads"
            )
        if processor is not None and getattr(processor, "tokenizer", None) is None:
            raise TypeError(
                f"processor has type {type(processor).__name__} and no tokenizer; give the model's AutoProcessor"
            )
        if method.stage not in ("picture", "before", "inside"):
            raise ValueError(
                f"{type(method).__name__} works at stage {method.stage!r}, which this runtime does not know"
            )
        if self.adapter.mrope and method.positions == "compact":
            raise ValueError(
                f"positions='compact' is not defined for {self.adapter.family}, whose positions are (t, h, w); "
                "use 'kept' or None"
            )
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Pruned:
        taps = vars(self.adapter.base(self.model)).values()
        if any(isinstance(tap, EncoderTap) for tap in taps):
            raise ValueError(
                f"this {type(self.model).__name__} is already being pruned; leave the first with block before another"
            )
        kind: Any = InsidePruning if self.method.stage == "inside" else BeforePruning
        pruning = kind(self.method, self.model, self.processor, self.adapter)
        try:
            pruning.attach(self._undo)
        except BaseException:
            self._detach()
            raise
        run: Pruned = pruning.run
        return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._detach()

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
