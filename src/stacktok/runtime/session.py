"""The hooks of one attachment, and what they share.

Data flow of a pruned call. The encoder function's output is noted together with the arguments that it had, since
generation drops those before the model runs. A pre-hook on the base model notes the prompt. A pre-hook on the language
model, by then given the prompt's embeddings with the image features in place, asks the method, drops rows, positions
and mask columns, and leaves the meaning of the shorter cache on the cache itself; later steps find it there. Sequences
that generation returns keep the original prompt, because nothing outside the language model is shortened.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stacktok.core.budget import Budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import EncodedImage, Reduction
from stacktok.models.base import ModelAdapter
from stacktok.runtime.cache import CacheState, remember, state_of
from stacktok.runtime.compaction import (
    Ints,
    Layout,
    Span,
    count_positions,
    gather_columns,
    gather_embeddings,
    lay_out,
    padding_of,
)
from stacktok.runtime.question import Question, QuestionReader
from stacktok.runtime.run import PROMPT, ImageResult, Pruned
from stacktok.runtime.tower import TowerTap

if TYPE_CHECKING:
    from stacktok.methods.base import FeatureMethod

_ATTRIBUTE = "_stacktok_encoded"


class FeatureTap:
    """Stands in for an encoder function on one model object, and notes what passes."""

    def __init__(self, function: Callable[..., Any], note: Callable[[Any, dict[str, Any]], None]) -> None:
        self._function, self._note = function, note
        self._signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode, and note the output with its arguments by name."""
        output = self._function(*args, **kwargs)
        self._note(output, dict(self._signature.bind(*args, **kwargs).arguments))
        return output


@dataclass(eq=False)
class Encoded:
    """The images behind one output of an encoder function; lives on that output.

    Attributes
    ----------
    images
        As the adapter read them.
    features
        The output's own tensors, one per image; beams repeat these very objects.
    seconds
        Time that reading them took.
    decided
        Reductions by images, query and budget, so that beams and steps without a cache decide once. The query is held
        beside them, so that its key stays its own.
    """

    images: list[EncodedImage]
    features: tuple[torch.Tensor, ...]
    seconds: float
    decided: dict[Hashable, tuple[Question, list[Reduction]]] = field(default_factory=dict)

    def index(self, rows: torch.Tensor) -> int:
        """The image that a tensor of the output belongs to.

        A device map may have copied the output between encoder and model; images with equal features are alike.
        """
        for same in (operator.is_, _equal_rows):
            for index, own in enumerate(self.features):
                if same(own, rows):
                    return index
        raise ValueError("the image features were changed after encoding; pass the encoder's output as it was")


@dataclass(eq=False)
class Call:
    """One forward pass of the base model, as far as it has come."""

    input_ids: torch.Tensor | None
    state: CacheState | None
    past: int
    outputs: dict[str, Any]
    layout: Layout | None = None
    next_state: CacheState | None = None
    gapped: bool = False


