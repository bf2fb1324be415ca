"""The processor's half: reads budget and question of a request, and shortens the placeholders of its images.

Everything that decides which tokens are kept becomes part of the multimodal hash, so none of vLLM's caches (processor,
encoder, prefix) takes one question's image for another's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import PromptReplacement

from stacktok.core.budget import resolve_budget
from stacktok.models.base import adapter_for
from stacktok.models.query import word_ids
from stacktok.models.reader import PromptReader
from stacktok.serving.fields import ALL, FIELDS, KEEP, PROFILE, pack
from stacktok.serving.settings import KEY, Settings, Wish

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseMultiModalProcessor as Base
else:
    Base = object


# Stands for a request's wish where vLLM makes a request up.
_MADE_UP = object()


class Room(NamedTuple):
    """How many tokens an image has.

    Attributes
    ----------
    encoded
        Encoded positions of all its crops, of which fractions are taken.
    capacity
        Tokens that may be kept.
    eligible
        Which those are, (encoded,), where the model cannot tell from the size; None otherwise.
    """

    encoded: int
    capacity: int
    eligible: torch.Tensor | None = None


class PrunedProcessor(Base):
    """Stands before a family's processor class; a family says how much room an image has."""

    def __init__(self, info: Any, dummy_inputs: Any) -> None:
        super().__init__(info, dummy_inputs)
        config = info.get_hf_config()
        self.settings = Settings.read(getattr(config, KEY, {}))
        self._adapter = adapter_for(SimpleNamespace(config=config))
        self._own_reader: PromptReader | None = None

    def room(self, index: int, items: Any, processed: Mapping[str, Any]) -> Room:
        """How many tokens an image of a request has.

        Parameters
        ----------
        index
            Which image.
        items
            The request's images.
        processed
            What the family's processor made of them.
        """
        raise NotImplementedError

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Profiling inputs: unpruned, since a request may ask for any budget."""
        return replace(super().get_dummy_inputs(*args, **kwargs), hf_processor_mm_kwargs={KEY: _MADE_UP})

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request whose wish, in checked form, stands in for what the client wrote."""
        rest = dict(inputs.hf_processor_mm_kwargs)
        entry = rest.pop(KEY, None)
        wish = Wish(None) if entry is _MADE_UP else Wish.read(entry, self.settings.method.budget)
        if rest and self.settings.own_arguments_only:
            raise ValueError(
                f"mm_processor_kwargs has {sorted(rest)[0]!r}, and this server takes {KEY!r} alone from its clients; "
                "start it with --trust-request-mm-kwargs where they may set more"
            )
        plain = replace(inputs, hf_processor_mm_kwargs=rest)
        if not inputs.mm_data_items.get_all_counts().get("image"):
            return super().apply(plain, timing_ctx)
        images = super()._get_mm_hashes(plain)["image"]
        query = self._query_ids(wish, inputs.prompt)
        own = {"budget": wish.budget, "query": query, "images": images, "all": PROFILE if entry is _MADE_UP else ALL}
        return super().apply(replace(plain, hf_processor_mm_kwargs={**rest, KEY: own}), timing_ctx)

    def _query_ids(self, wish: Wish, prompt: Sequence[int]) -> list[int]:
        """Token ids of the query's words, as the transformers path of this package reads them."""
        if wish.budget is None or not self.settings.method.facts.query_aware:
            return []
        if not wish.from_prompt and not wish.query:
            return []
        reader = self._reader
        if wish.from_prompt:
            placeholder = reader.tokenizer.convert_tokens_to_ids(self.info.get_hf_processor().image_token)
            words = reader.prompt_words([token for token in prompt if token != placeholder])
        else:
            words = self._adapter.query_words(str(wish.query))
        return word_ids(reader.tokenizer, words)

    @property
    def _reader(self) -> PromptReader:
        """Reads questions with a tokenizer of its own, which no other thread sets to padding or truncation."""
        if self._own_reader is None:
            processor = copy.copy(self.info.get_hf_processor())
            processor.tokenizer = copy.deepcopy(processor.tokenizer)
            self._own_reader = PromptReader(
                processor, self._adapter, f"set mm_processor_kwargs['{KEY}']['query'] to say what the question is"
            )
        return self._own_reader

    def _get_mm_hashes(self, inputs: Any) -> Any:
        """The hash of an image: its own identity, and everything that decides what is kept of it."""
        rest, own = _split(inputs.hf_processor_mm_kwargs)
        if own is None:
            return super()._get_mm_hashes(inputs)
        # Numbers are written out: their bytes alone would not tell a count from a fraction.
        decides = {"method": repr(self.settings.method), "budget": repr(own["budget"]), "query": own["query"]}
        uuids = {**(inputs.mm_uuid_items or {}), "image": own["images"]}
        return super()._get_mm_hashes(
            replace(inputs, hf_processor_mm_kwargs={**rest, KEY: decides}, mm_uuid_items=uuids)
        )

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, object]:
        kwargs = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)
        rest, own = _split(kwargs)
        if own is None:
            return kwargs
        images = [image for image, cached in zip(own["images"], mm_is_cached["image"], strict=True) if not cached]
        return {**rest, KEY: {**own, "images": images}}

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """The family's own processing, and our fields."""
        rest, own = _split(hf_kwargs)
        processed = super()._apply_hf_processor_main(mm_items, rest)
        if own is None or not mm_items.get_all_counts().get("image"):
            return processed
        items = mm_items["image"]
        if not isinstance(items, ImageProcessorItems):
            raise ValueError(
                "image embeddings cannot be pruned, as they come without vision features; send the picture"
            )
        rooms = [self.room(index, items, processed) for index in range(len(items))]
        budget = own["budget"]
        keep = [own["all"] if budget is None else resolve_budget(budget, room.encoded, room.capacity) for room in rooms]
        eligible = [room.eligible for room in rooms if room.eligible is not None]
        processed.update(pack(keep, own["query"], own["images"], eligible or None))
        return processed

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        fields = super()._get_mm_fields_config(hf_inputs, _split(hf_processor_mm_kwargs)[0])
        own = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in FIELDS}
        return {**fields, **own}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Any:
        """The family's placeholders, as many as the image keeps tokens."""
        updates = super()._get_prompt_updates(mm_items, _split(hf_processor_mm_kwargs)[0], out_mm_kwargs)
        return [_shortened(update, out_mm_kwargs) if update.modality == "image" else update for update in updates]


def _split(kwargs: Mapping[str, object]) -> tuple[dict[str, object], Any]:
    """A request's processor arguments without ours, and ours."""
    rest = dict(kwargs)
    return rest, rest.pop(KEY, None)


def _shortened(update: Any, out_mm_kwargs: Any) -> Any:
    def replacement(index: int) -> Any:
        tokens = update.replacement(index)
        keep = int(out_mm_kwargs["image"][index][KEEP].data.item())
        return tokens if keep < 0 else tokens[:keep]

    return PromptReplacement(modality="image", target=update.target, replacement=replacement)
