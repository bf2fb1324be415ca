"""The shared part of the pruned model classes.

A family's class names the module whose features are selected by, and the call of vLLM's own that encodes some images;
its adapter, the same as in transformers, makes the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from stacktok.core.attention import TowerSignal
from stacktok.core.tokens import EncodedImage, ImageLayout
from stacktok.kernels.transfer import upload
from stacktok.models.base import EncoderCall, Features, TowerReading
from stacktok.models.registry import adapter_for
from stacktok.serving.fields import ImageRequest, modality_of, unpack, without_fields
from stacktok.serving.inputs import item_inputs
from stacktok.serving.pruner import Kept, Pruner, check_engine
from stacktok.serving.settings import KEY, Settings
from stacktok.serving.text import bare, with_text

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsMultiModal as Base
else:
    Base = object

# transformers 5 saves the tower's weights without the name of the module that vLLM has around them.
TOWER_NAMES = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)


class PrunedModel(Base):
    """Stands before a family's model class; a family says where its features are.

    Attributes
    ----------
    tapped
        Path and side ("input" or "output") of the module whose features are selected by; None where the class runs
        the tower itself.
    flat
        Inputs that hold the rows of all items one after the other.
    attention
        Paths of the tower's layers and of a layer's attention operator, and whether sequences begin with CLS; None
        where the class finds the operator itself.
    """

    # The adapters of a tower are told apart by the number of tokens that come out, which is another now.
    supports_tower_connector_lora = False
    # That path would skip the selector: it hands the encoder's output to vLLM past embed_multimodal.
    supports_encoder_cudagraph = False

    tapped: ClassVar[tuple[str, str] | None] = ("vision_tower", "output")
    flat: ClassVar[tuple[str, ...]] = ()
    attention: ClassVar[tuple[str, str, bool] | None] = None

    reader: AttentionReader | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        settings = Settings.read(getattr(self.config, KEY, {}))
        self.pruner = Pruner(settings, log=vllm_config.parallel_config.rank == 0)
        # vLLM gathers images for a step by their pruned lengths, and profiled memory by unpruned ones.
        self._at_once = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self.adapter = adapter_for(self)
        hooked = self.tapped is not None or self.pruner.reads_tower
        check_engine(
            vllm_config,
            self.adapter.family,
            mrope=self.adapter.mrope,
            reads_tower=self.pruner.reads_tower,
            hooked=hooked,
        )
        self.check_config()
        if self.tapped is not None:
            self.tap = FeatureTap(self.get_submodule(self.tapped[0]), self.tapped[1])
        self._call: EncoderCall | None = None
        if self.pruner.reads_tower:
            self.reader = self.attention_reader()
        self.pruner.warm_up()

    def check_config(self) -> None:
        """Refuse a model's configuration that vLLM reads otherwise than transformers."""

    def attention_reader(self) -> AttentionReader:
        """Reads the tower's attention, for methods that need it: of the last layer that vLLM builds."""
        if self.attention is None:
            raise ValueError(
                f"{type(self.pruner.method).__name__} reads the vision tower's attention, which is not read in vLLM's "
                f"{self.adapter.family}; use a method that needs no attention, such as 'stacktok'"
            )
        path, operator, has_cls = self.attention
        # vLLM builds the layers up to the one that feeds the projector.
        layers: Any = self.get_submodule(path)
        signal = self.pruner.method.tower_signal
        early = signal.early_layer(self.config.vision_config.num_hidden_layers)
        second = None if early is None else layers[early].get_submodule(operator)
        return AttentionReader(layers[-1].get_submodule(operator), has_cls, signal, second)

    def rows_of(self, modality: str, kwargs: Mapping[str, Any]) -> list[int]:
        """Rows of every item in the `flat` inputs."""
        name = "num_patches" if "num_patches" in kwargs else f"{modality}_num_patches"
        return [int(count) for count in kwargs[name]]

    def chosen(self, modality: str, indices: Sequence[int], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of some items of a batch."""
        found: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in self.flat:
                parts = torch.split(value, self.rows_of(modality, kwargs))
                found[name] = torch.cat([parts[index] for index in indices])
            elif isinstance(value, torch.Tensor) and value.ndim:
                found[name] = value[list(indices)]
            elif isinstance(value, (list, tuple)):
                found[name] = [value[index] for index in indices]
            else:
                found[name] = value
        return found

    def run_encoder(self, modality: str, inputs: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Embeddings of some items by vLLM's own class, (tokens, d) each, or (tiles, tokens, d)."""
        parse = getattr(self, f"_parse_and_validate_{modality}_input")
        units: Sequence[torch.Tensor] = getattr(self, f"_process_{modality}_input")(parse(**inputs))
        return units

    def states(self) -> torch.Tensor:
        """The tower's features in the shape that transformers gives them."""
        return self.tap.take()

    def item_features(
        self, modality: str, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]
    ) -> list[Features]:
        """Features of some items of a batch, aligned with their layouts' tokens.

        Parameters
        ----------
        modality
            "image" or "video".
        indices
            Which items.
        layouts
            Theirs.
        kwargs
            The batch.
        """
        inputs = self.chosen(modality, indices, kwargs)
        units = self.run_encoder(modality, inputs)
        states = self.states()
        seen = SimpleNamespace(last_hidden_state=states, hidden_states=OneLayer(states))
        self._call = EncoderCall(modality, seen, units, inputs, SimpleNamespace(config=self.config, model=self))
        return self.adapter.features(self._call, layouts)

    def sequence_lengths(self, call: EncoderCall) -> list[int]:
        """Lengths of the sequences that the tower attended over in a call: one per view or tile."""
        states = call.output.last_hidden_state
        return [states.shape[1]] * len(states)

    def add_attention(self, images: list[EncodedImage]) -> list[EncodedImage]:
        """The items that `item_features` encoded last, with the tower's attention where a method needs it."""
        call, self._call = self._call, None
        if self.reader is None or call is None:
            return images
        return self.adapter.attend(images, self.read_attention(call), call)

    def read_attention(self, call: EncoderCall) -> TowerReading:
        """The attention that was read in a call."""
        if self.reader is None:
            raise ValueError("no attention was read; prepare the model with a method that reads the vision tower")
        return self.reader.take(self.sequence_lengths(call))

    def layouts(self, modality: str, kwargs: dict[str, Any], asked: list[ImageRequest]) -> list[ImageLayout]:
        """The layout of every item of a batch."""
        count = len(asked)
        found = []
        for index, one in enumerate(asked):
            layout = self.adapter.layout(self.config, item_inputs(kwargs, index, count, modality))
            layout = bare(layout) if self.adapter.text_separators else layout
            found.append(layout.with_eligible(None if one.eligible is None else one.eligible.cpu().numpy()))
        return found

    def encode_items(
        self, modality: str, indices: list[int], layouts: list[ImageLayout], kwargs: dict[str, Any]
    ) -> list[EncodedImage]:
        """The encoder's output for some items of a batch."""
        own = [layouts[index] for index in indices]
        features = self.item_features(modality, indices, own, kwargs)
        width = self.config.get_text_config().hidden_size
        images = []
        for layout, (x, z) in zip(own, features, strict=True):
            image = replace(self.adapter.assemble(layout, x, z[:, :width]), modality=modality)
            # What a family's class appends to an embedding (DeepStack) follows its token.
            images.append(image if z.shape[-1] == width else replace(image, further=z[:, width:].detach()))
        return self.add_attention(images)

    def embed_items(self, kwargs: dict[str, Any]) -> list[Kept] | None:
        """The pruned embeddings of the items of a batch; None where the batch did not pass our processor."""
        modality, asked = modality_of(kwargs), unpack(kwargs)
        if modality is None:
            return None
        rest = without_fields(kwargs)
        layouts = self.layouts(modality, rest, asked)
        lengths = [layout.n for layout in layouts]
        embed_ids = self.get_language_model().embed_input_ids
        device = next(self.get_language_model().parameters()).device
        kept = self.pruner.embed(
            asked,
            lambda indices: [
                image
                for group in grouped(indices, lengths, self._at_once)
                for image in self.encode_items(modality, group, layouts, rest)
            ],
            embed_ids,
            device,
            getattr(self, "image_newline", None),
        )
        return [
            one if ask.text is None else with_text(one, ask.text, embed_ids(upload(ask.text[0], device)))
            for one, ask in zip(kept, asked, strict=True)
        ]

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """The rows of every item."""
        kept = self.embed_items(kwargs)
        if kept is None:
            return super().embed_multimodal(**kwargs)
        return tuple(one.rows for one in kept)


class OneLayer:
    """Stands for the hidden states of a tower that gives the chosen layer's alone: every index is that layer."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.states


class FeatureTap:
    """Notes what a module was given, or gave back, last.

    Parameters
    ----------
    module
        The module.
    side
        "input" or "output".
    """

    def __init__(self, module: nn.Module, side: str) -> None:
        self._seen: torch.Tensor | None = None
        if side == "input":
            module.register_forward_pre_hook(lambda module, args: self._note(args[0]))
        else:
            module.register_forward_hook(lambda module, args, output: self._note(output))

    def _note(self, value: Any) -> None:
        self._seen = torch.cat(list(value)) if isinstance(value, (list, tuple)) else value

    def take(self) -> torch.Tensor:
        """The noted features, once."""
        seen, self._seen = self._seen, None
        if seen is None:
            raise ValueError("the vision tower did not run, so there are no features to select by")
        return seen


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
