"""What every method is: a frozen bag of parameters that can be attached to a model.

`FeatureMethod` is the stage before the language model: encoded images in, reductions out. A method that works inside
the language model is another subclass of `Method`; the runtime asks a method for its stage, not for its name.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from stacktok.core.budget import Budget, budget_share
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.methods.facts import Facts

if TYPE_CHECKING:
    from stacktok.models.base import ModelAdapter
    from stacktok.runtime.attach import Attachment

Positions = Literal["compact", "kept"]


@dataclass(frozen=True)
class Method(ABC):
    """A way to prune visual tokens; it holds parameters and no state.

    Parameters
    ----------
    budget
        Tokens to keep per image: a count, a fraction in (0, 1], a percentage such as "20%"; None bypasses everything.
    positions
        "compact" numbers the pruned sequence from 0, "kept" leaves every token its original position; None follows the
        model family: compact for Llama-type language models, kept for M-RoPE.
    """

    stage: ClassVar[str]
    facts: ClassVar[Facts] = Facts(name="unnamed", paper="", query_aware=False)

    budget: Budget | None = None
    positions: Positions | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            budget_share(self.budget)
        if self.positions not in (None, "compact", "kept"):
            raise ValueError(f"positions={self.positions!r} is not known; use 'compact', 'kept' or None")

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
        from stacktok.runtime.attach import Attachment

        return Attachment(self, model, processor, adapter)


@dataclass(frozen=True)
class FeatureMethod(Method):
    """A method that reduces encoded images before the language model sees them.

    Parameters
    ----------
    share_budget
        Several images of a prompt share one budget, in place of one budget each.
    keep_newlines
        Keep the layout's separators of every line that still has tokens, on top of the budget (LLaVA-NeXT).
    """

    stage = "before"

    share_budget: bool = False
    keep_newlines: bool = False

    @abstractmethod
    def reduce(self, image: EncodedImage, query: torch.Tensor | None, budget: Budget) -> Reduction:
        """Reduce one image.

        Parameters
        ----------
        image
            The encoded image.
        query
            Input embeddings of the query's tokens, (m, d), on the image's device; None or m = 0 for no query.
        budget
            Tokens to keep.
        """

    def reduce_shared(
        self, images: Sequence[EncodedImage], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Reduce the images of one prompt under one budget; only called where ``share_budget`` is set."""
        raise ValueError(f"{type(self).__name__} cannot share a budget between images; leave share_budget=False")

    def reduce_prompt(
        self, images: Sequence[EncodedImage], query: torch.Tensor | None, budget: Budget
    ) -> list[Reduction]:
        """Reduce all images of one prompt, timed."""
        begin = time.perf_counter()
        if self.share_budget and len(images) > 1:
            reductions = self.reduce_shared(images, query, budget)
            seconds = (time.perf_counter() - begin) / len(images)
            return [reduction.timed(seconds) for reduction in reductions]
        reductions = []
        for image in images:
            reduction = self.reduce(image, query, budget)
            end = time.perf_counter()
            reductions.append(reduction.timed(end - begin))
            begin = end
        return reductions
