"""Deleting tokens by hand from what the stock language model receives.

Nothing of the runtime's compaction is used here: the unpruned prompt is recorded on its way into the stock language
model, rows are deleted by index, positions are counted again, and the language model runs on what is left in one pass
without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stacktok.models.base import ModelAdapter


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Arguments by name of every call of a module while the block lasts, after all hooks that were set before."""
    calls: list[dict[str, Any]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = {name: value for name, value in kwargs.items() if name != "past_key_values"}
        calls.append(kept if not args else {**kept, "input_ids": args[0]})

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


class StockPrompt:
    """One prompt as the stock language model receives it.

    Parameters
    ----------
    model
        The stock model, without hooks.
    adapter
        Names the model's parts.
    inputs
        Model inputs of one prompt, (1, S).
    keep_positions
        Whether tokens that are left keep their positions, in place of 0, 1, ...
    """

    def __init__(self, model: Any, adapter: ModelAdapter, inputs: Any, *, keep_positions: bool) -> None:
        self.model, self.adapter, self.keep_positions = model, adapter, keep_positions
        self.ids: list[int] = inputs["input_ids"][0].tolist()
        mask = inputs.get("attention_mask")
        self.real = [True] * len(self.ids) if mask is None else mask[0].bool().tolist()
        self.language_model = adapter.language_model(model)
        with torch.no_grad(), recorded(self.language_model) as calls:
            self.stock_logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
        self.seen = calls[0]

    def left(self, reductions: Sequence[tuple[Any, Any]]) -> list[int]:
        """Columns of the prompt that are left of it.

        Parameters
        ----------
        reductions
            The layout and the kept (crop, token) pairs of every image, in order.
        """
        image_token = getattr(self.model.config, self.adapter.modalities["image"])
        columns = [column for column, token in enumerate(self.ids) if token == image_token]
        dropped: set[int] = set()
        for layout, anchors in reductions:
            own = layout.length - self.adapter.text_tokens(layout)
            places, columns = columns[:own], columns[own:]
            if self.adapter.text_separators:
                # Words of the prompt stand between the image's rows, and go with them.
                places = list(range(places[0], places[0] + layout.length))
            kept = {places[offset] for offset in layout.offsets_of(anchors).tolist()}
            dropped.update(column for column in places if column not in kept)
        return [c for c in range(len(self.ids)) if self.real[c] and c not in dropped]

    def positions(self, left: Sequence[int], new: int = 0) -> torch.Tensor:
        """Positions of the columns that are left and of new tokens, (L + new,) or (3, L + new)."""
        given = self.seen.get("position_ids")
        if self.adapter.mrope and given is not None and given.ndim == 3:
            own = given[-3:, 0].cpu()
        else:
            count = -1
            numbers = [count := count + 1 if real else max(count, 0) for real in self.real]
            own = torch.tensor(numbers)
        if self.keep_positions or own.ndim == 2:
            after = int(own[..., -1].max()) + 1
            kept = own[..., list(left)]
        else:
            after, kept = len(left), torch.arange(len(left))
        more = torch.arange(after, after + new).expand(*kept.shape[:-1], new)
        return torch.cat([kept, more], dim=-1)

    @torch.no_grad()
    def logits(self, left: Sequence[int], new: Sequence[int] = ()) -> torch.Tensor:
        """Logits of the columns that are left and of new tokens after them, (L + new, V)."""
        embeds = self.seen["inputs_embeds"][:1, list(left)]
        words = torch.tensor([list(new)], dtype=torch.long, device=embeds.device)
        more = self.model.get_input_embeddings()(words).to(embeds)
        place = self.positions(left, len(new)).to(embeds.device)
        states = self.language_model(
            inputs_embeds=torch.cat([embeds, more], dim=1),
            position_ids=place[:, None] if place.ndim == 2 else place[None],
            attention_mask=self._masks(left, len(new), embeds),
            use_cache=False,
            **self._along(left, words),
        ).last_hidden_state
        scores: torch.Tensor = self.model.get_output_embeddings()(states)[0]
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def _along(self, left: Sequence[int], words: torch.Tensor) -> dict[str, Any]:
        """Other arguments that run along the sequence, without the deleted tokens."""
        found: dict[str, Any] = {}
        visual = self.seen.get("visual_pos_masks")
        if visual is not None:
            mask = visual[0].bool()
            number = mask.long().cumsum(0) - 1
            rows = [int(number[column]) for column in left if mask[column]]
            tail = torch.zeros(words.shape[1], dtype=torch.bool, device=mask.device)
            found["visual_pos_masks"] = torch.cat([mask[list(left)], tail])[None]
            found["deepstack_visual_embeds"] = [layer[rows] for layer in self.seen["deepstack_visual_embeds"]]
        given = self.seen.get("per_layer_inputs")
        if given is not None:
            language_model: Any = self.language_model
            fresh = [language_model.get_per_layer_inputs(words, None)] if words.shape[1] else []
            found["per_layer_inputs"] = torch.cat([given[:1, list(left)], *fresh], dim=1)
        return found

    def _masks(self, left: Sequence[int], new: int, embeds: torch.Tensor) -> Any:
        """Ones, or ready masks without the rows and columns of the deleted tokens."""
        masks = self.seen.get("attention_mask")
        length = len(left) + new
        if not isinstance(masks, dict):
            return torch.ones((1, length), dtype=torch.long, device=embeds.device)
        window = getattr(self.model.config.get_text_config(), "sliding_window", None)
        places = torch.tensor([*left, *range(len(self.ids), len(self.ids) + new)], device=embeds.device)
        causal = places[:, None] >= places[None]
        found: dict[str, Any] = {}
        for kind, mask in masks.items():
            if mask is not None and mask.ndim == 2:
                found[kind] = torch.ones((1, length), dtype=mask.dtype, device=mask.device)
                continue
            near = (
                causal if kind == "full_attention" or window is None else causal & (places[:, None] - places < window)
            )
            allowed = near.clone()
            if mask is not None:
                given = mask[0, 0][list(left)][:, list(left)]
                own = given if given.dtype == torch.bool else given > torch.finfo(given.dtype).min / 2
                allowed[: len(left), : len(left)] = own
            if mask is None or mask.dtype == torch.bool:
                found[kind] = allowed[None, None]
            else:
                lowest = torch.finfo(mask.dtype).min
                found[kind] = torch.zeros_like(allowed, dtype=mask.dtype).masked_fill(~allowed, lowest)[None, None]
        return found
