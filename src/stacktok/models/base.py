"""The adapter of a model family, and how one is found.

An adapter answers four questions about a family: where its language model is, which outputs of which encoder function
hold the image features, how those become an `EncodedImage`, and how a question becomes query words. Everything else
(hooks, compaction, positions, masks) is the runtime's and the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch import nn

from stacktok.core.attention import received_attention, row_attention
from stacktok.core.tokens import EncodedImage
from stacktok.models.query import content_words

GROUP = "stacktok.models"
"""Entry-point group: name = ``config.model_type``, value = a `ModelAdapter` subclass."""

BUILT_IN = {
    "llava": "stacktok.models.llava:LlavaAdapter",
    "llava_next": "stacktok.models.llava_next:LlavaNextAdapter",
    "qwen2_5_vl": "stacktok.models.qwen2_5_vl:Qwen2_5_VLAdapter",
}


@dataclass(eq=False)
class TowerReading:
    """What one layer of the vision tower showed while it ran.

    Attributes
    ----------
    scores
        Attention received by the tokens of every sequence that the layer attended over, CLS left out, (s,) each.
    keys
        Their keys, mean over heads, (s, d_k) each.
    has_cls
        Whether those sequences begin with CLS.
    """

    scores: list[torch.Tensor]
    keys: list[torch.Tensor]
    has_cls: bool

    def add(self, query: torch.Tensor, key: torch.Tensor, scaling: float, *, by_cls: bool) -> None:
        """Read one sequence.

        Parameters
        ----------
        query, key
            (H, s, d) and (H_kv, s, d), CLS first where there is one.
        scaling
            Factor of the logits.
        by_cls
            Score tokens by the attention of CLS, in place of that of all tokens.
        """
        first = 1 if self.has_cls else 0
        if by_cls:
            scores = row_attention(query[:, :1], key, scaling)[:, 0].sum(0)
        else:
            scores = received_attention(query[:, first:], key, scaling)
        self.scores.append(scores[first:])
        self.keys.append(key[:, first:].mean(0))


class ModelAdapter(ABC):
    """One model family. A new family sets the class attributes that differ and implements `encode`.

    Attributes
    ----------
    family
        Name for people.
    modalities
        Modality to the config attribute with its placeholder's token id; ``get_{modality}_features`` of the base model
        encodes it.
    tau_query
        Temperature of the query affinities that the method's paper uses on this family.
    mrope
        Whether positions are (t, h, w) triples, which a pruned sequence keeps.
    """

    family: ClassVar[str]
    modalities: ClassVar[Mapping[str, str]] = {"image": "image_token_id"}
    tau_query: ClassVar[float] = 0.02
    mrope: ClassVar[bool] = False

    @abstractmethod
    def encode(
        self, modality: str, output: Any, arguments: Mapping[str, Any], model: Any, processor: Any
    ) -> list[EncodedImage]:
        """The encoded images behind one call of ``get_{modality}_features``.

        Parameters
        ----------
        modality
            A key of `modalities`.
        output
            What the encoder function returned; ``pooler_output`` has one (rows, d) tensor per image.
        arguments
            What it was called with, by name; empty where the caller kept only the output.
        model, processor
            The user's.

        Returns
        -------
        list
            One per image; `EncodedImage.length` must be the number of rows in ``pooler_output``.
        """

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The vision tower, the attention module in it that ranks tokens, and whether its first token is CLS."""
        raise ValueError(
            f"the vision tower's attention cannot be read on {self.family}; its adapter has no tower_attention, so use "
            "a method that needs no attention"
        )

    def add_attention(
        self, images: list[EncodedImage], reading: TowerReading, output: Any, arguments: Mapping[str, Any], model: Any
    ) -> list[EncodedImage]:
        """The images of one call of `encode`, each crop with its `TowerAttention`.

        Parameters
        ----------
        images
            As `encode` made them.
        reading
            What the module of `tower_attention` showed during the call.
        output, arguments, model
            As in `encode`.
        """
        raise ValueError(f"the adapter of {self.family} reads the tower's attention but does not say whose it is")

    def base(self, model: Any) -> nn.Module:
        """The module that embeds the prompt, puts the image features in and calls the language model."""
        return model.model  # type: ignore[no-any-return]

    def language_model(self, model: Any) -> nn.Module:
        """The decoder stack."""
        return self.base(model).language_model  # type: ignore[return-value]

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return self.language_model(model).layers  # type: ignore[return-value]

    def query_words(self, text: str) -> list[str]:
        """Words of a user's text that become query rows; content words unless the family says otherwise."""
        return content_words(text)


def adapter_for(model: Any) -> ModelAdapter:
    """The adapter of a model, by ``config.model_type``; other packages register theirs as entry points."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if model_type in installed:
        found = installed[model_type].load()
    elif model_type in BUILT_IN:
        module, name = BUILT_IN[model_type].split(":")
        found = getattr(import_module(module), name)
    else:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        raise ValueError(
            f"no adapter for {type(model).__name__} (model_type {model_type!r}); supported are {known}; "
            "docs/add-a-model.md says how to add one"
        )
    adapter: ModelAdapter = found()
    return adapter


def supported() -> dict[str, str]:
    """Model types that can be pruned here, each with its family's name."""
    found: dict[str, Any] = {entry.name: entry.load() for entry in entry_points(group=GROUP)}
    for model_type, path in BUILT_IN.items():
        module, name = path.split(":")
        found.setdefault(model_type, getattr(import_module(module), name))
    return {model_type: adapter.family for model_type, adapter in sorted(found.items())}
