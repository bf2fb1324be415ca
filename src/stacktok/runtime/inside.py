"""Pruning inside the language model.

The prompt enters whole, or as an earlier stage leaves it. At a cut the queries and keys of one layer are read, and a
pre-hook on the next layer shows the method a view of every image, drops the hidden states that go and appends those
that were made of them. From there on the layers are given a shorter sequence with positions and a mask of its own, so
that the caches of the layers differ in length; the meaning of those lengths is left on the cache, where later steps
find it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stacktok.core.budget import Budget, resolve_budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import SEPARATOR, EncodedImage, Ints, Reduction
from stacktok.methods.choice import MergedTokens, checked_indices
from stacktok.methods.layer_method import LayerMethod, LayerView, Reading
from stacktok.methods.pixel_method import AllTokens
from stacktok.models.base import KeptTokens, ModelAdapter
from stacktok.runtime.before import BeforePruning
from stacktok.runtime.cache import state_of
from stacktok.runtime.capture import PlacedImage
from stacktok.runtime.compaction import count_positions, padding_of
from stacktok.runtime.hooks import Call, Pruning
from stacktok.runtime.run import ImageResult
from stacktok.runtime.tap import Tap, read_without_attending

_ATTRIBUTE = "_stacktok_layers"


@dataclass(eq=False)
class Stage:
    """The sequence that a run of layers is given.

    Attributes
    ----------
    origin
        Column of the prompt that every column stands for, (B, L), -1 in padding.
    rotation
        Rotary cosines and sines of the columns, (B, L, d) each; None before the first cut, where the model's own hold.
    shift
        By how much positions of later tokens are lowered, (B,); None where positions are kept.
    masks
        The masks that layers are given, for recurrent ones and others; made where they are first needed.
    """

    origin: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    shift: torch.Tensor | None = None
    masks: dict[bool, torch.Tensor | None] = field(default_factory=dict)

    @property
    def valid(self) -> torch.Tensor:
        """Columns that are not padding, (B, L)."""
        return self.origin >= 0


@dataclass(eq=False)
class Visual:
    """One image of one row on its way through the layers.

    Attributes
    ----------
    row, modality, index, image
        Where it is, and what it is.
    indices, offsets
        Its tokens in the prompt as it enters the language model, and their indices among all tokens of the image, of
        which an earlier stage may have removed some.
    text
        Text tokens of the prompt that follow it.
    keeps
        Tokens that stay at each cut.
    at
        Its columns in the current stage.
    sources
        What each of those was made of, as places of the image.
    per_cut
        Its number of tokens before the first cut and after each.
    not_encoded
        Tokens that a method before the vision tower removed.
    """

    row: int
    modality: str
    index: int
    image: EncodedImage
    indices: Ints
    offsets: Ints
    text: Ints
    keeps: tuple[int, ...]
    at: Ints
    sources: list[Ints]
    per_cut: list[int]
    not_encoded: int


@dataclass(eq=False)
class Plan:
    """The state of one prompt or batch while the layers run; times are those before and between the layers.

    Attributes
    ----------
    embeds
        Input embeddings of the prompt, (B, S, d).
    entering, rotation, reading
        Of the last layer of a cut: the hidden states and rotary cosines and sines that it was given, and its queries
        and keys.
    """

    visuals: list[Visual]
    stages: list[Stage]
    pad_right: bool
    embeds: torch.Tensor
    times: int = 1
    before: float = 0.0
    seconds: float = 0.0
    positions: torch.Tensor | None = None
    entering: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    reading: Reading | None = None

    def rows(self, row: int) -> list[Visual]:
        """The images of a row, in order."""
        return [visual for visual in self.visuals if visual.row == row]


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The contents of a cache's layers after a prompt that was cut inside.

    Attributes
    ----------
    length
        Columns of the prompt, which the layers before the first cut hold.
    valid, shift
        Per cut: columns that are not padding, (B, L); by how much later positions are lowered, (B,), or None.
    """

    length: int
    valid: tuple[torch.Tensor, ...]
    shift: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Continuation:
    """A later step on a cache that was cut.

    Attributes
    ----------
    held
        The meaning of the cache.
    fresh
        New tokens that are not padding, (B, q).
    """

    held: LayerCache
    fresh: torch.Tensor


