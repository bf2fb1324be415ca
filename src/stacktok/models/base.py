"""The adapter of a model family, for transformers and vLLM alike.

An adapter knows three things about a family. `layout`: how many tokens a picture of some size fills, in which crops and
grids, and which of them may be kept; no tensor is needed. `features`: where transformers' encoder output holds the
features before and after the projector. `shorten`: what else runs along the sequence and must lose the same tokens.
Hooks, compaction, positions, masks and caches are the runtime's and the same for all families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import nn

from stacktok.core.attention import received_attention, row_attention
from stacktok.core.tokens import EncodedImage, ImageLayout, TowerAttention
from stacktok.kernels.transfer import upload
from stacktok.models.partial import PartialTower
from stacktok.models.query import content_words

Features = tuple[torch.Tensor, torch.Tensor]
"""Pre- and post-projector features of all tokens of one image, (n, d_v) and (n, d), crop after crop."""


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """One call of ``get_{modality}_features`` of a transformers model.

    Attributes
    ----------
    modality
        "image" or "video".
    output
        The returned object.
    units
        The embeddings that it puts into the prompt, (tokens, d) each, from `ModelAdapter.units`; beam search later
        repeats those of the output itself.
    arguments
        The call's arguments by name; empty where the caller kept only the output.
    model, processor
        The user's.
    """

    modality: str
    output: Any
    units: Sequence[torch.Tensor]
    arguments: Mapping[str, Any]
    model: Any
    processor: Any = None

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config


@dataclass(eq=False)
class TowerReading:
    """The attention of one layer of the vision tower, read while it ran.

    Attributes
    ----------
    scores
        Attention received by the tokens of every sequence that the layer attended over, CLS left out, (s,) each.
    keys
        Their keys, mean over heads, (s, d_k) each.
    has_cls
        Whether those sequences begin with CLS.
    early
        The same of the second layer that a method reads; None where it reads one.
    """

    scores: list[torch.Tensor]
    keys: list[torch.Tensor]
    has_cls: bool
    early: TowerReading | None = None

    def add(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float,
        allowed: torch.Tensor | None = None,
        *,
        by_cls: bool,
        joined: bool = False,
    ) -> None:
        """Read one sequence.

        Parameters
        ----------
        query, key
            (H, s, d) and (H_kv, s, d), CLS first where there is one.
        scaling
            Factor of the logits.
        allowed
            Which tokens each token sees, (s, s): padding is seen by none, images of a packed sequence see themselves
            alone. None where all see all.
        by_cls
            Score tokens by the attention of CLS, in place of that of all tokens.
        joined
            Take all heads as one, whose logits are divided by the root of its width.
        """
        if joined:
            query, key = (heads.transpose(0, 1).flatten(1)[None] for heads in (query, key))
            scaling = float(query.shape[-1]) ** -0.5
        first = 1 if self.has_cls else 0
        if by_cls:
            scores = row_attention(query[:, :1], key, scaling, None if allowed is None else allowed[:1])[:, 0].sum(0)
        elif allowed is None:
            scores = received_attention(query[:, first:], key, scaling)
        else:
            rows = allowed.any(0)
            rows[:first] = False
            scores = received_attention(query[:, rows], key, scaling, allowed[rows])
        self.scores.append(scores[first:])
        self.keys.append(key[:, first:].mean(0))


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Which tokens of an unpruned batch the language model gets.

    Attributes
    ----------
    indices
        Index in the unpruned sequence of every token of the pruned one, (B, L), 0 in padding; on the model's device.
    valid
        Which entries are not padding, (B, L); in host memory.
    merged
        Row and index of every token that was made of several, with their indices in the unpruned sequence, (s,).
    visual
        How many of them are an image's, over all rows; None where only the numbers tell.
    """

    indices: torch.Tensor
    valid: torch.Tensor
    merged: Sequence[tuple[int, int, torch.Tensor]] = ()
    visual: int | None = None

    @property
    def origin(self) -> torch.Tensor:
        """Index in the unpruned sequence, (B, L), -1 in padding."""
        return self.indices.masked_fill(upload(~self.valid, self.indices.device), -1)

    @property
    def ragged(self) -> bool:
        """Whether any sequence is padded."""
        return not bool(self.valid.all())

    def gather(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Values per token, with the batch (or 1) at ``dim - 1`` and the sequence at ``dim``, of the kept tokens."""
        dim = dim % values.ndim
        batch = dim - 1
        if values.shape[batch] != len(self.indices):
            shape = list(values.shape)
            shape[batch] = len(self.indices)
            values = values.expand(shape)
        index = _on(self.indices, values.device)
        view = [1] * values.ndim
        view[batch], view[dim] = index.shape
        shape = list(values.shape)
        shape[dim] = index.shape[1]
        return values.gather(dim, index.reshape(view).expand(shape))


def _on(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return upload(values, device) if values.device.type == "cpu" else values.to(device)


class ModelAdapter(ABC):
    """One model family: the class attributes that differ, `layout` and `features`.

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
    eligible_from_pixels
        Whether `layout` needs the pixels and the processor to tell which tokens may be kept.
    text_separators
        Whether the layout's separators are text tokens between the placeholders, not embeddings of the encoder.
    gathers_masks
        Whether the language model is given ready masks, in which image tokens see each other: they are gathered, since
        one that is built again would be causal.
    """

    family: ClassVar[str]
    modalities: ClassVar[Mapping[str, str]] = {"image": "image_token_id"}
    tau_query: ClassVar[float] = 0.02
    mrope: ClassVar[bool] = False
    eligible_from_pixels: ClassVar[bool] = False
    text_separators: ClassVar[bool] = False
    gathers_masks: ClassVar[bool] = False

    @abstractmethod
    def layout(self, config: Any, inputs: Mapping[str, Any], processor: Any = None) -> ImageLayout:
        """How one image fills the language model's input.

        Parameters
        ----------
        config
            The model's configuration.
        inputs
            The processor's output for this image, under the processor's own names (``image_sizes``,
            ``image_grid_thw``, ...).
        processor
            The user's, where it is known.
        """

    @abstractmethod
    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The features of every image of an encoder call, aligned with its layout's tokens.

        Parameters
        ----------
        call
            The call.
        layouts
            Of its images, in order.
        """

    def assemble(self, layout: ImageLayout, vision: torch.Tensor, projected: torch.Tensor) -> EncodedImage:
        """An image from its layout and features, (n, d_v) and (n, d)."""
        return EncodedImage.of(layout, vision.detach(), projected.detach(), self.tau_query)

    def shorten(self, kwargs: Mapping[str, Any], kept: KeptTokens) -> dict[str, Any]:
        """Arguments of the language model, beside embeddings, mask and positions, that must lose the same tokens.

        Parameters
        ----------
        kwargs
            The unpruned arguments.
        kept
            The tokens that stay.

        Returns
        -------
        dict
            The arguments that change; none unless a family says otherwise.
        """
        return {}

    def host_arguments(self, arguments: Mapping[str, Any], processor: Any = None) -> dict[str, Any]:
        """Arguments of an encoder call with what `layout` reads in host memory; all but pixels by default.

        Called before the encoder runs: afterwards, reading them from a device would wait for it.

        Parameters
        ----------
        arguments
            Of ``get_{modality}_features``, by name.
        processor
            The user's, where it is known.
        """
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) and not name.startswith("pixel") else value
            for name, value in arguments.items()
        }

    def units(self, output: Any, config: Any) -> Sequence[torch.Tensor]:
        """The embeddings that an encoder output puts into the prompt, (tokens, d) each, in order."""
        units: Sequence[torch.Tensor] = output.pooler_output
        return units

    def group(self, config: Any, ids: Sequence[int], processor: Any = None) -> list[int] | None:
        """How many units of the encoder output each image of a prompt has; None where every unit is an image.

        Parameters
        ----------
        config
            The model's configuration.
        ids
            The prompt's token ids, placeholders included.
        processor
            The user's, where it is known.
        """
        return None

    def text_tokens(self, layout: ImageLayout) -> int:
        """Tokens of a layout that are text of the prompt."""
        return len(layout.separators) if self.text_separators else 0

    def encode(
        self, call: EncoderCall, reading: TowerReading | None = None, groups: Sequence[int] | None = None
    ) -> list[EncodedImage]:
        """The images of an encoder call.

        Parameters
        ----------
        call
            The call.
        reading
            The tower's attention during the call, for methods that need it.
        groups
            Units of every image, as `group` found them; None where every unit is an image. `layout` finds the number
            of an image's units and of their tokens in its inputs under the names "units" and "tokens".
        """
        units = call.units
        groups = [1] * len(units) if groups is None else list(groups)
        if sum(groups) != len(units):
            raise ValueError(
                f"the prompts have placeholders for {sum(groups)} encoder inputs and the images make {len(units)}; "
                "give every prompt its own images"
            )
        ends = list(accumulate(groups))
        tokens = [sum(map(len, units[end - count : end])) for count, end in zip(groups, ends, strict=True)]
        layouts = []
        for index, (count, own) in enumerate(zip(groups, tokens, strict=True)):
            inputs = {**image_inputs(call.arguments, index, len(groups)), "units": count, "tokens": own}
            layouts.append(self.layout(call.config, inputs, call.processor))
        lengths = [layout.length - self.text_tokens(layout) for layout in layouts]
        if lengths != tokens:
            raise ValueError(
                f"the adapter of {self.family} lays images out in {lengths} tokens, the model in {tokens}; "
                "the two must agree"
            )
        features = self.features(call, layouts)
        images = [
            replace(self.assemble(layout, x, z), modality=call.modality)
            for layout, (x, z) in zip(layouts, features, strict=True)
        ]
        return images if reading is None else self.attend(images, reading, call)

    def attend(self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall) -> list[EncodedImage]:
        """The images of one encoder call, each with the tower's attention in all layers that were read."""
        found = self.add_attention(images, reading, call)
        if reading.early is None:
            return found
        early = self.add_attention(images, reading.early, call)
        return [image.with_early(other) for image, other in zip(found, early, strict=True)]

    def tower_attention(self, model: Any) -> tuple[nn.Module, nn.Module, bool]:
        """The vision tower, the attention module in it that ranks tokens, and whether its first token is CLS."""
        raise ValueError(
            f"the vision tower's attention cannot be read on {self.family}; its adapter has no tower_attention, so use "
            "a method that needs no attention"
        )

    def tower_layer(self, config: Any, layer: int) -> int:
        """The layer of the vision tower to read for one that a method names: itself where it sees the whole image."""
        return layer

    def add_attention(
        self, images: Sequence[EncodedImage], reading: TowerReading, call: EncoderCall
    ) -> list[EncodedImage]:
        """The images of one encoder call, each with the tower's attention in one layer.

        Parameters
        ----------
        images
            As `assemble` made them.
        reading
            Of the module that `tower_attention` names, during the call.
        call
            The call.
        """
        raise ValueError(f"the adapter of {self.family} reads the tower's attention but does not say whose it is")

    def partial_encoder(self, model: Any) -> nn.Module:
        """The vision tower, for a family in which it can be given a part of a picture's cells."""
        raise ValueError(
            f"{self.family} encodes pictures whole: no cell can be left out before its vision tower, which takes views "
            "of a fixed size or learned positions of a whole grid; prune after the tower, or use Qwen2-VL, Qwen2.5-VL, "
            "Qwen3-VL or Qwen3.5"
        )

    def cells(self, call_arguments: Mapping[str, Any], model: Any, modality: str) -> list[torch.Tensor]:
        """The picture's cells, one per token, as pixels: (frames, rows, columns, channels, values) per image.

        Parameters
        ----------
        call_arguments
            Arguments of ``get_{modality}_features``, by name.
        model
            The user's model.
        modality
            "image" or "video".
        """
        raise ValueError(f"the adapter of {self.family} does not say which pixels make a token")

    def partial_tower(self, model: Any, grid: torch.Tensor, kept: torch.Tensor, source: torch.Tensor) -> PartialTower:
        """The tower on a part of the cells.

        Parameters
        ----------
        model
            The user's model.
        grid
            Temporal patches, rows and columns of patches of every image, (images, 3).
        kept, source
            As in `PartialTower`.
        """
        raise ValueError(f"the adapter of {self.family} does not say how its vision tower takes a part of a picture")

    def base(self, model: Any) -> nn.Module:
        """The module that embeds the prompt, puts the image features in and calls the language model."""
        return model.model  # type: ignore[no-any-return]

    def language_model(self, model: Any) -> nn.Module:
        """The decoder stack."""
        return self.base(model).language_model  # type: ignore[return-value]

    def layers(self, model: Any) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return self.language_model(model).layers  # type: ignore[return-value]

    def ranking_attention(self, model: Any, layer: int) -> nn.Module:
        """The attention module of a decoder layer, for a method that drops tokens after that layer.

        A ValueError says why no token can be dropped there, and where it can.
        """
        return self.layers(model)[layer].self_attn  # type: ignore[return-value]

    def user_text(self, turn: str) -> str:
        """The user's own text in a user turn: without what the processor writes around images and frames.

        Parameters
        ----------
        turn
            Decoded, special tokens included, placeholders left out.
        """
        return turn

    def query_words(self, text: str) -> list[str]:
        """Words of a user's text that become query rows; content words unless the family says otherwise."""
        return content_words(text)


def image_inputs(arguments: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """The inputs of one image of ``count``: its entry of those that have one per image, and plain settings."""
    found = {}
    for name, value in arguments.items():
        if not isinstance(value, (torch.Tensor, list, tuple)):
            found[name] = value
        elif len(value) == count:
            found[name] = value[index]
    return found


def split_attention(images: Sequence[EncodedImage], scores: torch.Tensor, keys: torch.Tensor) -> list[EncodedImage]:
    """Images with scores, (sum n,), and keys, (sum n, d_k), of all their tokens in order; without CLS."""
    sizes = [crop.n for image in images for crop in image.crops]
    crops = map(TowerAttention, torch.split(scores, sizes), torch.split(keys, sizes))
    return [image.with_attention([next(crops) for _ in image.crops]) for image in images]
