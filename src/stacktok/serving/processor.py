"""The processor's half: reads budget and question of a request, and shortens the placeholders of its images.

Everything that decides which tokens are kept becomes part of the multimodal hash, so none of vLLM's caches (processor,
encoder, prefix) takes one question's image for another's.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import PromptReplacement

from stacktok.core.budget import resolve_budget
from stacktok.models.base import ModelAdapter, image_inputs
from stacktok.models.pictures import check_picture
from stacktok.models.query import word_ids
from stacktok.models.reader import PromptReader
from stacktok.models.registry import adapter_for
from stacktok.serving.fields import ALL, FIELDS, KEEP, PROFILE, pack
from stacktok.serving.pictures import Pictures
from stacktok.serving.question import QUERY_ROWS, own_ids, prompt_ids
from stacktok.serving.settings import KEY, RequestOptions, Settings, check_foreign

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseMultiModalProcessor as Base
else:
    Base = object


# Stands for a request's options where vLLM makes a request up.
_MADE_UP = object()

# Words whose token ids are kept, and the longest such: the tokenizer takes a millisecond for a question, and questions
# share their words.
_WORDS, _LETTERS = 1 << 14, 32


@functools.cache
def _configured(entry: str, model_type: str) -> tuple[Settings, ModelAdapter]:
    """Settings and adapter of a served model, looked up once per process.

    vLLM makes a processor for every chat request, and each of the two lookups scans all installed packages.

    Parameters
    ----------
    entry
        The ``stacktok`` entry of the model's config, as JSON.
    model_type
        The config's.
    """
    adapter = adapter_for(SimpleNamespace(config=SimpleNamespace(model_type=model_type)))
    return Settings.read(json.loads(entry)), adapter


class PrunedProcessor(Base):
    """Stands before a family's processor class; the family's adapter says how many tokens an image has."""

    def __init__(self, info: Any, dummy_inputs: Any) -> None:
        super().__init__(info, dummy_inputs)
        config = info.get_hf_config()
        self.settings, self._adapter = _configured(json.dumps(getattr(config, KEY, {})), config.model_type)
        self._pictures = Pictures()
        self._requests = itertools.count(1)

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Profiling inputs: unpruned, since a request may ask for any budget."""
        return replace(super().get_dummy_inputs(*args, **kwargs), hf_processor_mm_kwargs={KEY: _MADE_UP})

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request whose options, in checked form, stand in for what the client wrote."""
        rest = dict(inputs.hf_processor_mm_kwargs)
        entry = rest.pop(KEY, None)
        options = RequestOptions(None) if entry is _MADE_UP else RequestOptions.read(entry, self.settings.method.budget)
        if self.settings.own_arguments_only:
            check_foreign(rest)
        plain = replace(inputs, hf_processor_mm_kwargs=rest)
        if not inputs.mm_data_items.get_all_counts().get("image"):
            return super().apply(plain, timing_ctx)
        plain = self._with_known_pictures(plain)
        images = super()._get_mm_hashes(plain)["image"]
        query = self._query_ids(options, inputs.prompt)
        own = {
            "budget": options.budget,
            "query": query,
            "images": images,
            "all": PROFILE if entry is _MADE_UP else ALL,
            "request": next(self._requests),
        }
        return super().apply(replace(plain, hf_processor_mm_kwargs={**rest, KEY: own}), timing_ctx)

    def _with_known_pictures(self, inputs: Any) -> Any:
        """Inputs in which a picture that is named by its uuid alone stands in full, where it was sent before.

        To vLLM a further question on a picture is another picture, which its caches do not hold.
        """
        uuids = (inputs.mm_uuid_items or {}).get("image")
        items = inputs.mm_data_items["image"]
        if uuids is None or not isinstance(items, ImageProcessorItems):
            return inputs
        pictures = self._pictures.resolve(uuids, items.data)
        if all(new is old for new, old in zip(pictures, items.data, strict=True)):
            return inputs
        parsed = self.info.parse_mm_data({"image": pictures}, validate=False)
        rest = {name: found for name, found in inputs.mm_data_items.items() if name != "image"}
        return replace(inputs, mm_data_items=type(inputs.mm_data_items)({**rest, "image": parsed["image"]}))

    def _query_ids(self, options: RequestOptions, prompt: Sequence[int]) -> list[int]:
        """Token ids of the query's words, as the transformers path of this package reads them."""
        if options.budget is None or not self.settings.method.query_aware:
            return []
        if not options.from_prompt and not options.query:
            return []
        if options.from_prompt:
            text = [token for token in prompt if token != self._placeholder]
            words = self._reader.prompt_words(text)
            if self.settings.method.query_rows == "prompt":
                return self._reader.prompt_rows(text, words)[-QUERY_ROWS:]
            return prompt_ids(words, self._ids_of)
        return own_ids(self._reader.question_words(str(options.query)), self._ids_of)

    @functools.cached_property
    def hf_processor(self) -> Any:
        """The processor of transformers under the server's own arguments; vLLM looks it up at every call."""
        return self.info.get_hf_processor()

    @functools.cached_property
    def _reader(self) -> PromptReader:
        """Reads questions with a tokenizer of its own, which no other thread sets to padding or truncation."""
        processor = copy.copy(self.hf_processor)
        processor.tokenizer = copy.deepcopy(processor.tokenizer)
        return PromptReader(
            processor, self._adapter, f"set mm_processor_kwargs['{KEY}']['query'] to say what the question is"
        )

    @functools.cached_property
    def _placeholder(self) -> int:
        """Token id of an image's placeholder."""
        return int(self._reader.tokenizer.convert_tokens_to_ids(self.hf_processor.image_token))

    @functools.cached_property
    def _ids_of(self) -> Callable[[str], list[int]]:
        """Token ids of one word."""
        tokenizer, blanks = self._reader.tokenizer, self.settings.method.keeps_blank_rows

        def ids_of(word: str) -> list[int]:
            return word_ids(tokenizer, [word], keep_blanks=blanks)

        known = functools.lru_cache(_WORDS)(ids_of)
        return lambda word: known(word) if len(word) <= _LETTERS else ids_of(word)

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
        pictures = mm_items.get("image")
        sizes = []
        if own is not None and own["all"] != PROFILE and isinstance(pictures, ImageProcessorItems):
            sizes = [pictures.get_image_size(index) for index in range(len(pictures))]
        for size in sizes:
            check_picture(size.width, size.height)
        processed = super()._apply_hf_processor_main(mm_items, rest)
        if own is None or not mm_items.get_all_counts().get("image"):
            return processed
        items = mm_items["image"]
        if not isinstance(items, ImageProcessorItems):
            raise ValueError(
                "image embeddings cannot be pruned, as they come without vision features; send the picture"
            )
        config, processor, count = self.info.get_hf_config(), self.hf_processor, len(items)
        layouts = [
            self._adapter.layout(config, image_inputs(processed, index, count), processor) for index in range(count)
        ]
        for size, one in zip(sizes, layouts, strict=False):
            check_picture(size.width, size.height, tokens=one.n)
        budget = own["budget"]
        keep = [own["all"] if budget is None else resolve_budget(budget, one.n, one.capacity) for one in layouts]
        eligible = None
        if self._adapter.eligible_from_pixels:
            eligible = [torch.from_numpy(np.concatenate([crop.eligible for crop in one.crops])) for one in layouts]
        processed.update(pack(keep, own["query"], own["images"], eligible, own["request"]))
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
