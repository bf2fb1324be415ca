"""Floating-point operations of the stages, counted from the shapes: what a speed-up could be at best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stacktok.models.base import ModelAdapter


@dataclass(frozen=True)
class Work:
    """Multiplications and additions.

    Attributes
    ----------
    vision, prefill, decode
        Encoder and projector; the language model on the prompt; on all further tokens together.
    """

    vision: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """All stages; selection counts as nothing, which is the ideal."""
        return self.vision + self.prefill + self.decode


def language_work(layer_weights: int, width: int, layers: int, columns: int, past: int = 0) -> float:
    """A causal language model on ``columns`` new tokens after ``past`` ones.

    Every weight of a layer multiplies every token once (2 operations); attention takes, per layer, 4 operations per
    pair of a token and one that it sees, times the width.
    """
    pairs = columns * past + columns * (columns + 1) / 2
    return 2.0 * layer_weights * columns + 4.0 * layers * width * pairs


def work_of(model: Any, adapter: ModelAdapter, inputs: Any, columns: int | Sequence[int], new_tokens: int) -> Work:
    """The work of one `generate` call whose prompt has ``columns`` columns in the language model.

    Parameters
    ----------
    model, adapter
        The model and its adapter.
    inputs
        Its inputs, one prompt.
    columns
        Columns of the prompt after pruning; one number per layer where the layers differ.
    new_tokens
        Tokens generated.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    used = config.num_experts_per_tok / count if count else 1.0
    weights = [_matrices(layer, used) for layer in adapter.layers(model)]
    width = config.num_attention_heads * _head(config)
    kinds = getattr(config, "layer_types", None) or [""] * len(weights)
    # A recurrent layer's state does not grow with the sequence.
    widths = [0 if kind == "linear_attention" else width for kind in kinds]
    lengths = [columns] * len(weights) if isinstance(columns, int) else columns
    layers = list(zip(weights, widths, lengths, strict=True))
    head = model.get_output_embeddings().weight.numel()
    steps = (
        sum(language_work(own, wide, 1, 1, length + step) for own, wide, length in layers) + 2 * head
        for step in range(new_tokens - 1)
    )
    return Work(
        vision=vision_work(model, adapter, inputs),
        prefill=sum(language_work(own, wide, 1, length) for own, wide, length in layers) + 2 * head,
        decode=sum(steps),
    )


def vision_work(model: Any, adapter: ModelAdapter, inputs: Any) -> float:
    """Encoder and projector: weights times patches, and attention over each view."""
    config = model.config.vision_config
    base, language_model = adapter.base(model), adapter.language_model(model)
    weights = sum(_matrices(child) for child in base.children() if child is not language_model)
    views = _views(config, inputs)
    depth = getattr(config, "depth", None) or config.num_hidden_layers
    width = int(getattr(config, "embed_dim", None) or config.hidden_size)
    return sum(2.0 * weights * n + 4.0 * int(depth) * width * n * n for n in views)


def _views(config: Any, inputs: Any) -> list[int]:
    """Patches of every sequence that the tower attends over."""
    pixels = inputs["pixel_values"]
    if "image_grid_thw" in inputs:
        return [int(t * h * w) for t, h, w in inputs["image_grid_thw"].tolist()]
    if "image_position_ids" in inputs:
        return (inputs["image_position_ids"][..., 0] >= 0).sum(-1).flatten().tolist()  # type: ignore[no-any-return]
    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    if config.model_type == "pixtral":
        return [int(h // patch) * int(w // patch) for h, w in inputs["image_sizes"].tolist()]
    return [(pixels.shape[-2] // patch) * (pixels.shape[-1] // patch) + 1] * int(pixels.shape[:-3].numel())


def _matrices(module: nn.Module, experts: float = 1.0) -> int:
    """Numbers that a token is multiplied with, of experts the share that it goes to."""
    return sum(
        int(parameter.numel() * (experts if parameter.ndim == 3 and "experts" in name else 1.0))
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2
    )


def _head(config: Any) -> int:
    # Where layers differ in it, the first speaks for all.
    config = next(iter(getattr(config, "per_layer_config", None) or ()), config)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
