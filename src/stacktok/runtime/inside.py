"""The hooks of a method that works inside the language model.

The prompt enters whole. At a cut the attention module of one layer is read for the wanted rows alone, and a pre-hook
on the next layer drops the hidden states that go and appends those that were made of them. From there on the layers
are given a shorter sequence with positions and a mask of its own, so that the caches of the layers differ in length;
what those lengths mean is left on the cache, where later steps find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stacktok.core.attention import row_attention
from stacktok.core.budget import Budget
from stacktok.core.inputs import Mask
from stacktok.core.tokens import SEPARATOR, EncodedImage, Ints, Reduction
from stacktok.models.base import ModelAdapter
from stacktok.runtime.compaction import Layout, count_positions, padding_of
from stacktok.runtime.run import ImageResult
from stacktok.runtime.session import Call, Session, _Feed
from stacktok.runtime.tap import Tap

if TYPE_CHECKING:
    from stacktok.methods.inside import LayerMethod

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
    mask
        What the layers are given as attention mask.
    shift
        By how much positions of later tokens are lowered, (B,); None where positions are kept.
    """

    origin: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    shift: torch.Tensor | None = None

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
    columns
        Its columns in the prompt.
    raters
        Columns of the text tokens whose attention counts.
    keeps
        Tokens that stay at each cut.
    at
        Its columns in the current stage.
    sources
        What each of those was made of, as places of the image.
    per_cut
        Its number of tokens before the first cut and after each.
    scores
        What its tokens are ranked by at the next cut.
    """

    row: int
    modality: str
    index: int
    image: EncodedImage
    columns: Ints
    raters: Ints
    keeps: tuple[int, ...]
    at: Ints
    sources: list[Ints]
    per_cut: list[int]
    scores: torch.Tensor | None = None


@dataclass(eq=False)
class Plan:
    """What happens to one prompt or batch while the layers run; times are those before and between the layers."""

    visuals: list[Visual]
    stages: list[Stage]
    pad_right: bool
    embeds: torch.Tensor
    times: int = 1
    before: float = 0.0
    seconds: float = 0.0
    positions: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def rows(self, row: int) -> list[Visual]:
        """The images of a row, in order."""
        return [visual for visual in self.visuals if visual.row == row]


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What the layers of a cache hold after a prompt that was cut inside.

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


@dataclass(eq=False)
class InsideCall(Call):
    """A forward pass whose layers are cut, or that continues one."""

    plan: Plan | None = None
    held: LayerCache | None = None
    fresh: torch.Tensor | None = field(default=None)


class InsideSession(Session):
    """A `LayerMethod` on a model while it is attached.

    Parameters
    ----------
    method, model, processor, adapter
        Checked by `Attachment`.
    """

    def __init__(self, method: LayerMethod, model: Any, processor: Any, adapter: ModelAdapter) -> None:
        untyped: Any = method
        super().__init__(untyped, model, processor, adapter)
        self.inside = method
        self.depth = len(adapter.layers(model))
        self.cuts = method.layers(self.depth)
        positions = method.positions or method.default_positions
        self.keep_positions = adapter.mrope or positions == "kept"

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set every hook; ``undo`` receives what takes each away again."""
        super().attach(undo)
        layers = self.adapter.layers(self.model)
        uncompiled: Any = torch.compiler.disable
        for cut, layer in enumerate(self.cuts):
            attention: Any = layers[layer]
            Tap(attention.self_attn, self._reader(cut)).attach(undo)
        for number in range(self.cuts[0], self.depth):
            hook = uncompiled(self._layer(number))
            undo.append(layers[number].register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _prune(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the cuts of a prompt, or find what an earlier one left on the cache."""
        call = self._call
        if call is None:
            return
        self._local.call = call = InsideCall(call.input_ids, None, call.past, call.outputs)
        cache = kwargs.get("past_key_values")
        held: LayerCache | None = getattr(cache, _ATTRIBUTE, None)
        if held is not None and call.past:
            self._continue_layers(call, held, cache, kwargs)
        if call.outputs or not call.past:
            self.run.kept_positions = None
        if call.outputs and self.run.budget is not None:
            begin = time.perf_counter()
            call.plan = self._plan(call, self.run.budget, cache, kwargs)
            planned = time.perf_counter() - begin
            call.plan.before = planned + sum(self._encoded(m, output).seconds for m, output in call.outputs.items())

    def _continue_layers(self, call: InsideCall, held: LayerCache, cache: Any, kwargs: dict[str, Any]) -> None:
        embeds, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        name = type(self.inside).__name__
        if call.outputs:
            raise ValueError(f"{name} cannot add an image to a cache that it has cut; start without past_key_values")
        if call.input_ids is not None and call.input_ids.shape[1] > 1:
            self._refuse_another_question(call.input_ids)
        batch, new = embeds.shape[:2]
        rows = len(held.valid[0])
        if batch % rows:
            raise ValueError(
                f"past_key_values was pruned for {rows} prompts and is continued with {batch}; keep the batch as it was"
            )
        call.held = LayerCache(
            held.length,
            tuple(valid.repeat_interleave(batch // rows, 0) for valid in held.valid),
            tuple(None if shift is None else shift.repeat_interleave(batch // rows, 0) for shift in held.shift),
        )
        for layer in range(self.cuts[0] + 1, self.depth):
            cut = sum(number < layer for number in self.cuts) - 1
            expected = held.valid[cut].shape[1] + call.past - held.length
            if call.past < held.length or int(cache.get_seq_length(layer)) != expected:
                raise ValueError(
                    f"the layers of past_key_values have lengths that do not belong together, or lost a part of the "
                    f"prompt; {name} leaves caches of different lengths: start without past_key_values"
                )
        call.fresh = torch.ones((batch, new), dtype=torch.bool, device=embeds.device)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            call.fresh = mask[:, -new:].bool().to(embeds.device)

    @torch.no_grad()
    def _plan(self, call: Call, budget: Budget, cache: Any, kwargs: dict[str, Any]) -> Plan:
        """The images of every row, their raters, and how many tokens they keep at every cut."""
        name = type(self.inside).__name__
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
        valid: Mask = np.broadcast_to(True if padding is None else padding, (batch, length))
        feeds, placeholders = {}, {}
        for modality, output in call.outputs.items():
            feeds[modality] = _Feed(modality, self._encoded(modality, output), output.pooler_output)
            placeholders[modality] = self._placeholders(call, modality)
        visuals = []
        for row in range(batch):
            held = np.logical_or.reduce([found[row] for found in placeholders.values()])
            text = np.flatnonzero(valid[row] & ~held)
            for modality, feed in feeds.items():
                for _, index, columns in feed.take(np.flatnonzero(placeholders[modality][row])):
                    after = text[text > columns[-1]]
                    if not len(after):
                        after = np.flatnonzero(valid[row])[-1:]
                    visual_rows, text_rows = (
                        embeds[row, torch.from_numpy(columns)],
                        embeds[row, torch.from_numpy(after)],
                    )
                    n = len(columns)
                    visuals.append(
                        Visual(
                            row=row,
                            modality=modality,
                            index=index,
                            image=feed.encoded.images[index],
                            columns=columns,
                            raters=after[self.inside.raters(visual_rows, text_rows)],
                            keeps=self.inside.keeps(self.depth, n, budget),
                            at=columns,
                            sources=[np.array([place]) for place in range(n)],
                            per_cut=[n],
                        )
                    )
        visuals.sort(key=lambda visual: (visual.row, int(visual.columns[0])))
        origin = torch.arange(length).expand(batch, length).masked_fill(~torch.from_numpy(valid.copy()), -1)
        times = max((feed.times for feed in feeds.values()), default=1)
        return Plan(visuals, [Stage(origin)], not bool(valid[:, -1].all()), embeds, times)

    def _reader(self, cut: int) -> Callable[[torch.Tensor, torch.Tensor, float], None]:
        """Scores the images' tokens by the attention of a cut's layer."""

        def read(query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
            call = self._call
            plan = call.plan if isinstance(call, InsideCall) else None
            if plan is None or plan.rotation is None:
                return
            begin = time.perf_counter()
            origin = plan.stages[-1].origin
            valid = (origin >= 0).to(query.device)
            causal = torch.arange(origin.shape[1], device=query.device)
            for visual in plan.visuals:
                if visual.keeps[cut] >= len(visual.at):
                    continue
                b = visual.row
                # Text columns only move; each stands for itself in every stage.
                places = {int(column): at for at, column in enumerate(origin[b].tolist())}
                rows = torch.tensor([places[int(column)] for column in visual.raters], device=query.device)
                columns = torch.from_numpy(visual.at).to(query.device)
                allowed = (causal[None, :] <= rows[:, None]) & valid[b][None, :]
                attention = row_attention(query[b][:, rows], key[b], scaling, allowed)[..., columns]
                visual.scores = self.inside.score(attention, _rotation(plan.rotation, b, rows, columns))
            plan.seconds += time.perf_counter() - begin

        return read

    def _layer(self, number: int) -> Callable[..., Any]:
        """What a layer is given: after a cut a shorter sequence, and always what belongs to its stage."""
        cut_here = self.cuts.index(number - 1) if number - 1 in self.cuts else None
        stage = sum(layer < number for layer in self.cuts)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = self._call
            if not isinstance(call, InsideCall):
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs = dict(kwargs)
            if call.plan is not None:
                plan = call.plan
                if cut_here is not None:
                    begin = time.perf_counter()
                    hidden = self._cut(plan, cut_here, hidden, kwargs)
                    plan.seconds += time.perf_counter() - begin
                current = plan.stages[-1]
                if current.rotation is not None:
                    kwargs.update(position_embeddings=current.rotation, attention_mask=current.mask, position_ids=None)
                if number in self.cuts:
                    plan.rotation = kwargs["position_embeddings"]
                    if plan.positions is None:
                        plan.positions = kwargs.get("position_ids")
            elif call.held is not None and stage:
                self._step(call, call.held, stage - 1, hidden, kwargs)
            else:
                return None
            return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

        return hook

    def _cut(self, plan: Plan, cut: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden states that go on, (B, L, d); appends the stage that they belong to."""
        current = plan.stages[-1]
        if all(visual.keeps[cut] >= len(visual.at) for visual in plan.visuals):
            for visual in plan.visuals:
                visual.per_cut.append(len(visual.at))
            return hidden
        rows = [self._cut_row(plan, row, cut, hidden[row], current.origin[row]) for row in range(len(hidden))]
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
        stage.mask = self._mask(stage.valid.to(hidden.device), length, shorter)
        plan.stages.append(stage)
        return shorter

    def _cut_row(
        self, plan: Plan, row: int, cut: int, states: torch.Tensor, origin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left of one row: its states, (l, d), and the columns that they stand for, (l,)."""
        from stacktok.methods.inside import top

        pieces: list[torch.Tensor] = []
        columns: list[torch.Tensor] = []
        valid = (origin >= 0).nonzero()[:, 0].numpy()
        done = int(valid[0]) if len(valid) else 0
        end = int(valid[-1]) + 1 if len(valid) else 0
        count = 0

        def add(what: torch.Tensor, where: torch.Tensor) -> None:
            nonlocal count
            pieces.append(what)
            columns.append(where)
            count += len(what)

        for visual in plan.rows(row):
            first, last = int(visual.at[0]), int(visual.at[-1]) + 1
            add(states[done:first], origin[done:first])
            done = last
            own, own_origin = states[first:last], origin[first:last]
            start = count
            if visual.keeps[cut] >= len(own):
                add(own, own_origin)
            elif visual.scores is None:
                raise ValueError(
                    f"layer {self.cuts[cut]} ran without showing its attention; {type(self.inside).__name__} needs a "
                    "model whose attention goes through transformers' AttentionInterface"
                )
            else:
                kept = top(visual.scores, visual.keeps[cut])
                gone = np.setdiff1d(np.arange(len(own)), kept)
                going = torch.from_numpy(gone).to(own.device)
                made, centres, groups = self.inside.recycle(own[going], visual.scores[going.to(visual.scores.device)])
                add(own[torch.from_numpy(kept).to(own.device)], own_origin[torch.from_numpy(kept)])
                add(made.to(own), own_origin[torch.from_numpy(gone[centres])])
                visual.sources = [visual.sources[i] for i in kept] + [
                    np.sort(np.concatenate([visual.sources[i] for i in gone[group]])) for group in groups
                ]
                visual.scores = None
            visual.at = np.arange(start, count, dtype=np.int64)
            visual.per_cut.append(count - start)
        add(states[done:end], origin[done:end])
        return torch.cat(pieces), torch.cat(columns)

    def _place(self, plan: Plan, stage: Stage, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Rotary positions of a stage: the columns' own, or numbered anew."""
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

    def _step(self, call: InsideCall, held: LayerCache, cut: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Mask and positions of later tokens in the layers after a cut."""
        fresh = call.fresh
        if fresh is None:
            return
        valid, shift = held.valid[cut].to(hidden.device), held.shift[cut]
        since = torch.ones((len(valid), call.past - held.length), dtype=torch.bool, device=hidden.device)
        kwargs["attention_mask"] = self._mask(torch.cat([valid, since, fresh], 1), fresh.shape[1], hidden)
        if shift is not None and kwargs.get("position_ids") is not None:
            language_model: Any = self.adapter.language_model(self.model)
            positions = kwargs["position_ids"] - shift.to(hidden.device)[:, None]
            kwargs["position_embeddings"] = language_model.rotary_emb(hidden, position_ids=positions)
        kwargs["position_ids"] = None

    def _mask(self, valid: torch.Tensor, new: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """The attention mask of the last ``new`` of all columns, as the attention backend wants it.

        Parameters
        ----------
        valid
            Columns that are not padding, (B, L).
        new
            Columns at hand.
        hidden
            Whose type an additive mask has.
        """
        config: Any = self.adapter.language_model(self.model).config
        backend = config._attn_implementation
        whole = bool(valid.all())
        if "flash" in backend:
            return None if whole else valid.long()
        if backend not in ("sdpa", "eager"):
            raise ValueError(
                f"{type(self.inside).__name__} cannot make masks for attention {backend!r}; use sdpa, eager or flash"
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

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record what became of the images, and leave the meaning of the layers' lengths on the cache."""
        call = self._call
        if not isinstance(call, InsideCall) or call.plan is None:
            return
        plan = call.plan
        last = plan.stages[-1].origin
        self.run.kept_positions = last
        self.run.layer_seconds = plan.seconds
        self.run.seconds = plan.before + plan.seconds
        results: dict[tuple[str, int], ImageResult] = {}
        for visual in plan.visuals:
            per_layer = tuple(visual.per_cut[sum(cut < layer for cut in self.cuts)] for layer in range(self.depth))
            results.setdefault(
                (visual.modality, visual.index),
                ImageResult(
                    visual.row // plan.times,
                    visual.modality,
                    len(visual.columns),
                    len(visual.at),
                    None,
                    visual.image,
                    _reduction(visual, last[visual.row].numpy(), self.run.seconds / len(plan.visuals)),
                    per_layer,
                ),
            )
        self.run.last = tuple(results.values())
        if len(plan.stages) == 1:
            return
        call.layout = Layout(last.clamp_min(0), last >= 0, ())
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


def _rotation(rotation: Sequence[torch.Tensor], row: int, raters: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Products of rotated vectors of ones, for raters and image tokens, (R, n)."""
    cos, sin = (part[row if len(part) > 1 else 0].float() for part in rotation)
    half = cos.shape[-1] // 2
    # Rotating ones by halves subtracts the sines in the first half and adds them in the second.
    sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(cos)
    ones = cos + sign * sin
    return ones[raters] @ ones[columns].T


def _reduction(visual: Visual, origin: Ints, seconds: float) -> Reduction:
    """What is left of an image, told by its crops' tokens."""
    image = visual.image
    pair_of = np.full((image.length, 2), SEPARATOR, dtype=np.int64)
    pair_of[image.separators, 1] = np.arange(len(image.separators))
    for c, crop in enumerate(image.crops):
        tokens = np.flatnonzero(crop.places >= 0)
        pair_of[crop.places[tokens]] = np.stack([np.full(len(tokens), c), tokens], axis=1)
    places = np.searchsorted(visual.columns, origin[visual.at])
    merged = {output: pair_of[sources] for output, sources in enumerate(visual.sources) if len(sources) > 1}
    return Reduction(pair_of[places], {}, merged, None, seconds)


def _is_static(cache: Any) -> bool:
    return any(type(layer).__name__.startswith("Static") for layer in getattr(cache, "layers", ()))
