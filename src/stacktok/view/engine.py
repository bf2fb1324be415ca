"""The model behind the page: pictures encoded once, questions selected once, answers generated on demand.

Everything here runs on the one thread of `Jobs`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from stacktok.core.crops import Crop, PreparedCrops, prepare_crops
from stacktok.core.record import CropSelection, Selection
from stacktok.core.reference import coverage_sum
from stacktok.core.selection import PreparedImage, prepare
from stacktok.core.tokens import EncodedImage, Ints
from stacktok.figures.encoder_views import encoder_views
from stacktok.methods.base import FeatureMethod, Method
from stacktok.methods.spotlight import PreparedSpotlight, Spotlight
from stacktok.methods.stacktok import StackTok
from stacktok.models.base import EncoderCall
from stacktok.models.pictures import PictureLimits, read_picture
from stacktok.models.prompt import prompt_inputs
from stacktok.models.query import word_ids
from stacktok.models.registry import adapter_for
from stacktok.runtime.question import QuestionReader
from stacktok.runtime.tower import tapped_tower
from stacktok.view import trace
from stacktok.view.jobs import Job
from stacktok.view.lru import LRUCache
from stacktok.view.methods import default_methods, possible
from stacktok.view.pictures import Refused, png
from stacktok.view.samples import Sample
from stacktok.view.state import Picture, PrunedView, Query, tile_places

UPLOADS = PictureLimits(megabytes=20, megapixels=40, tokens=4096)
"""Default limits. A held picture of n tokens takes n^2 numbers, and several are held."""

_PICTURES, _QUESTIONS, _ANSWERS = 8, 16, 256


class Engine:
    """A model with its processor, as the inspector uses them.

    Parameters
    ----------
    model, processor
        A supported model, loaded.
    name
        What to call it, and what ``from_pretrained`` would take.
    samples
        Pictures to begin with.
    methods
        Methods to choose from by name, without a budget; the first is shown first. Those that refuse the model are left
        out.
    limits
        What uploads may be.
    max_new_tokens
        Longest answer.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str,
        samples: Sequence[Sample] = (),
        methods: Mapping[str, Method] | None = None,
        limits: PictureLimits | None = None,
        max_new_tokens: int = 32,
    ) -> None:
        self.model, self.processor, self.name = model, processor, name
        self.adapter = adapter_for(model)
        self.samples = {sample.name: sample for sample in samples}
        self.methods = possible(methods if methods is not None else default_methods(), model, processor)
        self.limits = limits or UPLOADS
        self.max_new_tokens = max_new_tokens
        self._reader = QuestionReader(model, processor, self.adapter)
        self._pictures: LRUCache[str, Picture] = LRUCache(_PICTURES)
        self._queries: LRUCache[tuple[str, str], Query] = LRUCache(_QUESTIONS)
        self._answers: LRUCache[tuple[str, str, str, int | None], tuple[dict[str, Any], PrunedView | None]] = LRUCache(
            _ANSWERS
        )
        self._pruned_views: LRUCache[tuple[str, str, str, int], PrunedView] = LRUCache(_ANSWERS)
        self._sample_names = set(self.samples)

    def warm_up(self) -> None:
        """Run everything once, so that the first person does not wait for compiled kernels."""
        for name, sample in list(self.samples.items())[:1]:
            question, method = (*sample.questions, "What is this?")[0], next(iter(self.methods))
            self.trace(name, question, method)
            self.answer(name, question, method, 1)
            self.answer(name, question, None, None)

    def upload(self, data: bytes) -> Picture:
        """Take a picture file; the same file again is the same picture."""
        name = "file-" + hashlib.sha256(data).hexdigest()[:16]
        return self._pictures.get(name, lambda: self._encode(name, read_picture(data, self.limits)))

    def picture(self, name: str) -> Picture:
        """A sample, or an upload that is still held."""
        if name in self._sample_names:
            return self._pictures.get(name, lambda: self._encode(name, self.samples[name].picture))
        held = self._pictures.find(name)
        if held is None:
            raise Refused(404, "This picture is not held any more; drop the same file again to get the state back.")
        return held

    def views(self, name: str) -> list[bytes] | None:
        """The encoder's views of a picture in memory; safe to call from any thread."""
        held = dict.get(self._pictures, name)
        return None if held is None else held.crops

    def describe(self, picture: Picture) -> dict[str, Any]:
        """The page's description of a picture."""
        sample = self.samples.get(picture.name)
        rows = tile_places(picture.encoded)
        return {
            "image": picture.name,
            "width": picture.image.width,
            "height": picture.image.height,
            "questions": list(sample.questions) if sample else [],
            "capacity": picture.encoded.capacity,
            "positions": picture.encoded.n,
            "crops": [
                {
                    "rows": crop.grid[0],
                    "columns": crop.grid[1],
                    "eligible": None if crop.eligible.all() else np.flatnonzero(crop.eligible).tolist(),
                    "tile": place,
                }
                for crop, place in zip(picture.encoded.crops, rows, strict=True)
            ],
            "seconds": picture.seconds,
        }

    def trace(self, name: str, question: str, method: str) -> dict[str, Any]:
        """The whole run of a method for a question: data for every budget, or that there is none."""
        picture, query = self.picture(name), self.ask(name, question)
        chosen = self.method(method)
        base = {
            "image": name,
            "question": question,
            "method": method,
            "words": [{"text": text, "rows": rows} for text, rows in zip(query.words, query.rows, strict=True)],
            "asked": trace.asked(question, query.words),
            "query_affinity": [trace.packed(unit.query_affinity(query.query)) for unit in picture.units],
        }
        found = self.record(picture, query, method)
        if found is None:
            return base | {"anytime": False}
        record, seconds = found
        limit = chosen.swap_limit if isinstance(chosen, (StackTok, Spotlight)) else 0
        crops = [
            trace.steps(crop, unit.vision_affinity, limit)
            for crop, unit in zip(trace.crop_records(record), picture.units, strict=True)
        ]
        return base | {"anytime": True, "order": trace.order_of(record), "crops": crops, "seconds": seconds}

    def kept(self, name: str, question: str, method: str, budget: int, job: Job | None = None) -> dict[str, Any]:
        """The tokens that a method keeps at one budget, with their relevance and coverage."""
        picture, query = self.picture(name), self.ask(name, question)
        pruned = self.pruned_view(picture, question, method, budget, job)
        crops = []
        for unit, own in zip(picture.units, self.indices(picture, pruned), strict=True):
            chosen = own.tolist()
            affinity = unit.query_affinity(query.query)
            crops.append(
                {
                    "indices": chosen,
                    "relevance": coverage_sum(torch.from_numpy(affinity), chosen) / max(1, len(affinity)),
                    "coverage": coverage_sum(torch.from_numpy(unit.vision_affinity), chosen) / unit.n,
                    "owners": trace.owners(own, unit.vision_affinity).tolist(),
                }
            )
        return {
            "image": name,
            "question": question,
            "method": method,
            "budget": budget,
            "tokens": len(pruned.reduction),
            "separators": len(pruned.reduction) - pruned.reduction.tokens,
            "cls": pruned.reduction.tokens - len(pruned.placed),
            "crops": crops,
            "merged": pruned.merged,
            "per_layer": list(pruned.per_layer),
            "seconds": pruned.reduction.seconds,
        }

    def answer(
        self, name: str, question: str, method: str | None, budget: int | None, job: Job | None = None
    ) -> dict[str, Any]:
        """The model's answer with a method at a budget, or with all tokens where both are None."""
        return self._answered(self.picture(name), question, method, budget, job)[0]

    def ask(self, name: str, question: str) -> Query:
        """The query that the runtime would read from the prompt."""
        return self._queries.get((name, question), lambda: self._read(self.picture(name), question))

    def record(self, picture: Picture, query: Query, method: str) -> tuple[Selection | CropSelection, float] | None:
        """A run to the largest budget and its time; None for a method whose runs have no prefixes."""
        chosen = self.method(method)
        if not isinstance(chosen, (StackTok, Spotlight)):
            return None
        if method not in query.records:
            begin = time.perf_counter()
            query.records[method] = self._run(picture, query, chosen), time.perf_counter() - begin
        try:
            query.records[method][0].prefix(0)
        except ValueError:
            return None
        return query.records[method]

    @staticmethod
    def _run(picture: Picture, query: Query, method: StackTok | Spotlight) -> Selection | CropSelection:
        parameters, capacity = method.parameters(picture.encoded.tau_query), picture.encoded.capacity
        if isinstance(method, Spotlight):
            prepared = PreparedSpotlight(method, picture.encoded, picture.units)
            record: Selection | CropSelection = prepared.reduce(query.query, capacity).record
            return record
        changes: dict[str, Any] = {
            key: value
            for key, value in vars(parameters).items()
            if key not in ("tau_vision", "norm_epsilon", "backend")
        }
        return picture.prepared.select(query.query, capacity, **changes)

    def pruned_view(
        self, picture: Picture, question: str, method: str, budget: int, job: Job | None = None
    ) -> PrunedView:
        """The picture as a method prunes it at a budget: what `stacktok ask` would keep."""
        found = self.record(picture, self.ask(picture.name, question), method)
        if found is None:
            return self._pruned_views.get(
                (picture.name, question, method, budget), lambda: self._prune(picture, question, method, budget, job)
            )
        # Not held: it is had in no time, and its record keeps the picture's affinities alive.
        begin = time.perf_counter()
        record = found[0].prefix(min(budget, found[0].k), refine=True)
        indices = [crop.indices for crop in trace.crop_records(record)]
        reduction = picture.encoded.keep(indices, record=record).timed(time.perf_counter() - begin)
        return PrunedView(reduction, (len(reduction),) * self._depth)

    @staticmethod
    def indices(picture: Picture, pruned: PrunedView) -> list[Ints]:
        """Kept tokens per crop, ascending."""
        anchors = pruned.reduction.anchors[pruned.placed]
        return [np.sort(anchors[anchors[:, 0] == c, 1]) for c in range(len(picture.encoded.crops))]

    def method(self, name: str) -> Method:
        """A method by name."""
        if name not in self.methods:
            raise Refused(404, f"No method is called {name!r}; the methods are {', '.join(self.methods)}.")
        return self.methods[name]

    def _prune(self, picture: Picture, question: str, method: str, budget: int, job: Job | None) -> PrunedView:
        chosen, query = self.method(method), self.ask(picture.name, question)
        if isinstance(chosen, FeatureMethod):
            if method not in picture.prepared_for:
                picture.prepared_for[method] = chosen.prepare(self._encoded_for(chosen, picture))
            (reduction,) = chosen.reduce_prompt([picture.prepared_for[method]], query.query, budget)
            return PrunedView(reduction, (len(reduction),) * self._depth)
        # What a method inside the language model keeps is known when that has run.
        pruned = self._answered(picture, question, method, budget, job)[1]
        if pruned is None:
            raise Refused(422, f"{method} pruned nothing of this picture; choose another method.")
        return pruned

    @property
    def _depth(self) -> int:
        return len(self.adapter.layers(self.model))

    def _encoded_for(self, method: FeatureMethod, picture: Picture) -> EncodedImage:
        """The encoded picture, with the tower's attention for a method that reads it."""
        if not method.reads_tower:
            return picture.encoded
        signal = method.tower_signal
        if signal not in picture.attended:
            with tapped_tower(self.adapter, self.model, signal) as tower, torch.no_grad():
                output = self._features(picture.arguments)
            reading = tower.take()
            if reading is None:
                raise Refused(422, f"The vision tower of {self.name} showed no attention; choose another method.")
            call = self._call(output, picture.arguments)
            (picture.attended[signal],) = self.adapter.attend([picture.encoded], reading, call)
        return picture.attended[signal]

    def _call(self, output: Any, arguments: Mapping[str, Any]) -> EncoderCall:
        units = self.adapter.units(output, self.model.config)
        return EncoderCall("image", output, units, arguments, self.model, self.processor)

    def _features(self, arguments: Mapping[str, Any]) -> Any:
        base: Any = self.adapter.base(self.model)
        return base.get_image_features(**arguments)

    def _encode(self, name: str, image: Image.Image) -> Picture:
        inputs = prompt_inputs(self.processor, image, "", self.model, self.limits)
        function: Any = self.adapter.base(self.model).get_image_features
        arguments = {key: inputs[key] for key in inspect.signature(function).parameters if key in inputs}
        begin = time.perf_counter()
        with torch.no_grad():
            features = self._features(arguments)
        groups = self.adapter.group(self.model.config, inputs["input_ids"][0].tolist(), self.processor)
        (encoded,) = self.adapter.encode(self._call(features, arguments), groups=groups)
        encoding = time.perf_counter() - begin
        begin = time.perf_counter()
        if len(encoded.crops) == 1:
            (crop,) = encoded.crops
            prepared: PreparedImage | PreparedCrops = prepare(
                crop.vision, crop.projected, eligible=crop.eligible, tau_query=encoded.tau_query
            )
        else:
            prepared = prepare_crops(
                [Crop(crop.vision, crop.projected, crop.eligible) for crop in encoded.crops],
                tau_query=encoded.tau_query,
            )
        seconds = {"encode": encoding, "prepare": time.perf_counter() - begin}
        views = encoder_views(image, encoded, inputs["pixel_values"], self.processor.image_processor)
        return Picture(name, image, arguments, encoded, features, prepared, [png(view) for view in views], seconds)

    def _read(self, picture: Picture, question: str) -> Query:
        if not question.strip():
            width = picture.encoded.crops[0].projected.shape[1]
            return Query([], [], torch.zeros((0, width)))
        words = self.adapter.query_words(question)
        found = self._reader.question(question, None, self.model.get_input_embeddings().weight.device)
        sizes = [len(word_ids(self._reader.tokenizer, [word])) for word in words]
        starts = np.cumsum([0, *sizes]).tolist()
        rows = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        query = found.embeddings
        if query is None:
            raise Refused(422, "The question has no words that the model knows; type another.")
        return Query(words, rows, query.to(picture.encoded.crops[0].projected.device))

    def _answered(
        self, picture: Picture, question: str, method: str | None, budget: int | None, job: Job | None
    ) -> tuple[dict[str, Any], PrunedView | None]:
        return self._answers.get(
            (picture.name, question, method or "", budget),
            lambda: self._generate(picture, question, method, budget, job),
        )

    def _generate(
        self, picture: Picture, question: str, method: str | None, budget: int | None, job: Job | None
    ) -> tuple[dict[str, Any], PrunedView | None]:
        from transformers import StoppingCriteria, StoppingCriteriaList

        class Wanted(StoppingCriteria):  # type: ignore[misc,unused-ignore]
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
                stop = job is not None and job.cancelled
                return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)

        inputs = prompt_inputs(self.processor, picture.image, question, self.model, self.limits)
        pruning: Any = nullcontext()
        features = picture.features
        if method is not None:
            chosen = self.method(method)
            pruning = replace(chosen, budget=budget)(self.model, self.processor)
            if chosen.reads_tower:
                features = None
        with self._recalled(features) as encoding, pruning as pruned, torch.no_grad():
            if pruned is not None:
                pruned.query = question
            begin = time.perf_counter()
            out = self.model.generate(
                **inputs,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Wanted()]),
            )
            seconds = time.perf_counter() - begin - sum(encoding)
        if job is not None:
            job.check()
        new = out[0, inputs["input_ids"].shape[1] :]
        result = pruned.last[0] if pruned is not None and pruned.last else None
        tokens = picture.encoded.length if result is None else len(result.reduction)
        answer = {
            "answer": self.processor.tokenizer.decode(new, skip_special_tokens=True).strip(),
            "tokens": tokens,
            "per_layer": [tokens] * self._depth if result is None else list(result.per_layer),
            "generated": len(new),
            "seconds": seconds,
        }
        if result is None or method is None or self.method(method).stage != "inside":
            return answer, None
        return answer, PrunedView(result.reduction, result.per_layer)

    @contextmanager
    def _recalled(self, features: Any | None) -> Iterator[list[float]]:
        """Answer for the encoder with what it said before; every call gets an output of its own.

        Where that is None the encoder runs, and the list receives the time that it takes.
        """
        function: Any = self.adapter.base(self.model).get_image_features
        taken: list[float] = []

        @functools.wraps(function)
        def recall(*args: Any, **kwargs: Any) -> Any:
            if features is not None:
                return type(features)(**features)
            begin = time.perf_counter()
            output = function(*args, **kwargs)
            taken.append(time.perf_counter() - begin)
            return output

        # An attribute of this one model object, which belongs to the inspector; gone on exit.
        attributes = self.adapter.base(self.model).__dict__
        attributes["get_image_features"] = recall
        try:
            yield taken
        finally:
            attributes.pop("get_image_features", None)
