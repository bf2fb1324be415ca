"""The interfaces of methods: a frozen set of parameters that can be attached to a model.

A `FeatureMethod` works before the language model: encoded images in, reductions out. A method that works inside the
language model is another subclass of `Method`; the runtime asks a method for its stage, not for its name.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from stacktok.core.attention import TowerSignal
from stacktok.core.budget import Budget, Coverage, budget_share, check_budget
from stacktok.core.tokens import DeviceReduction, EncodedImage, KeptOnDevice, Reduction, device_reductions
from stacktok.methods.info import MethodInfo

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from stacktok.methods.pixel_method import PixelMethod
    from stacktok.models.base import ModelAdapter
    from stacktok.runtime.attach import Attachment

Positions = Literal["compact", "kept"]


@dataclass(frozen=True)
class Method(ABC):
    """A way to prune visual tokens; it holds parameters and no state.

    Parameters
    ----------
    budget
        Tokens to keep per image: a count, a fraction in (0, 1], a percentage such as "20%"; where the
        method adapts, also a `Coverage`. None bypasses everything.
    positions
        "compact" numbers the pruned sequence from 0, "kept" leaves every token its original position; None follows the
        model family: compact for Llama-type language models, kept for M-RoPE.
    before
        A method that works before the vision tower, such as ``PixelPrune()`` or its name; None for none.

    Attributes
    ----------
    stage
        "before" or "inside" the language model.
    query_aware
        Whether the question has a say in what is kept.
    merges
        Whether output tokens may be made of several tokens.
    reads_tower
        Whether it needs the vision tower's attention, `EncodedCrop.attention`.
    keeps_blank_rows
        Whether tokens of a question's word that are nothing but a space are query rows too.
    info
        What tables say about it.
    adapts
        Whether the budget may be a `Coverage`.
    revision
        Raised when results change under the same parameters, so that evaluations of older ones are run again.
    """

    stage: ClassVar[str]
    query_aware: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    reads_tower: ClassVar[bool] = False
    keeps_blank_rows: ClassVar[bool] = False
    info: ClassVar[MethodInfo] = MethodInfo(name="unnamed", paper="")
    revision: ClassVar[int] = 1
    adapts: ClassVar[bool] = False

    budget: Budget | None = None
    positions: Positions | None = None
    before: PixelMethod | None = None

    def __post_init__(self) -> None:
        first: object = self.budget
        if isinstance(first, torch.nn.Module):
            raise TypeError(
                f"budget is a model ({type(first).__name__}); give the parameters first and then the model, as in "
                f"{type(self).__name__}(budget=64)(model, processor)"
            )
        if self.budget is not None:
            check_budget(self.budget)
            if not self.adapts and Coverage.of(self.budget) is not None:
                budget_share(self.budget)
        if self.positions not in (None, "compact", "kept"):
            raise ValueError(f"positions={self.positions!r} is not known; use 'compact', 'kept' or None")
        given: object = self.before
        if isinstance(given, str):
            # Names are known to the registry, which knows this class.
            from stacktok.methods.registry import pixel_method

            object.__setattr__(self, "before", pixel_method(given))
        elif self.before is not None and getattr(self.before, "stage", None) != "tower":
            raise TypeError(
                f"before={self.before!r} is not a method that works before the vision tower; give such as PixelPrune()"
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The method in a settings file, if it is one of this class; see `stacktok.methods.load`."""
        from stacktok.methods.settings import load

        found = load(path)
        if not isinstance(found, cls):
            raise ValueError(
                f"settings {path} is for {type(found).__name__}, not {cls.__name__}; use stacktok.methods.load"
            )
        return found

    def __call__(self, model: Any, processor: Any, *, adapter: ModelAdapter | None = None) -> Attachment:
        """Attach to a transformers model, as a context manager: ``with StackTok(budget=64)(model, processor): ...``.

        Parameters
        ----------
        model
            A loaded vision-language model.
        processor
            Its processor, whose tokenizer and chat template read the query from the prompt; None where every query is
            given as embeddings or None.
        adapter
            How to talk to a model family that is not registered; see ``docs/add-a-model.md``.
        """
        # The one import that points up: calling a method is the way into the runtime.
        from stacktok.runtime.attach import Attachment

        return Attachment(self, model, processor, adapter)