class InsidePruning(Pruning):
    """A `LayerMethod` on a model while it is attached.

    Parameters
    ----------
    method, model, processor, adapter
        Checked by `Attachment`.
    """

    def __init__(self, method: LayerMethod, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        super().__init__(method, model, processor, adapter)
        self.method = method
        self.cuts = method.layers(self.depth)
        self.ranking = [adapter.ranking_attention(model, layer) for layer in self.cuts]
        self.keep_positions = adapter.mrope or (method.positions or method.default_positions) == "kept"
        # What an earlier stage removed, or one before the vision tower, leaves the sequence before it enters.
        self.entrance: BeforePruning | None = None
        if method.before is not None or method.entry is not None:
            first = replace(method.entry or AllTokens(budget=1.0), before=method.before)
            if self.keep_positions:
                first = replace(first, positions="kept")
            self.entrance = BeforePruning(first, model, processor, adapter)
            self.entrance.join(self)

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set every hook; ``undo`` receives the functions that remove them."""
        super().attach(undo)
        layers = self.adapter.layers(self.model)
        for attention in self.ranking:
            Tap(attention, self._read).attach(undo)
        for number in range(self.cuts[0], self.depth):
            self.before_module(undo, layers[number], self._layer(number))
        if self.entrance is not None:
            self.entrance.attach_to_layers(undo)

    def begin(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Note how much the cache holds; the base model's arguments stay as they are unless tokens went before."""
        if self.entrance is not None:
            return self.entrance.begin(call, kwargs)
        call.past = state_of(kwargs.get("past_key_values"))[1]
        return None

    def enter(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Plan the cuts of a prompt, or find what an earlier one left on the cache; what was encoded enters whole."""
        begin = time.perf_counter()
        shorter = None if self.entrance is None else self.entrance.enter(call, kwargs)
        if shorter is not None:
            kwargs = shorter
        cache = kwargs.get("past_key_values")
        held: LayerCache | None = getattr(cache, _ATTRIBUTE, None)
        if held is not None and call.past:
            self._continue_layers(call, held, cache, kwargs)
        if call.outputs and self.run.budget is not None:
            call.plan = self._plan(call, self.run.budget, cache, kwargs)
            call.plan.before = time.perf_counter() - begin
        return shorter

    def _continue_layers(self, call: Call, held: LayerCache, cache: Any, kwargs: dict[str, Any]) -> None:
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        name = type(self.method).__name__
        if call.outputs:
            raise ValueError(f"{name} cannot add an image to a cache that it has cut; start without past_key_values")
        if call.input_ids is not None and call.input_ids.shape[1] > 1:
            self.refuse_another_question(call.input_ids)
        batch, new = embeds.shape[:2]
        rows = len(held.valid[0])
        if batch % rows:
            raise ValueError(
                f"past_key_values was pruned for {rows} prompts and is continued with {batch}; keep the batch as it was"
            )
        expanded = LayerCache(
            held.length,
            tuple(valid.repeat_interleave(batch // rows, 0) for valid in held.valid),
            tuple(None if shift is None else shift.repeat_interleave(batch // rows, 0) for shift in held.shift),
        )
        for layer in range(self.cuts[0] + 1, self.depth):
            if self.recurrent[layer]:
                continue
            cut = sum(number < layer for number in self.cuts) - 1
            expected = held.valid[cut].shape[1] + call.past - held.length
            if call.past < held.length or int(cache.get_seq_length(layer)) != expected:
                raise ValueError(
                    f"the layers of past_key_values have lengths that do not belong together, or lost a part of the "
                    f"prompt; {name} leaves caches of different lengths: start without past_key_values"
                )
        fresh = torch.ones((batch, new), dtype=torch.bool, device=embeds.device)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            fresh = mask[:, -new:].bool().to(embeds.device)
        call.layers = Continuation(expanded, fresh)

    @torch.no_grad()
    def _plan(self, call: Call, budget: Budget, cache: Any, kwargs: dict[str, Any]) -> Plan:
        """The images of every row, and how many tokens they keep at every cut."""
        name = type(self.method).__name__
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        batch, length, _ = embeds.shape
        if cache is not None and (getattr(cache, "is_compileable", False) or _is_static(cache)):
            raise ValueError(
                f"{name} leaves caches of different lengths in the layers, which a static cache cannot hold; "
                "generate with a dynamic cache (cache_implementation=None)"
            )
        if call.past:
            raise ValueError(f"{name} prunes at the start of a sequence; pass the image without past_key_values")
        config: Any = self.adapter.language_model(self.model).config
        window = getattr(config, "sliding_window", None)
        if window is not None and "sliding_attention" in getattr(config, "layer_types", [""]) and length > window:
            raise ValueError(f"{name} cannot follow a sliding window of {window} in a prompt of {length} tokens")
        padding = padding_of(mask, length, call.past)
        valid: Mask = np.array(np.broadcast_to(True if padding is None else padding, (batch, length)))
        prompt = valid if call.kept is None or call.input_ids is None else _prompt_mask(call.kept, call.input_ids)
        placement = self.capture.place(call.outputs, call.ids, prompt)
        visuals = []
        for row, placed in enumerate(placement.rows):
            # Where each token of the prompt stands in what enters, -1 for those that are gone.
            column = np.arange(prompt.shape[1])
            if call.kept is not None:
                own = call.kept.valid[row].numpy()
                column = np.full(prompt.shape[1], -1)
                column[call.kept.indices[row].numpy()[own]] = np.flatnonzero(own)
            text = column[placement.text[row]]
            for one in placed:
                offsets = np.flatnonzero(column[one.indices] >= 0)
                indices = column[one.indices[offsets]]
                after = text[text > indices[-1]]
                if not len(after):
                    after = np.flatnonzero(valid[row])[-1:]
                n = len(indices)
                own_budget, sources = budget, {}
                if self.method.entry is not None:
                    own_budget = resolve_budget(budget, one.image.n, one.image.capacity)
                    sources = self._sources(one, row // placement.times)
                visuals.append(
                    Visual(
                        row=row,
                        modality=one.modality,
                        index=one.index,
                        image=one.image,
                        indices=indices,
                        offsets=offsets,
                        text=after,
                        keeps=self.method.keeps(self.depth, n, own_budget),
                        at=indices,
                        sources=[sources.get(offset, np.array([offset])) for offset in offsets.tolist()],
                        per_cut=[n],
                        not_encoded=self.capture.not_encoded(one, call.outputs[one.modality]),
                    )
                )
        origin = torch.arange(length).expand(batch, length).masked_fill(~torch.from_numpy(valid), -1)
        return Plan(visuals, [Stage(origin)], not bool(valid[:, -1].all()), embeds, placement.times)

    def _sources(self, placed: PlacedImage, prompt: int) -> dict[int, Ints]:
        """Tokens that the earlier stage made a merged one of, as indices among the image's, by that of its anchor."""
        reduction = next(
            result.reduction for result in self.run.last if result.row == prompt and result.image is placed.image
        )
        anchors = placed.image.offsets_of(reduction.anchors)
        return {int(anchors[output]): placed.image.layout.fed(own) for output, own in reduction.merged.items()}

    def _read(self, query: torch.Tensor, key: torch.Tensor, scaling: float, mask: Any) -> None:
        plan: Plan | None = None if self.call is None else self.call.plan
        if plan is not None:
            plan.reading = (query.detach(), key.detach(), scaling)

    def _layer(self, number: int) -> Callable[..., Any]:
        """The inputs of a layer: after a cut a shorter sequence, and always the masks and positions of its stage."""
        cut_here = self.cuts.index(number - 1) if number - 1 in self.cuts else None
        stage = sum(layer < number for layer in self.cuts)
        recurrent = self.recurrent[number]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = self.call
            if call is None:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs = dict(kwargs)
            if call.plan is not None:
                plan = call.plan
                if cut_here is not None:
                    begin = time.perf_counter()
                    hidden = self._cut(plan, cut_here, hidden, kwargs)
                    plan.entering = plan.reading = None
                    plan.seconds += time.perf_counter() - begin
                current = plan.stages[-1]
                if current.rotation is not None:
                    if recurrent not in current.masks:
                        current.masks[recurrent] = self._mask(recurrent, current.valid.to(hidden.device), hidden)
                    mask = current.masks[recurrent]
                    kwargs.update(position_embeddings=current.rotation, attention_mask=mask, position_ids=None)
                if number in self.cuts:
                    plan.entering, plan.rotation = hidden, kwargs["position_embeddings"]
                    if plan.positions is None:
                        plan.positions = kwargs.get("position_ids")
            elif call.layers is not None and stage:
                self._step(call, call.layers, recurrent, stage - 1, hidden, kwargs)
            else:
                return None
            return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

        return hook

    def _cut(self, plan: Plan, cut: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden states that go on, (B, L, d); appends the stage that they belong to."""
        if all(visual.keeps[cut] >= len(visual.at) for visual in plan.visuals):
            for visual in plan.visuals:
                visual.per_cut.append(len(visual.at))
            return hidden
        rows = [self._cut_row(plan, row, cut, hidden) for row in range(len(hidden))]
        length = max(len(states) for states, _ in rows)
        shorter = hidden.new_zeros((len(rows), length, hidden.shape[-1]))
        origin = torch.full((len(rows), length), -1, dtype=torch.long)
        for row, (states, columns) in enumerate(rows):
            start = 0 if plan.pad_right else length - len(states)
            shorter[row, start : start + len(states)] = states
            origin[row, start : start + len(states)] = columns
            for visual in plan.rows(row):
                visual.at = visual.at + start
        stage = Stage(origin)
        self._place(plan, stage, shorter, kwargs)
        plan.stages.append(stage)
        return shorter

    def _cut_row(self, plan: Plan, row: int, cut: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row after a cut: its states, (l, d), and the columns that they stand for, (l,)."""
        states, origin = hidden[row], plan.stages[-1].origin[row]
        valid = (origin >= 0).nonzero()[:, 0].numpy()
        # Sort keys: a token keeps its index; a made one stands behind its image.
        stays, keys = np.isin(np.arange(len(origin)), valid), [valid.astype(np.float64)]
        pieces, origins = [states], [origin]
        for visual in plan.rows(row):
            visual.per_cut.append(len(visual.at))
            if visual.keeps[cut] >= len(visual.at):
                continue
            found = self._choose(plan, visual, cut, hidden)
            kept, anchors = np.asarray(found.kept), np.asarray(found.anchors)
            stays[visual.at] = False
            stays[visual.at[kept]] = True
            keys.append(np.full(len(anchors), visual.at[-1] + 0.5))
            first = sum(map(len, pieces))
            pieces.append(found.made.to(states))
            origins.append(origin[torch.from_numpy(visual.at[anchors])])
            visual.at = np.concatenate([visual.at[kept], np.arange(first, first + len(anchors))])
            visual.sources = [visual.sources[i] for i in kept] + [
                np.sort(np.concatenate([visual.sources[i] for i in group])) for group in found.sources
            ]
            visual.per_cut[-1] = len(visual.at)
        source = np.concatenate([valid[stays[valid]], np.arange(len(origin), sum(map(len, pieces)))])
        keys[0] = keys[0][stays[valid]]
        source = source[np.argsort(np.concatenate(keys), kind="stable")]
        target = np.full(sum(map(len, pieces)), -1, dtype=np.int64)
        target[source] = np.arange(len(source))
        for visual in plan.rows(row):
            visual.at = target[visual.at]
        chosen = torch.from_numpy(source)
        return torch.cat(pieces)[chosen.to(states.device)], torch.cat(origins)[chosen]

    def _choose(self, plan: Plan, visual: Visual, cut: int, hidden: torch.Tensor) -> MergedTokens:
        """The method's choice, checked, with the kept tokens in order."""
        name, k = f"{type(self.method).__name__}.choose", visual.keeps[cut]
        found = self.method.choose(self._view(plan, visual, cut, hidden), k)
        if not isinstance(found, MergedTokens):
            found = MergedTokens(found, [], hidden[0, :0], [])
        kept, anchors = checked_indices(found, np.ones(len(visual.at), dtype=np.bool_), name)
        if len(kept) != k:
            raise ValueError(f"{name} returned {len(kept)} tokens where {k} were asked for; give exactly k")
        return MergedTokens(np.sort(kept), anchors, found.made, found.sources)

    def _view(self, plan: Plan, visual: Visual, cut: int, hidden: torch.Tensor) -> LayerView:
        """One image after the layer of a cut, which returned ``hidden``, (B, L, d)."""
        row, layer = visual.row, self.cuts[cut]
        entered: Any = plan.entering
        rotation: Any = plan.rotation
        language_model: Any = self.adapter.language_model(self.model)
        rotary = tuple(part[row if len(part) > 1 else 0][None] for part in rotation)
        # Text tokens only move; each stands for itself in every stage.
        index = {token: at for at, token in enumerate(plan.stages[-1].origin[row].tolist())}

        def read() -> Reading:
            if plan.reading is None:
                raise ValueError(
                    f"layer {layer} ran without showing its attention; {type(self.method).__name__} needs a model "
                    "whose attention goes through transformers' AttentionInterface"
                )
            query, key, scaling = plan.reading
            return query[row], key[row], scaling

        def read_next() -> Reading:
            following: Any = self.adapter.layers(self.model)[layer + 1]
            query, key, scaling = read_without_attending(
                self.adapter.ranking_attention(self.model, layer + 1),
                hidden_states=following.input_layernorm(hidden[row : row + 1]),
                position_embeddings=rotary,
                attention_mask=None,
            )
            return query[0], key[0], scaling

        return LayerView(
            inputs=plan.embeds[row],
            input_image=torch.from_numpy(visual.indices),
            input_text=torch.from_numpy(visual.text),
            entered=entered[row],
            left=hidden[row],
            valid=plan.stages[-1].valid[row],
            image=torch.from_numpy(visual.at),
            text=torch.tensor([index[int(token)] for token in visual.text]),
            read=read,
            read_next=read_next,
            rotated_ones=lambda: _rotated_ones(self.ranking[cut], rotary, read()[1].shape[-1]),
            norm=language_model.norm,
        )

    def _place(self, plan: Plan, stage: Stage, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Rotary positions of a stage: the columns' own, or renumbered."""
        cos, sin = plan.rotation if plan.rotation is not None else kwargs["position_embeddings"]
        if self.keep_positions:
            # The rotation of the stage before, by the place that a column had there.
            before = plan.stages[-1].origin
            place = torch.zeros_like(stage.origin)
            for row in range(len(before)):
                known = {int(column): at for at, column in enumerate(before[row].tolist())}
                place[row] = torch.tensor([known[int(c)] if c >= 0 else 0 for c in stage.origin[row]])
            place = place.to(cos.device)[..., None].expand(-1, -1, cos.shape[-1])
            batch = len(place)
            stage.rotation = (cos.expand(batch, -1, -1).gather(1, place), sin.expand(batch, -1, -1).gather(1, place))
            return
        language_model: Any = self.adapter.language_model(self.model)
        positions = count_positions(stage.valid).to(hidden.device)
        found = language_model.rotary_emb(hidden, position_ids=positions)
        stage.rotation = (found[0], found[1])
        original = plan.positions
        batch, length = plan.stages[0].origin.shape
        if original is None:
            original = torch.arange(length)[None]
        original = original.expand(batch, length).cpu()
        following = original.masked_fill(~plan.stages[0].valid, -1).amax(1) + 1
        stage.shift = following - (positions.cpu().amax(1) + 1)

    def _step(
        self,
        call: Call,
        continued: Continuation,
        recurrent: bool,
        cut: int,
        hidden: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """Mask and positions of later tokens in the layers after a cut."""
        held, fresh = continued.held, continued.fresh
        valid, shift = held.valid[cut].to(hidden.device), held.shift[cut]
        since = torch.ones((len(valid), call.past - held.length), dtype=torch.bool, device=hidden.device)
        kwargs["attention_mask"] = self._mask(recurrent, torch.cat([valid, since, fresh], 1), hidden)
        if shift is not None and kwargs.get("position_ids") is not None:
            language_model: Any = self.adapter.language_model(self.model)
            positions = kwargs["position_ids"] - shift.to(hidden.device)[:, None]
            kwargs["position_embeddings"] = language_model.rotary_emb(hidden, position_ids=positions)
        kwargs["position_ids"] = None

    def _mask(self, recurrent: bool, valid: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """The mask that a layer is given, in the form that it wants.

        Parameters
        ----------
        recurrent
            Whether the layer keeps a state in place of keys and values.
        valid
            Columns of the cache and the new ones that are not padding, (B, L).
        hidden
            States of the new columns, (B, q, d), whose type an additive mask has.
        """
        new = hidden.shape[1]
        whole = bool(valid.all())
        if recurrent:
            # A state goes from column to column: what it needs to know is which of the new ones are padding.
            return None if whole or new == 1 else valid[:, -new:].long()
        config: Any = self.adapter.language_model(self.model).config
        backend = config._attn_implementation
        if "flash" in backend:
            return None if whole else valid.long()
        if backend not in ("sdpa", "eager"):
            raise ValueError(
                f"{type(self.method).__name__} cannot make masks for attention {backend!r}; use sdpa, eager or flash"
            )
        length = valid.shape[1]
        if whole and backend == "sdpa" and new in (1, length):
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()[-new:]
        # Padding sees itself, so that no row of probabilities is empty.
        itself = torch.eye(length, dtype=torch.bool, device=valid.device)[-new:]
        allowed = (causal & (valid[:, None, :] | itself))[:, None]
        if backend == "sdpa":
            return allowed
        lowest = torch.finfo(hidden.dtype).min
        return torch.zeros(allowed.shape, dtype=hidden.dtype, device=valid.device).masked_fill(~allowed, lowest)

    def leave(self, call: Call, output: Any) -> None:
        """Record what became of the images, and leave the meaning of the layers' lengths on the cache."""
        plan: Plan | None = call.plan
        if plan is None:
            return
        if self.entrance is not None:
            self.entrance.leave(call, output)
        stage = plan.stages[-1].origin
        last = stage
        if call.kept is not None:
            # From columns of what entered to those of the prompt.
            last = call.kept.indices.gather(1, stage.clamp_min(0)).masked_fill(stage < 0, -1)
        self.run.kept_positions = last
        self.run.layer_seconds = plan.seconds
        self.run.seconds = plan.before + plan.seconds
        results: dict[tuple[str, int, int], ImageResult] = {}
        for visual in plan.visuals:
            per_layer = tuple(visual.per_cut[sum(cut < layer for cut in self.cuts)] for layer in range(self.depth))
            results.setdefault(
                (visual.modality, visual.index, visual.row // plan.times),
                ImageResult(
                    visual.row // plan.times,
                    visual.modality,
                    visual.image.length,
                    len(visual.at),
                    None,
                    visual.image,
                    _reduction(visual, stage[visual.row].numpy(), self.run.seconds / len(plan.visuals)),
                    per_layer,
                    self.caching,
                    visual.not_encoded,
                ),
            )
        self.run.last = tuple(results.values())
        if len(plan.stages) == 1:
            return
        call.kept = KeptTokens(last.clamp_min(0), last >= 0)
        cache = getattr(output, "past_key_values", None)
        if cache is not None:
            cut_stages = _stages_of_cuts(plan, len(self.cuts))
            setattr(
                cache,
                _ATTRIBUTE,
                LayerCache(
                    plan.stages[0].origin.shape[1],
                    tuple(stage.valid for stage in cut_stages),
                    tuple(stage.shift for stage in cut_stages),
                ),
            )


def _stages_of_cuts(plan: Plan, cuts: int) -> list[Stage]:
    """The stage after each cut; a cut at which nothing went has that of the cut before."""
    found, stage = [], 0
    for cut in range(1, cuts + 1):
        if any(visual.per_cut[cut] != visual.per_cut[cut - 1] for visual in plan.visuals):
            stage += 1
        found.append(plan.stages[stage])
    return found


def _rotated_ones(attention: nn.Module, rotary: tuple[torch.Tensor, ...], width: int) -> torch.Tensor:
    """Rotated vectors of ones, (L, width).

    Parameters
    ----------
    attention
        The module whose way of rotating is used: families differ in which numbers make a pair, and in how many of a
        head's are rotated.
    rotary
        Cosines and sines, (1, L, d) each.
    width
        Numbers of a head.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (part.float() for part in rotary)
    ones = cos.new_ones((1, 1, cos.shape[1], width))
    rotate: Any = vars(sys.modules[type(attention).__module__]).get("apply_rotary_pos_emb", apply_rotary_pos_emb)
    rotated: torch.Tensor = rotate(ones, ones, cos, sin)[0][0, 0]
    return rotated


def _reduction(visual: Visual, origin: Ints, seconds: float) -> Reduction:
    """The output tokens of an image, as pairs of crop and token."""
    image = visual.image.layout
    pair_of = np.full((image.length, 2), SEPARATOR, dtype=np.int64)
    pair_of[image.separators, 1] = np.arange(len(image.separators))
    for c, crop in enumerate(image.crops):
        tokens = np.flatnonzero(crop.offsets >= 0)
        pair_of[crop.offsets[tokens]] = np.stack([np.full(len(tokens), c), tokens], axis=1)
    offsets = visual.offsets[np.searchsorted(visual.indices, origin[visual.at])]
    merged = {output: pair_of[sources] for output, sources in enumerate(visual.sources) if len(sources) > 1}
    return Reduction(pair_of[offsets], {}, merged, None, seconds)


def _prompt_mask(kept: KeptTokens, input_ids: torch.Tensor) -> Mask:
    """Tokens of a prompt, (B, S), that are not padding: images are found among all of them."""
    valid = np.zeros(tuple(input_ids.shape), dtype=np.bool_)
    for row, (indices, own) in enumerate(zip(kept.indices.cpu().numpy(), kept.valid.numpy(), strict=True)):
        valid[row, indices[own]] = True
    return valid


def _is_static(cache: Any) -> bool:
    return any(type(layer).__name__.startswith("Static") for layer in getattr(cache, "layers", ()))
