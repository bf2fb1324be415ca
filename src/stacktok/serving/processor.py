"""The processor's half: reads budget and question of a request, and shortens the placeholders of its images and videos.

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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, VideoProcessorItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdateDetails

from stacktok.core.budget import resolve_budget
from stacktok.core.tokens import ImageLayout
from stacktok.methods.video_method import VideoMethod
from stacktok.models.base import ModelAdapter
from stacktok.models.pictures import DEFAULT_LIMITS, check_picture
from stacktok.models.query import word_ids
from stacktok.models.reader import PromptReader
from stacktok.models.registry import adapter_for
from stacktok.serving.fields import ALL, NAMES, PROFILE, field, pack
from stacktok.serving.inputs import item_inputs
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
def _configured(entry: str, model_type: str, tower: str | None) -> tuple[Settings, ModelAdapter]:
    """Settings and adapter of a served model, looked up once per process.

    vLLM makes a processor for every chat request, and each of the two lookups scans all installed packages.

    Parameters
    ----------
    entry
        The ``stacktok`` entry of the model's config, as JSON.
    model_type, tower
        The config's, and that of its vision tower.
    """
    config = SimpleNamespace(model_type=model_type, vision_config=SimpleNamespace(model_type=tower))
    adapter = adapter_for(SimpleNamespace(config=config))
    return Settings.read(json.loads(entry)), adapter


class PrunedProcessor(Base):
    """Stands before a family's processor class; the family's adapter says how many tokens an image has.

    Attributes
    ----------
    modalities
        What is pruned.
    interleaved
        Modalities whose tokens stand between texts of the prompt (tiles that are named, frames with their time). How
        many tokens stand where only the selection says, so the model puts such texts in.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    interleaved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, info: Any, dummy_inputs: Any) -> None:
        super().__init__(info, dummy_inputs)
        config = info.get_hf_config()
        tower = getattr(getattr(config, "vision_config", None), "model_type", None)
        self.settings, self._adapter = _configured(json.dumps(getattr(config, KEY, {})), config.model_type, tower)
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
        counts = inputs.mm_data_items.get_all_counts()
        served = [modality for modality in self.modalities if counts.get(modality)]
        if not served:
            return super().apply(plain, timing_ctx)
        plain = self._with_known_pictures(plain)
        hashes = super()._get_mm_hashes(plain)
        query = self._query_ids(options, inputs.prompt)
        own = {
            "budget": options.budget,
            "query": query,
            "items": {modality: hashes[modality] for modality in served},
            "all": PROFILE if entry is _MADE_UP else ALL,
            "request": next(self._requests),
        }
        return super().apply(replace(plain, hf_processor_mm_kwargs={**rest, KEY: own}), timing_ctx)

    def _with_known_pictures(self, inputs: Any) -> Any:
        """Inputs in which a picture that is named by its uuid alone stands in full, where it was sent before.

        To vLLM a further question on a picture is another picture, which its caches do not hold.
        """
        uuids = (inputs.mm_uuid_items or {}).get("image")
        items = inputs.mm_data_items.get("image")
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
            text = [token for token in prompt if token not in self._placeholders]
            known = options.question
            words = self._reader.prompt_words(text) if known is None else self._reader.question_words(known)
            if self.settings.method.query_rows == "prompt":
                rows = self._reader.prompt_rows(text, words, known)[-QUERY_ROWS:]
                if rows:
                    return rows
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
    def _placeholders(self) -> set[int]:
        """Token ids of the placeholders."""
        names = [getattr(self.hf_processor, f"{modality}_token", None) for modality in ("image", "video")]
        return {int(self._reader.tokenizer.convert_tokens_to_ids(name)) for name in names if name is not None}

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
        uuids = {**(inputs.mm_uuid_items or {}), **own["items"]}
        return super()._get_mm_hashes(
            replace(inputs, hf_processor_mm_kwargs={**rest, KEY: decides}, mm_uuid_items=uuids)
        )

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, object]:
        kwargs = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)
        rest, own = _split(kwargs)
        if own is None:
            return kwargs
        items = {
            modality: [item for item, cached in zip(known, mm_is_cached[modality], strict=True) if not cached]
            for modality, known in own["items"].items()
        }
        return {**rest, KEY: {**own, "items": items}}

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """The family's own processing, and our fields."""
        rest, own = _split(hf_kwargs)
        counts = mm_items.get_all_counts()
        served = [] if own is None else [modality for modality in self.modalities if counts.get(modality)]
        real = own is not None and own["all"] != PROFILE
        for modality in served if real else ():
            for width, height in _sizes(mm_items[modality]):
                check_picture(width, height)
        processed = super()._apply_hf_processor_main(mm_items, rest)
        for modality in served:
            self._check_items(modality, mm_items[modality])
            count = counts[modality]
            layouts = [self._layout(processed, index, count, modality) for index in range(count)]
            if real:
                _check_tokens(modality, mm_items[modality], layouts)
            budget = own["budget"]
            # A method for videos leaves images as they are.
            whole = budget is None or (modality == "image" and isinstance(self.settings.method, VideoMethod))
            keep = [own["all"] if whole else resolve_budget(budget, one.n, one.capacity) for one in layouts]
            eligible = text = None
            if self._adapter.eligible_from_pixels:
                eligible = [torch.from_numpy(np.concatenate([crop.eligible for crop in one.crops])) for one in layouts]
            if modality in self.interleaved:
                text = self._texts(modality, mm_items, rest, processed)
            items = own["items"][modality]
            processed.update(pack(modality, keep, own["query"], items, own["request"], eligible=eligible, text=text))
        return processed

    def _check_items(self, modality: str, items: Any) -> None:
        """Refuse what comes without pixels, and videos that vLLM would normalise otherwise than transformers."""
        if not isinstance(items, (ImageProcessorItems, VideoProcessorItems)):
            raise ValueError(
                f"{modality} embeddings cannot be pruned, as they come without vision features; send the "
                + ("picture" if modality == "image" else "video")
            )
        if modality == "video" and self.info.ctx.get_mm_config().mm_device_do_normalize:
            halves = [getattr(self.hf_processor, f"{half}_processor") for half in ("image", "video")]
            image, video = ([list(half.image_mean), list(half.image_std)] for half in halves)
            if image != video:
                raise ValueError(
                    f"videos of this model are normalised by mean and deviation {video}, pictures by {image}, and vLLM "
                    "takes the latter for both; start the server with --no-mm-device-do-normalize"
                )

    def _layout(self, processed: Any, index: int, count: int, modality: str) -> ImageLayout:
        """How one image or video fills the prompt."""
        inputs = item_inputs(processed, index, count, modality)
        return self._adapter.layout(self.info.get_hf_config(), inputs, self.hf_processor)

    def _texts(self, modality: str, mm_items: Any, kwargs: Mapping[str, object], processed: Any) -> list[torch.Tensor]:
        """Tokens between those of each item, and how many of the item's stand before each, (2, s)."""
        fields = super()._get_mm_fields_config(processed, kwargs)
        items = MultiModalKwargsItems.from_hf_inputs(processed, fields)
        updates = super()._get_prompt_updates(mm_items, kwargs, items)
        (update,) = [update for update in updates if update.modality == modality]
        return [Placeholders.of(update.replacement(index)).text() for index in range(len(mm_items[modality]))]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        fields = super()._get_mm_fields_config(hf_inputs, _split(hf_processor_mm_kwargs)[0])
        own = {
            field(modality, name): MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
            for modality in self.modalities
            for name in NAMES
        }
        return {**fields, **own}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Any:
        """The family's placeholders, as many as the image keeps tokens."""
        updates = super()._get_prompt_updates(mm_items, _split(hf_processor_mm_kwargs)[0], out_mm_kwargs)
        return [
            self._shortened(update, out_mm_kwargs) if update.modality in self.modalities else update
            for update in updates
        ]

    def _shortened(self, update: Any, out_mm_kwargs: Any) -> Any:
        modality = update.modality

        def replacement(index: int) -> Any:
            found = update.replacement(index)
            keep = int(out_mm_kwargs[modality][index][field(modality, "keep")].data.item())
            placeholders = Placeholders.of(found)
            if modality in self.interleaved:
                own = placeholders.count if keep < 0 else keep
                return placeholders.run(own + placeholders.text().shape[1])
            return found if keep < 0 else placeholders.run(keep)

        return PromptReplacement(modality=modality, target=update.target, replacement=replacement)


