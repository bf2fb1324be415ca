"""Pruning before the language model.

The language model's pre-hook asks the method, gathers embeddings, positions and mask of the kept tokens, and leaves the
meaning of the shorter cache on the cache itself; later steps find it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stacktok.core.budget import Budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import Reduction
from stacktok.kernels.transfer import upload
from stacktok.methods.base import Asked
from stacktok.models.base import ModelAdapter
from stacktok.runtime.cache import CacheState, remember, state_of
from stacktok.runtime.capture import PlacedImage, Placement
from stacktok.runtime.compaction import Span, compact, count_positions, end_of_images, padding_of
from stacktok.runtime.hooks import Call, Pruning
from stacktok.runtime.masks import Columns, ReadyMasks
from stacktok.runtime.run import ImageResult

if TYPE_CHECKING:
    from stacktok.methods.base import FeatureMethod, Prepared
    from stacktok.runtime.question import Question


class BeforePruning(Pruning):
    """A `FeatureMethod` on a model while it is attached.

    Parameters
    ----------
    method, model, processor, adapter
        Checked by `Attachment`.
    """

    def __init__(self, method: FeatureMethod, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        super().__init__(method, model, processor, adapter)
        self.method = method
        self.keep_positions = adapter.mrope or method.positions == "kept"
        self.masks = ReadyMasks(adapter.language_model(model)) if adapter.gathers_masks else None

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set every hook; ``undo`` receives the functions that remove them."""
        super().attach(undo)
        self.attach_to_layers(undo)

    def attach_to_layers(self, undo: list[Callable[[], object]]) -> None:
        """Set the hooks on the language model's layers, which are all that a method inside it needs of these."""
        if self.keep_positions and not self.adapter.mrope:
            for layer in self.adapter.layers(self.model):
                self.before_module(undo, layer, self._hide_gaps)

    def begin(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Make a continued cache consistent before the base model counts on it."""
        call.state, call.past = state_of(kwargs.get("past_key_values"))
        tokens = call.input_ids if call.input_ids is not None else kwargs.get("inputs_embeds")
        if call.state is None or tokens is None:
            return None
        call.state = state = call.state.expanded(len(tokens))
        new = tokens.shape[1]
        if state.from_prompt and new > 1 and call.input_ids is not None:
            self.refuse_another_question(call.input_ids)
        start = state.next_original.to(tokens.device) + call.past - state.length
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        fresh = _fresh(mask, tokens)
        changed: dict[str, Any] = {}
        if positions is None:
            positions = start[:, None] + count_positions(fresh)
            changed["position_ids"] = positions.expand(3, -1, -1) if self.adapter.mrope else positions
        else:
            # Generation cuts a continued prompt at the cache's length, so tokens that pruning dropped come again.
            overlap = start - (positions if positions.ndim == 2 else positions[-1])[:, 0].to(start.device)
            if bool(overlap.any()):
                extra = int(overlap.max())
                if bool((overlap != extra).any()) or not 0 < extra < new or call.input_ids is None:
                    raise ValueError(
                        "position_ids does not continue past_key_values; give the positions of the unpruned prompt, or "
                        "none"
                    )
                call.input_ids, fresh = call.input_ids[:, extra:], fresh[:, extra:]
                call.prompt = None if call.prompt is None else call.prompt.cut(extra)
                changed.update(input_ids=call.input_ids, position_ids=positions[..., extra:])
        if self.masks is not None and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            # The base model makes masks of it, for the columns that the cache has in fact.
            changed["attention_mask"] = state.mask(call.past, fresh).long()
        return {**kwargs, **changed} if changed else None

    def enter(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Shorten the language model's input."""
        budget, shorter = self.run.budget, None
        if call.outputs and budget is not None:
            shorter = self._prune(call, budget, kwargs)
        if shorter is None and call.state is not None:
            shorter = self._continue(call, call.state, kwargs)
        return shorter

    def leave(self, call: Call, output: Any) -> None:
        """Leave the meaning of a shorter cache on the cache."""
        cache = getattr(output, "past_key_values", None)
        if call.next_state is not None and cache is not None:
            remember(cache, call.next_state)

    def _prune(self, call: Call, budget: Budget, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of a call whose prompt holds images; None where every token is kept."""
        begin = time.perf_counter()
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        batch, length, _ = embeds.shape
        ids, known = call.ids, None if call.prompt is None else call.prompt.valid
        if known is None:
            known = padding_of(mask, length, call.past, causal=not self.adapter.gathers_masks)
        valid: Mask = np.array(np.broadcast_to(True if known is None else known, (batch, length)))
        placement = self.capture.place(call.outputs, ids, valid)
        spans = self._decide(call, placement, budget, embeds.device)
        self.run.seconds = time.perf_counter() - begin
        if all(span.unchanged for row in spans for span in row):
            indices = torch.arange(length).expand(batch, length)
            self.run.kept_positions = indices.masked_fill(~torch.from_numpy(valid), -1)
            return None
        shorter = self._shorten(call, spans, valid, kwargs)
        self.run.seconds = time.perf_counter() - begin
        return shorter

    @torch.no_grad()
    def _decide(self, call: Call, placement: Placement, budget: Budget, device: torch.device) -> list[list[Span]]:
        """The images of every row, each with its reduction."""
        times = placement.times
        queries = self.queries(len(placement.rows) // times)
        asked: list[tuple[list[PlacedImage], Question]] = []
        for row, placed in enumerate(placement.rows):
            if placed:
                prompt = call.ids[row][placement.text[row]].tolist()
                asked.append((placed, self.reader.question(queries[row // times], prompt, device)))
        spans: list[list[Span]] = [[] for _ in placement.rows]
        results: dict[tuple[str, int, int], ImageResult] = {}
        for (placed, question), reductions in zip(asked, self._reduce(call, asked, budget), strict=True):
            for one, reduction in zip(placed, reductions, strict=True):
                row = one.row
                spans[row].append(Span(one.indices, one.image, reduction))
                results.setdefault(
                    (one.modality, one.index, row // times),
                    ImageResult(
                        row // times,
                        one.modality,
                        one.image.length,
                        len(reduction),
                        question.words,
                        one.image,
                        reduction,
                        (len(reduction),) * self.depth,
                        self.caching,
                        self.capture.not_encoded(one, call.outputs[one.modality]),
                    ),
                )
        self.run.last = tuple(results.values())
        return spans

    def _reduce(
        self, call: Call, asked: list[tuple[list[PlacedImage], Question]], budget: Budget
    ) -> list[list[Reduction]]:
        """The method's answers for the images of every prompt, decided once for beams and steps without a cache.

        All prompts of a batch are decided together, except where the images of each share a budget.
        """
        known: list[dict[Hashable, tuple[Question, list[Reduction]]]] = []
        keys: list[Hashable] = []
        fresh: dict[Hashable, tuple[int, list[Asked], float]] = {}
        for number, (placed, question) in enumerate(asked):
            first = placed[0]
            known.append(self.capture.captured(first.modality, call.outputs[first.modality]).decided)
            keys.append((self.method, tuple((one.modality, one.index) for one in placed), question.key, budget))
            if keys[-1] in known[-1] or keys[-1] in fresh:
                continue
            begin = time.perf_counter()
            prepared = [self._prepared(call, one) for one in placed]
            each = (time.perf_counter() - begin) / len(placed)
            query = question.embeddings
            if query is not None:
                query = query.to(first.image.crops[0].projected.device)
            fresh[keys[-1]] = (number, [Asked(one, query, budget) for one in prepared], each)
        shared = self.method.share_budget
        flat = [] if shared else self.method.reduce_batch([one for _, own, _ in fresh.values() for one in own])
        for number, own, each in fresh.values():
            found, flat = flat[: len(own)], flat[len(own) :]
            if shared:
                found = self.method.reduce_prompt([one.prepared for one in own], own[0].query, budget)
            timed = [reduction.timed(reduction.seconds + each) for reduction in found]
            known[number][keys[number]] = (asked[number][1], timed)
        return [decided[key][1] for decided, key in zip(known, keys, strict=True)]

    def _prepared(self, call: Call, one: PlacedImage) -> Prepared:
        """An image prepared for the method, once for all questions and budgets on one encoder output."""
        captured = self.capture.captured(one.modality, call.outputs[one.modality])
        key = (replace(self.method, budget=None), one.index)
        if key not in captured.prepared:
            captured.prepared[key] = self.method.prepare(one.image)
        return captured.prepared[key]

    def _shorten(self, call: Call, spans: list[list[Span]], valid: Mask, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The language model's arguments for the kept tokens."""
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        batch, length, _ = embeds.shape
        kept, made = compact(valid, spans, embeds.device, pad_right=not valid[:, -1].all())
        call.kept, self.run.kept_positions = kept, kept.origin
        fresh = upload(kept.valid, embeds.device)

        original = kwargs.get("position_ids")
        if original is None:
            original = count_positions(upload(valid, embeds.device)) + call.past
        original = original.expand(*original.shape[:-2], batch, length)
        compacted = count_positions(fresh) + self._next_used(call, batch, embeds.device)[:, None]
        positions = kept.gather(original, -1) if self.keep_positions else compacted
        if positions.ndim == 3 and len(positions) == 4:
            # The first of the four rows only tells packed sequences apart, so it must have no gaps.
            positions = torch.cat([compacted[None], positions[1:]])

        ones = mask is None and not kept.ragged and (call.state is None or not call.state.padded)
        call.gapped = self.keep_positions and not self.adapter.mrope
        whole = self._past_mask(call, mask, fresh)
        call.next_state = CacheState(
            valid=whole,
            padded=kept.ragged or self._past_padded(call, mask),
            next_original=(_last(original) if valid[:, -1].all() else _largest(original)) + 1,
            next_used=_largest(positions) + 1,
            from_prompt=self.asks_prompt,
            text_from=call.past + end_of_images(valid, spans, kept),
            places=torch.cat([self._places(call, batch, embeds.device), self._next_place(call) + kept.indices], dim=1),
            next_place=self._next_place(call) + length,
        )
        shorter = kept.gather(embeds)
        for row, token, embedding in made:
            shorter[row, token] = embedding.to(shorter)
        # A mask of ones keeps gapped positions from being taken for packed sequences.
        shorter_mask: Any = None if ones and not call.gapped else whole.long()
        if self.masks is not None and self.masks.used and isinstance(mask, dict):
            columns = Columns(whole, call.next_state.places, call.past)
            shorter_mask = self.masks.gathered(mask, kept, columns, kwargs.get("past_key_values"), embeds)
        return {
            **kwargs,
            "inputs_embeds": shorter,
            "position_ids": positions,
            "attention_mask": shorter_mask,
            **self.adapter.shorten(kwargs, kept),
        }

    def _next_used(self, call: Call, batch: int, device: torch.device) -> torch.Tensor:
        """The position that the first new token gets when positions are compacted, (B,)."""
        if call.state is not None:
            return (call.state.next_used + call.past - call.state.length).to(device)
        return torch.full((batch,), call.past, dtype=torch.long, device=device)

    def _places(self, call: Call, batch: int, device: torch.device) -> torch.Tensor:
        """Indices in the unpruned sequence of the cache's columns, (B, past)."""
        if call.state is not None:
            return call.state.placed(call.past, 0).to(device)
        return torch.arange(call.past, device=device).expand(batch, -1)

    def _next_place(self, call: Call) -> int:
        """The index in the unpruned sequence of the first new token."""
        if call.state is None:
            return call.past
        return call.state.next_place + call.past - call.state.length

    def _past_mask(self, call: Call, mask: Any, new: torch.Tensor) -> torch.Tensor:
        """Tokens of the cache so far and the new ones that are not padding, (B, past + q)."""
        if call.state is not None:
            return call.state.mask(call.past, new)
        if not call.past:
            return new
        past = torch.ones((len(new), call.past), dtype=torch.bool, device=new.device)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > call.past:
            past = mask[:, : call.past].bool().to(new.device)
        return torch.cat([past, new], dim=1)

    def _past_padded(self, call: Call, mask: Any) -> bool:
        """Whether any column of the cache is padding; waits for a device only where an unpruned cache has a mask."""
        if call.state is not None:
            return call.state.padded
        told = call.past and isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > call.past
        return bool(told) and not bool(mask[:, : call.past].all())

    def _continue(self, call: Call, state: CacheState, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a later step on a pruned cache."""
        embeds, mask, positions = kwargs["inputs_embeds"], kwargs.get("attention_mask"), kwargs["position_ids"]
        batch, new, _ = embeds.shape
        if not self.keep_positions:
            positions = positions - (state.next_original - state.next_used).to(positions.device)[:, None]
        if self.masks is not None and self.masks.used and isinstance(mask, dict):
            fresh = torch.ones((batch, new), dtype=torch.bool, device=embeds.device)
            padding = padding_of(mask, new, call.past, causal=False) if new > 1 else None
            if padding is not None:
                fresh &= torch.from_numpy(padding).to(embeds.device)
            columns = Columns(state.mask(call.past, fresh), state.placed(call.past, new), call.past)
            mask = self.masks.step(columns, kwargs.get("past_key_values"), embeds)
        elif mask is not None or state.padded:
            mask = state.mask(call.past, _fresh(mask, embeds)).long()
        return {**kwargs, "position_ids": positions, "attention_mask": mask}

    def _hide_gaps(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a layer no positions: it would read gaps as packed sequences; its rotation comes from elsewhere."""
        if self.call is None or not self.call.gapped or kwargs.get("position_ids") is None:
            return None
        return args, {**kwargs, "position_ids": None}


def _fresh(mask: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Which new tokens a 2-D mask does not call padding, (B, q); all where there is no such mask."""
    new = tokens.shape[1]
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= new:
        return mask[:, -new:].bool().to(tokens.device)
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def _last(positions: torch.Tensor) -> torch.Tensor:
    """The position of the last token, (B,); of a triple the largest."""
    last = positions[..., -1]
    return last if positions.ndim == 2 else last[-3:].amax(0)


def _largest(positions: torch.Tensor) -> torch.Tensor:
    """The largest position of every row, (B,)."""
    return positions.amax(-1) if positions.ndim == 2 else positions[-3:].amax((0, -1))
