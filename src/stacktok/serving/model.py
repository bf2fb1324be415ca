"""The shared part of the pruned model classes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.models.base import Features, TowerReading, image_inputs
from stacktok.models.registry import adapter_for
from stacktok.serving.fields import FIELDS, ImageRequest, unpack
from stacktok.serving.pruner import Kept, Pruner, check_engine
from stacktok.serving.settings import KEY, Settings

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsMultiModal as Base
else:
    Base = object

# transformers 5 saves the tower's weights without the name of the module that vLLM has around them.
TOWER_NAMES = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)


class PrunedModel(Base):
    """Stands before a family's model class; a family says how to get its features."""

    # The adapters of a tower are told apart by the number of tokens that come out, which is another now.
    supports_tower_connector_lora = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = Settings.read(getattr(self.config, KEY, {}))
        self.pruner = Pruner(settings, log=vllm_config.parallel_config.rank == 0)
        # vLLM gathers images for a step by their pruned lengths, and profiled memory by unpruned ones.
        self._at_once = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self.adapter = adapter_for(self)
        check_engine(vllm_config, self.adapter.family, mrope=self.adapter.mrope, reads_tower=self.pruner.reads_tower)
        self.pruner.warm_up()

    def image_features(self, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]) -> list[Features]:
        """Features of some images of a batch, aligned with their layouts' tokens.

        Parameters
        ----------
        indices
            Which images.
        layouts
            Theirs.
        kwargs
            The batch.
        """
        raise NotImplementedError

    def add_attention(self, images: list[EncodedImage]) -> list[EncodedImage]:
        """The images that `image_features` encoded last, with the tower's attention where a method needs it."""
        return images

    def layouts(self, kwargs: dict[str, Any], asked: list[ImageRequest]) -> list[ImageLayout]:
        """The layout of every image of a batch."""
        count = len(asked)
        layouts = [self.adapter.layout(self.config, image_inputs(kwargs, index, count)) for index in range(count)]
        masks = [None if one.eligible is None else one.eligible.cpu().numpy() for one in asked]
        return [layout.with_eligible(mask) for layout, mask in zip(layouts, masks, strict=True)]

    def encode_images(
        self, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]
    ) -> list[EncodedImage]:
        """The encoder's output for some images of a batch."""
        own = [layouts[index] for index in indices]
        features = self.image_features(indices, own, kwargs)
        return self.add_attention(
            [self.adapter.assemble(layout, x, z) for layout, (x, z) in zip(own, features, strict=True)]
        )

    def embed_images(self, kwargs: dict[str, Any]) -> list[Kept] | None:
        """The pruned embeddings of a batch's images; None where the batch did not pass our processor."""
        asked = unpack(kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in FIELDS}
        if not asked:
            return None
        layouts = self.layouts(rest, asked)
        lengths = [layout.n for layout in layouts]
        return self.pruner.embed(
            asked,
            lambda indices: [
                image
                for group in grouped(indices, lengths, self._at_once)
                for image in self.encode_images(group, layouts, rest)
            ],
            self.get_language_model().embed_input_ids,
            next(self.get_language_model().parameters()).device,
            getattr(self, "image_newline", None),
        )

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """The rows of every image."""
        kept = self.embed_images(kwargs)
        if kept is None:
            return super().embed_multimodal(**kwargs)
        return tuple(one.rows for one in kept)


def grouped(indices: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices in groups whose lengths add up to no more than a capacity, or which are alone."""
    groups: list[list[int]] = []
    room = -1
    for index in indices:
        if lengths[index] > room:
            groups.append([])
            room = capacity
        groups[-1].append(index)
        room -= lengths[index]
    return groups


class AttentionReader:
    """Reads queries and keys of one attention module of a vision tower.

    Parameters
    ----------
    module
        vLLM's attention operator of the layer that is read.
    has_cls
        Whether sequences begin with CLS.
    signal
        Rows that are read, and how.
    early
        The operator of the second layer that is read; None for none.
    """

    def __init__(self, module: Any, has_cls: bool, signal: TowerSignal, early: Any = None) -> None:
        if signal.rows == "cls" and not has_cls:
            raise ValueError("signal='cls' needs a CLS token, which this vision tower does not have; use 'received'")
        self.has_cls, self.by_cls, self.joined = has_cls, has_cls and signal.rows != "received", signal.joined
        self.heads, self.scaling = module.num_heads, module.scale
        self._early = None if early is None else AttentionReader(early, has_cls, signal)
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key = args[:2] if args else (kwargs["query"], kwargs["key"])
        self._seen = (query, key)

    def take(self, lengths: list[int]) -> TowerReading:
        """The attention of the last run, cut into sequences of these lengths."""
        if self._seen is None:
            raise ValueError("the vision tower has not run")
        query, key = (seen.reshape(sum(lengths), self.heads, -1) for seen in self._seen)
        self._seen = None
        reading = TowerReading([], [], self.has_cls, None if self._early is None else self._early.take(lengths))
        for q, k in zip(torch.split(query, lengths), torch.split(key, lengths), strict=True):
            reading.add(q.transpose(0, 1), k.transpose(0, 1), self.scaling, by_cls=self.by_cls, joined=self.joined)
        return reading