class _Feed:
    """Hands the images of one modality to the rows of a batch, in order."""

    def __init__(self, modality: str, encoded: Encoded, features: Sequence[torch.Tensor]) -> None:
        self.modality, self.encoded = modality, encoded
        self._indices = [encoded.index(rows) for rows in features]
        self._next = 0
        self.times = max(1, len(features) // max(1, len(encoded.features)))

    def take(self, columns: Ints) -> list[tuple[str, int, Ints]]:
        """(modality, image, columns) of the images whose placeholders stand in a row's ``columns``."""
        found = []
        while len(columns):
            index = self._indices[self._next]
            length = self.encoded.images[index].length
            found.append((self.modality, index, columns[:length]))
            columns, self._next = columns[length:], self._next + 1
        return found


class Session:
    """A method on a model while it is attached.

    Parameters
    ----------
    method, model, processor, adapter
        Checked by `Attachment`.
    """

    def __init__(self, method: FeatureMethod, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        self.method, self.model, self.processor, self.adapter = method, model, processor, adapter
        self.keep_positions = adapter.mrope or method.positions == "kept"
        self.reader = QuestionReader(model, processor, adapter)
        self.run = Pruned(method.budget)
        reads_tower = method.facts.attention == "vision tower"
        self.tower = TowerTap(adapter, model, getattr(method, "signal", None)) if reads_tower else None
        self._names = tuple(inspect.signature(adapter.base(model).forward).parameters)
        self._local = threading.local()

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set every hook; ``undo`` receives what takes each away again."""
        base, language_model = self.adapter.base(self.model), self.adapter.language_model(self.model)
        # A compiled model runs the hooks between its graphs, not inside them.
        uncompiled: Any = torch.compiler.disable
        for modality in self.adapter.modalities:
            # Generation encodes by calling this function, not a module, and alone knows its arguments: no module hook
            # sees the image sizes. The stand-in is an attribute of this one object.
            name = f"get_{modality}_features"
            undo.append(functools.partial(_put_back, base, name, vars(base).get(name)))
            note = functools.partial(uncompiled(self._note), modality)
            vars(base)[name] = FeatureTap(getattr(base, name), note)
        if self.tower is not None:
            self.tower.attach(undo)

        def before(module: nn.Module, hook: Callable[..., Any]) -> None:
            undo.append(module.register_forward_pre_hook(uncompiled(hook), with_kwargs=True).remove)

        def after(module: nn.Module, hook: Callable[..., Any]) -> None:
            undo.append(module.register_forward_hook(uncompiled(hook), with_kwargs=True).remove)

        before(self.model, self._take_labels)
        after(self.model, self._add_loss)
        before(base, self._begin)
        before(language_model, self._prune)
        after(language_model, self._finish)
        if self.keep_positions and not self.adapter.mrope:
            for layer in self.adapter.layers(self.model):
                before(layer, self._hide_gaps)

    @property
    def _call(self) -> Call | None:
        call: Call | None = getattr(self._local, "call", None)
        return call

    def _note(self, modality: str, output: Any, arguments: dict[str, Any]) -> None:
        if self._call is not None:
            self._call.outputs[modality] = output
        if self.run.budget is not None and getattr(output, "pooler_output", None) is not None:
            self._encode(modality, output, arguments)

    def _encode(self, modality: str, output: Any, arguments: Mapping[str, Any]) -> Encoded:
        begin = time.perf_counter()
        images = self.adapter.encode(modality, output, arguments, self.model, self.processor)
        reading = None if self.tower is None else self.tower.take()
        if reading is not None:
            images = self.adapter.add_attention(images, reading, output, arguments, self.model)
        features = tuple(output.pooler_output)
        lengths, rows = [image.length for image in images], [len(feature) for feature in features]
        if lengths != rows:
            raise ValueError(
                f"the adapter of {self.adapter.family} lays images out in {lengths} rows, the model in {rows}; "
                "the two must agree"
            )
        encoded = Encoded(images, features, time.perf_counter() - begin)
        setattr(output, _ATTRIBUTE, encoded)
        self._local.__dict__.setdefault("latest", {})[modality] = weakref.ref(encoded)
        return encoded

    def _encoded(self, modality: str, output: Any) -> Encoded:
        """The images behind an encoder output, which may be a copy that a device map made of the noted one."""
        encoded: Encoded | None = getattr(output, _ATTRIBUTE, None)
        if encoded is not None:
            return encoded
        latest: dict[str, weakref.ref[Encoded]] = getattr(self._local, "latest", {})
        encoded = latest[modality]() if modality in latest else None
        if encoded is not None and len(output.pooler_output) % len(encoded.features) == 0:
            own, rows = encoded.features[0], output.pooler_output[0]
            if own is rows or _equal_rows(own, rows):
                return encoded
        return self._encode(modality, output, {})

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the prompt, and make a continued cache consistent before the base model counts on it."""
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        input_ids = kwargs.get("input_ids")
        state, past = state_of(kwargs.get("past_key_values"))
        given = kwargs.get("mm_encoder_outputs") or {}
        outputs = {m: given[m] for m in self.adapter.modalities if given.get(m) is not None}
        self._local.call = call = Call(input_ids, state, past, outputs)
        tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if state is None or tokens is None:
            return None
        call.state = state = state.expanded(len(tokens))
        new = tokens.shape[1]
        if state.from_prompt and new > 1 and input_ids is not None:
            self._refuse_another_question(input_ids)
        start = state.next_original.to(tokens.device) + past - state.length
        positions = kwargs.get("position_ids")
        if positions is None:
            mask: Any = kwargs.get("attention_mask")
            flat = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= new
            fresh = mask[:, -new:].to(tokens.device) if flat else torch.ones(tokens.shape[:2], device=tokens.device)
            positions = start[:, None] + count_positions(fresh)
            return (), {**kwargs, "position_ids": positions.expand(3, -1, -1) if self.adapter.mrope else positions}
        # Generation cuts a continued prompt at the cache's length, so columns that pruning dropped come a second time.
        overlap = start - (positions if positions.ndim == 2 else positions[-1])[:, 0].to(start.device)
        if not bool(overlap.any()):
            return None
        extra = int(overlap.max())
        if bool((overlap != extra).any()) or not 0 < extra < new or input_ids is None:
            raise ValueError(
                "position_ids does not continue past_key_values; give the positions of the unpruned prompt, or none"
            )
        call.input_ids = input_ids[:, extra:]
        return (), {**kwargs, "input_ids": call.input_ids, "position_ids": positions[..., extra:]}

    def _refuse_another_question(self, input_ids: torch.Tensor) -> None:
        if any(self.reader.has_user_turn(row) for row in input_ids.tolist()):
            raise ValueError(
                "past_key_values holds an image that was pruned for another question; start without past_key_values, "
                "or set pruned.query (a text, embeddings or None) before the first question"
            )

    def _prune(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shorten what the language model is given."""
        call = self._call
        if call is None:
            return None
        budget, shorter = self.run.budget, None
        if call.outputs and budget is not None and kwargs["inputs_embeds"].is_cuda:
            # The selection waits for the encoder in any case; the clock should not count that.
            torch.cuda.synchronize(kwargs["inputs_embeds"].device)
        begin = time.perf_counter()
        if call.outputs or not call.past:
            self.run.kept_positions = None
        if call.outputs and budget is not None:
            shorter = self._compact(call, budget, kwargs)
            read = sum(self._encoded(modality, output).seconds for modality, output in call.outputs.items())
            self.run.seconds = time.perf_counter() - begin + read
        if shorter is None and call.state is not None:
            shorter = self._continue(call, call.state, kwargs)
        return None if shorter is None else (args, shorter)

    def _compact(self, call: Call, budget: Budget, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments of a call whose prompt holds images; None where every row is kept."""
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        batch, length, _ = embeds.shape
        padding = padding_of(mask, length, call.past)
        valid: Mask = np.broadcast_to(True if padding is None else padding, (batch, length))
        spans = self._decide(call, budget, embeds, valid)
        if all(span.unchanged for row in spans for span in row):
            columns = torch.arange(length).expand(batch, length)
            self.run.kept_positions = columns.masked_fill(~torch.from_numpy(valid.copy()), -1)
            return None
        layout = lay_out(valid, spans, pad_right=not valid[:, -1].all())
        call.layout, self.run.kept_positions = layout, layout.origin
        kept = layout.valid.to(embeds.device)

        original = kwargs.get("position_ids")
        if original is None:
            original = count_positions(torch.from_numpy(valid.copy()).to(embeds.device)) + call.past
        original = original.expand(*original.shape[:-2], batch, length)
        compact = count_positions(kept) + self._next_used(call, batch).to(embeds.device)[:, None]
        positions = gather_columns(original, layout) if self.keep_positions else compact
        if positions.ndim == 3 and len(positions) == 4:
            # The first of the four rows only tells packed sequences apart, so it must have no gaps.
            positions = torch.cat([compact[None], positions[1:]])

        ones = mask is None and not layout.ragged and (call.state is None or not call.state.padded)
        call.gapped = self.keep_positions and not self.adapter.mrope
        whole = self._past_mask(call, mask, kept)
        call.next_state = CacheState(
            valid=whole,
            padded=not bool(whole.all()),
            next_original=(_last(original) if valid[:, -1].all() else _largest(original)) + 1,
            next_used=_largest(positions) + 1,
            from_prompt=any(query is PROMPT for query in self._queries(None)),
            text_from=call.past + _text_from(layout, spans),
        )
        return {
            **kwargs,
            "inputs_embeds": gather_embeddings(embeds, layout),
            "position_ids": positions,
            # A mask of ones keeps gapped positions from being taken for packed sequences.
            "attention_mask": None if ones and not call.gapped else whole.long(),
        }

    def _next_used(self, call: Call, batch: int) -> torch.Tensor:
        """The position that the first new column gets when positions are compacted, (B,)."""
        if call.state is not None:
            return call.state.next_used + call.past - call.state.length
        return torch.full((batch,), call.past, dtype=torch.long)

    def _past_mask(self, call: Call, mask: Any, new: torch.Tensor) -> torch.Tensor:
        """Columns of the cache so far and the new ones that are not padding, (B, past + q)."""
        if call.state is not None:
            return call.state.mask(call.past, new)
        if not call.past:
            return new
        past = torch.ones((len(new), call.past), dtype=torch.bool, device=new.device)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > call.past:
            past = mask[:, : call.past].bool().to(new.device)
        return torch.cat([past, new], dim=1)

    def _continue(self, call: Call, state: CacheState, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a later step on a pruned cache."""
        embeds, mask, positions = kwargs["inputs_embeds"], kwargs.get("attention_mask"), kwargs["position_ids"]
        batch, new, _ = embeds.shape
        if not self.keep_positions:
            positions = positions - (state.next_original - state.next_used).to(positions.device)[:, None]
        if mask is not None or state.padded:
            fresh = torch.ones((batch, new), dtype=torch.bool, device=embeds.device)
            if isinstance(mask, torch.Tensor) and mask.ndim == 2:
                fresh = mask[:, -new:].bool().to(embeds.device)
            mask = state.mask(call.past, fresh).long()
        return {**kwargs, "position_ids": positions, "attention_mask": mask}

    @torch.no_grad()
    def _decide(self, call: Call, budget: Budget, embeds: torch.Tensor, valid: Mask) -> list[list[Span]]:
        """The images of every row, each with its reduction."""
        feeds: dict[str, _Feed] = {}
        placeholders: dict[str, Mask] = {}
        for modality, output in call.outputs.items():
            feeds[modality] = _Feed(modality, self._encoded(modality, output), output.pooler_output)
            placeholders[modality] = self._placeholders(call, modality)
        times = next(iter(feeds.values())).times
        queries = self._queries(len(valid) // times)
        depth = len(self.adapter.layers(self.model))
        spans: list[list[Span]] = []
        results: dict[tuple[str, int], ImageResult] = {}
        for row, columns in enumerate(valid):
            found = [entry for m, feed in feeds.items() for entry in feed.take(np.flatnonzero(placeholders[m][row]))]
            found.sort(key=lambda entry: int(entry[2][0]))
            images = [feeds[modality].encoded.images[index] for modality, index, _ in found]
            reductions: list[Reduction] = []
            if found:
                prompt = None
                if call.input_ids is not None:
                    text = columns & ~np.logical_or.reduce([mask[row] for mask in placeholders.values()])
                    prompt = call.input_ids[row].cpu().numpy()[text].tolist()
                question = self.reader.question(queries[row // times], prompt, embeds.device)
                decided = feeds[found[0][0]].encoded.decided
                key = (tuple(entry[:2] for entry in found), question.key, budget)
                if key not in decided:
                    query = question.embeddings
                    if query is not None:
                        query = query.to(images[0].crops[0].projected.device)
                    decided[key] = (question, self.method.reduce_prompt(images, query, budget))
                reductions = decided[key][1]
                for (modality, index, span), image, cut in zip(found, images, reductions, strict=True):
                    results.setdefault(
                        (modality, index),
                        ImageResult(
                            row // times,
                            modality,
                            len(span),
                            len(cut),
                            question.words,
                            image,
                            cut,
                            (len(cut),) * depth,
                        ),
                    )
            spans.append([Span(f[2], image, cut) for f, image, cut in zip(found, images, reductions, strict=True)])
        self.run.last = tuple(results.values())
        return spans

    def _queries(self, prompts: int | None) -> list[Any]:
        """The query of every prompt; of an unknown number of prompts those that occur."""
        query = self.run.query
        if not isinstance(query, (list, tuple)):
            return [query] * (prompts or 1)
        if prompts is not None and len(query) != prompts:
            raise ValueError(f"pruned.query has {len(query)} entries for {prompts} prompts; give one per prompt")
        return list(query)

    def _placeholders(self, call: Call, modality: str) -> Mask:
        """Which columns hold a modality's features, (B, S)."""
        token = getattr(self.model.config, self.adapter.modalities[modality])
        if call.input_ids is None:
            raise ValueError(
                "images given with inputs_embeds cannot be found in the prompt; pass input_ids together with the images"
            )
        found: Mask = (call.input_ids == token).cpu().numpy()
        return found

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Leave the meaning of a shorter cache on the cache."""
        call = self._call
        if call is not None and call.next_state is not None:
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                remember(cache, call.next_state)

    def _hide_gaps(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a layer no positions: it would read gaps as packed sequences; its rotation comes from elsewhere."""
        call = self._call
        if call is None or not call.gapped or kwargs.get("position_ids") is None:
            return None
        return args, {**kwargs, "position_ids": None}

    def _take_labels(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hold labels back until it is known which columns are left."""
        self._local.call = self._local.labels = None
        if kwargs.get("labels") is None or self.run.budget is None:
            return None
        self._local.labels = kwargs["labels"]
        return args, {**kwargs, "labels": None}

    def _add_loss(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The loss over the columns that are left."""
        labels: torch.Tensor | None = self._local.labels
        call = self._call
        self._local.call = self._local.labels = None
        if labels is None:
            return None
        if call is not None and call.layout is not None:
            kept = call.layout.valid.to(labels.device)
            # The first token of a row is predicted from padding, which says nothing.
            told = kept & kept.roll(1, dims=1)
            labels = gather_columns(labels, call.layout).masked_fill(~told, -100)
        named = inspect.signature(module.forward).parameters
        extra = {name: value for name, value in kwargs.items() if name not in named}
        logits = output.logits if hasattr(output, "logits") else output[0]
        loss = module.loss_function(
            logits=logits, labels=labels, vocab_size=module.config.get_text_config().vocab_size, **extra
        )
        if isinstance(output, tuple):
            return (loss, *output)
        return type(output)(**{**output, "loss": loss})


def _put_back(module: nn.Module, name: str, value: Any) -> None:
    """Restore an attribute of one object; None takes it away, so that the class's own shows again."""
    if value is None:
        del vars(module)[name]
    else:
        vars(module)[name] = value


def _text_from(layout: Layout, spans: Sequence[Sequence[Span]]) -> int:
    """First column of the compacted batch that follows every image."""
    ends = [0]
    for columns, row in zip(layout.origin.numpy(), spans, strict=True):
        held = np.isin(columns, np.concatenate([span.columns for span in row])) if row else np.zeros(1)
        ends.append(int(np.flatnonzero(held)[-1]) + 1 if held.any() else 0)
    return max(ends)


def _equal_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))


def _last(positions: torch.Tensor) -> torch.Tensor:
    """The position of the last column, (B,); of a triple the largest."""
    last = positions[..., -1]
    return last if positions.ndim == 2 else last[-3:].amax(0)


def _largest(positions: torch.Tensor) -> torch.Tensor:
    """The largest position of every row, (B,)."""
    return positions.amax(-1) if positions.ndim == 2 else positions[-3:].amax((0, -1))