class Prepared(ABC):
    """An image with everything done that no question changes. Threads may share it.

    Attributes
    ----------
    image
        The encoded image.
    """

    def __init__(self, image: EncodedImage) -> None:
        self.image = image

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it holds beyond the image's own features."""

    @abstractmethod
    def reduce(self, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Reduce the image for one question.

        Parameters
        ----------
        query
            Input embeddings of the query's tokens, (m, d), on the image's device; None or m = 0 for no query.
        budget
            Tokens to keep.
        """

    def on_device(self, budget: Budget) -> bool:
        """Whether a budget is decided on the image's device, where nothing waits for it; on the host by default."""
        return False

    @classmethod
    def keep_on_device(cls, questions: Sequence[Asked]) -> list[KeptOnDevice]:
        """Decide questions to images of this class, of which `on_device` is true, all of them in one launch."""
        raise NotImplementedError


class Asked(NamedTuple):
    """A question to an image that a method prepared; the other parts are the arguments of `Prepared.reduce`."""

    prepared: Any
    query: torch.Tensor | None
    budget: Budget


def reduce_on_device(questions: Sequence[Asked]) -> list[DeviceReduction]:
    """Reduce several images of one method, of which `Prepared.on_device` is true."""
    kept = type(questions[0].prepared).keep_on_device(questions)
    return device_reductions([one.prepared.image.layout for one in questions], kept)


@dataclass(frozen=True)
class FeatureMethod(Method):
    """A method that reduces encoded images before the language model sees them.

    Parameters
    ----------
    share_budget
        Several images of a prompt share one budget, in place of one budget each.
    keep_newlines
        Keep the layout's separators of every line that still has tokens, on top of the budget (LLaVA-NeXT).
    query_rows
        The rows of a question that is read from the prompt: "words" embeds every word by itself, as published;
        "prompt" takes the words' tokens as they stand in the prompt.
    """

    stage = "before"

    share_budget: bool = False
    keep_newlines: bool = False
    query_rows: Literal["words", "prompt"] = "words"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_rows not in ("words", "prompt"):
            raise ValueError(f"query_rows={self.query_rows!r} is not known; use 'words' or 'prompt'")
        for name in ("share_budget", "keep_newlines"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not a bool; give True or False")

    @property
    def tower_signal(self) -> TowerSignal:
        """Which attention of the vision tower is read by a method that reads it."""
        return TowerSignal()

    @abstractmethod
    def prepare(self, image: EncodedImage) -> Prepared:
        """Do everything about an image that no question changes; each question then is a call of `Prepared.reduce`."""

    def reduce(self, image: EncodedImage, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Reduce one image for one question; see `Prepared.reduce`."""
        return self.prepare(image).reduce(query, budget)

    def reduce_shared(
        self, prepared: Sequence[Prepared], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Reduce the images of one prompt under one budget; only called where ``share_budget`` is set."""
        raise ValueError(f"{type(self).__name__} cannot share a budget between images; leave share_budget=False")

    def reduce_prompt(
        self, prepared: Sequence[Prepared], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Reduce all images of one prompt, timed."""
        begin = time.perf_counter()
        if self.share_budget and len(prepared) > 1:
            reductions = self.reduce_shared(prepared, query, budget)
            seconds = (time.perf_counter() - begin) / len(prepared)
            return [reduction.timed(seconds) for reduction in reductions]
        return self.reduce_batch([Asked(image, query, budget) for image in prepared])

    def reduce_batch(self, questions: Sequence[Asked]) -> list[Reduction]:
        """Answer questions to images that this method prepared, each by itself, timed.

        Those that are decided on a device are decided together, in one launch per kernel; their time is that until the
        work is queued.
        """
        found: dict[int, Reduction] = {}
        queued = [i for i, one in enumerate(questions) if one.prepared.on_device(one.budget)]
        begin = time.perf_counter()
        if queued:
            reductions = reduce_on_device([questions[i] for i in queued])
            seconds = (time.perf_counter() - begin) / len(queued)
            found = {i: reduction.timed(seconds) for i, reduction in zip(queued, reductions, strict=True)}
        for i, one in enumerate(questions):
            if i not in found:
                begin = time.perf_counter()
                reduction = one.prepared.reduce(one.query, one.budget)
                found[i] = reduction.timed(time.perf_counter() - begin)
        return [found[i] for i in range(len(questions))]