class Placeholders:
    """The part of the prompt that stands for an unpruned image: runs of its placeholder, and texts.

    Parameters
    ----------
    ids
        Token ids, (s,).
    mask
        Which are the image's, (s,).
    """

    def __init__(self, ids: list[int], mask: torch.Tensor) -> None:
        self.ids, self.mask = ids, mask
        own = mask.nonzero()[:, 0]
        self.first, self.last, self.count = int(own[0]), int(own[-1]), len(own)

    @classmethod
    def of(cls, found: Any) -> Placeholders:
        """From what a prompt update gives."""
        if not isinstance(found, PromptUpdateDetails):
            return cls(list(found), torch.ones(len(found), dtype=torch.bool))
        mask = found.is_embed(found.full) if found.is_embed else torch.ones(len(found.full), dtype=torch.bool)
        return cls(list(found.full), mask)

    def text(self) -> torch.Tensor:
        """Tokens between the image's own, and how many of those stand before each, (2, s)."""
        before = self.mask.cumsum(0)
        between = ~self.mask & (before > 0) & (before < self.count)
        return torch.stack([torch.tensor(self.ids)[between], before[between]])

    def run(self, length: int) -> Any:
        """One run of placeholders, with the texts before the first and behind the last; the others are left out."""
        head, tail = self.ids[: self.first], self.ids[self.last + 1 :]
        ids = head + [self.ids[self.first]] * length + tail
        if not head and not tail:
            return ids
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(head) : len(head) + length] = True
        return PromptUpdateDetails(ids, is_embed=lambda full: mask)


def _sizes(items: Any) -> list[tuple[int, int]]:
    """Widths and heights of pictures, or of the first frames of videos; none where there are no pixels."""
    if isinstance(items, ImageProcessorItems):
        sizes = [items.get_image_size(index) for index in range(len(items))]
        return [(size.width, size.height) for size in sizes]
    if not isinstance(items, VideoProcessorItems):
        return []
    return [_frame_size(items.get(index)) for index in range(len(items))]


def _frame_size(video: Any) -> tuple[int, int]:
    """Width and height of a video's first frame; a video may come with its metadata."""
    frame = (video[0] if isinstance(video, tuple) else video)[0]
    if hasattr(frame, "size") and isinstance(frame.size, tuple):
        return frame.size[0], frame.size[1]
    height, width = frame.shape[:2] if frame.shape[-1] in (1, 3, 4) else frame.shape[-2:]
    return int(width), int(height)


def _check_tokens(modality: str, items: Any, layouts: Sequence[ImageLayout]) -> None:
    """Refuse what has too many tokens."""
    for (width, height), layout in zip(_sizes(items), layouts, strict=True):
        if modality == "image":
            check_picture(width, height, tokens=layout.n)
        elif layout.n > DEFAULT_LIMITS.tokens:
            raise ValueError(
                f"the video has {layout.n} visual tokens; give fewer or smaller frames, of at most "
                f"{DEFAULT_LIMITS.tokens} tokens"
            )


def _split(kwargs: Mapping[str, object]) -> tuple[dict[str, object], Any]:
    """A request's processor arguments without ours, and ours."""
    rest = dict(kwargs)
    return rest, rest.pop(KEY, None)
