"""The model's half: encodes what is not cached, selects, and hands the kept rows to vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stacktok.core.tokens import EncodedImage, Reduction, single_crop
from stacktok.kernels.transfer import upload
from stacktok.methods.base import Asked, Prepared
from stacktok.methods.video_method import VideoMethod
from stacktok.serving.cache import FeatureCache
from stacktok.serving.counters import Counters
from stacktok.serving.fields import PROFILE, ImageRequest
from stacktok.serving.settings import Settings

# vLLM's workers write what is logged below its own name.
logger = logging.getLogger("vllm.stacktok")


class Kept(NamedTuple):
    """The pruned embeddings of an image.

    Attributes
    ----------
    rows
        Embeddings, (k, d), each followed by its further features where there are any.
    offsets
        Index of each row among the unpruned image's tokens, (k,), on its device; -1 - i for text i between them.
    """

    rows: torch.Tensor
    offsets: torch.Tensor


@dataclass
class RequestRecord:
    """Totals of one request's images, for its line in the log."""

    images: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    selection_ms: float = 0.0
    cache_hits: int = 0


class Pruner:
    """Settings, cache and counters of one loaded model.

    Parameters
    ----------
    settings
        The server's.
    log
        Write a line per request; one rank of several does.
    """

    def __init__(self, settings: Settings, *, log: bool = True) -> None:
        self.method = settings.method
        self.cache = FeatureCache(settings.cache_bytes)
        self.counters = Counters()
        self.log = log
        self._warming: Future[None] | None = None

    @property
    def reads_tower(self) -> bool:
        """Whether the method needs the vision tower's attention."""
        return self.method.reads_tower

    def warm_up(self) -> None:
        """Compile the selector's kernels in parallel with what vLLM does next, which is loading the weights.

        The first images wait for it: vLLM makes some up to measure memory before it takes requests.
        """
        if self.method.budget is None or self.reads_tower or isinstance(self.method, VideoMethod):
            return
        self._warming = Future()
        threading.Thread(target=self._compile, args=(self._warming,), name="stacktok-compile", daemon=True).start()

    def _compile(self, done: Future[None]) -> None:
        # vLLM sets a default type and device while it builds a model.
        generator = torch.Generator("cpu").manual_seed(0)
        features = torch.randn(16, 8, generator=generator, dtype=torch.float32, device="cpu")
        try:
            self.method.reduce(single_crop(features, features, (4, 4)), features[:2], 4)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _wait_until_compiled(self) -> None:
        if self._warming is not None:
            self._warming.result()
            self._warming = None

    def snapshot(self) -> dict[str, float | list[float]]:
        """The counters now."""
        self.counters.encoder_cache_bytes = self.cache.bytes
        return self.counters.snapshot()

    @torch.no_grad()
    def embed(
        self,
        asked: Sequence[ImageRequest],
        encode: Callable[[list[int]], list[EncodedImage]],
        embed_ids: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        newline: torch.Tensor | None = None,
    ) -> list[Kept]:
        """The pruned embeddings of a batch's images.

        Parameters
        ----------
        asked
            What is asked for each image.
        encode
            Runs the vision tower on the images of some indices.
        embed_ids
            Input embeddings, (m, d), of token ids, (m,).
        device
            Where features belong.
        newline
            Embedding of a layout's separator, (d,), where it has any.
        """
        if any(one.keep == PROFILE for one in asked):
            whole = [_whole(image, newline) for image in encode(list(range(len(asked))))]
            self._wait_until_compiled()
            return whole
        self._wait_until_compiled()
        records = {one.request: RequestRecord() for one in asked}
        images = self._encoded(asked, encode, device, records)
        reductions = self._reduce(asked, images, embed_ids, device)
        kept = [
            self._kept(one, images[one.key], reduction, newline, records[one.request])
            for one, reduction in zip(asked, reductions, strict=True)
        ]
        if self.log:
            for number, record in records.items():
                logger.info(
                    "request %d: %d image(s), %d -> %d tokens, selection %.1f ms, %d from the feature cache",
                    number,
                    *vars(record).values(),
                    extra={"request": number, **vars(record)},
                )
        return kept

    def _encoded(
        self,
        asked: Sequence[ImageRequest],
        encode: Callable[[list[int]], list[EncodedImage]],
        device: torch.device,
        records: dict[int, RequestRecord],
    ) -> dict[bytes, EncodedImage]:
        images: dict[bytes, EncodedImage] = {}
        missing: dict[bytes, int] = {}
        for index, one in enumerate(asked):
            if one.key not in images and one.key not in missing:
                found = self.cache.get(one.key, device)
                if found is None:
                    missing[one.key] = index
                    continue
                images[one.key] = found
            self.counters.encoder_cache_hits += 1
            records[one.request].cache_hits += 1
        if missing:
            self.counters.encoder_runs += len(missing)
            for key, image in zip(missing, encode(list(missing.values())), strict=True):
                held = self.cache.put(key, image)
                # In host memory the copy serves this request too, so that its prepared state can be held with it.
                images[key] = held if held is not None and device.type == "cpu" else image
        return images

    def _prepared(self, key: bytes, image: EncodedImage, known: dict[bytes, Prepared]) -> Prepared:
        """An image's query-independent state: this batch's, the cache's, or new."""
        prepared = known.get(key) or self.cache.prepared(key)
        if prepared is None:
            prepared = self.method.prepare(image)
            self.counters.preparations += 1
            if image.crops[0].projected.device.type == "cpu":
                self.cache.hold(key, prepared)
        known[key] = prepared
        return prepared

    def _reduce(
        self,
        asked: Sequence[ImageRequest],
        images: dict[bytes, EncodedImage],
        embed_ids: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> list[Reduction | None]:
        """The method's answers for all images of a batch, decided together; None for those that are kept whole."""
        prepared: dict[bytes, Prepared] = {}
        pruned = [one for one in asked if one.keep >= 0]
        questions, preparing = [], []
        for one in pruned:
            begin = time.perf_counter()
            query = embed_ids(upload(one.query, device)) if len(one.query) else None
            questions.append(Asked(self._prepared(one.key, images[one.key], prepared), query, one.keep))
            preparing.append(time.perf_counter() - begin)
        found = iter(zip(pruned, self.method.reduce_batch(questions), preparing, strict=True))
        reductions: list[Reduction | None] = [None] * len(asked)
        for number, own in enumerate(asked):
            if own.keep >= 0:
                one, reduction, seconds = next(found)
                reductions[number] = reduction.timed(reduction.seconds + seconds)
                if len(reduction) != one.keep:
                    raise ValueError(
                        f"{type(self.method).__name__} kept {len(reduction)} tokens where {one.keep} were reserved; "
                        "a served method must keep exactly its budget"
                    )
        return reductions

    def _kept(
        self,
        one: ImageRequest,
        image: EncodedImage,
        reduction: Reduction | None,
        newline: torch.Tensor | None,
        record: RequestRecord,
    ) -> Kept:
        """The rows that vLLM gets for an image."""
        rows, offsets = _whole(image, newline)
        if reduction is not None:
            further, width = image.gather_further(reduction), image.crops[0].projected.shape[-1]
            rows, offsets = image.gather(rows[:, :width], reduction), image.kept_offsets(reduction, rows.device)
            rows = rows if further is None else torch.cat([rows, further], dim=-1)
            record.selection_ms += 1e3 * reduction.seconds
            self.counters.selection_seconds += reduction.seconds
            self.counters.image_selection_seconds.observe(reduction.seconds)
            self.counters.image_kept_share.observe(len(rows) / image.length)
        for totals in (self.counters, record):
            totals.images += 1
            totals.tokens_before += image.length
            totals.tokens_after += len(rows)
        return Kept(rows, offsets)


def _whole(image: EncodedImage, newline: torch.Tensor | None) -> Kept:
    rows = image_rows(image, newline)
    rows = rows if image.further is None else torch.cat([rows, image.further], dim=-1)
    return Kept(rows, torch.arange(image.length, device=rows.device))


def image_rows(image: EncodedImage, newline: torch.Tensor | None) -> torch.Tensor:
    """The rows that an unpruned image fills in the language model's input, (length, d)."""
    first = image.crops[0].projected
    if len(image.crops) == 1 and len(first) == image.length:
        return first
    rows = first.new_empty((image.length, first.shape[-1]))
    for crop in image.crops:
        # Found on the host: a mask on the device would have to be waited for.
        fed = np.flatnonzero(crop.layout.offsets >= 0)
        places, tokens = (upload(own, rows.device) for own in (crop.layout.offsets[fed], fed))
        rows[places] = crop.projected[tokens]
    if len(image.layout.separators):
        if newline is None:
            raise ValueError("the image's layout has separators, but no embedding was given for them")
        rows[upload(image.layout.separators, rows.device)] = newline.to(rows)
    return rows


def check_engine(vllm_config: Any, family: str, *, mrope: bool, reads_tower: bool, hooked: bool) -> None:
    """Refuse engine settings under which pruned images would come out wrong.

    Parameters
    ----------
    vllm_config
        The engine's configuration.
    family
        Name for people.
    mrope
        Whether positions of kept tokens are put in by our model.
    reads_tower
        Whether the method reads the vision tower's attention.
    hooked
        Whether features are read by a hook, which sees one rank's images alone, or none where code is compiled.
    """
    parallel, multimodal = vllm_config.parallel_config, vllm_config.model_config.multimodal_config
    refused = {
        "video_pruning_rate": bool(multimodal.video_pruning_rate),
        "mm_encoder_tp_mode='data'": multimodal.mm_encoder_tp_mode == "data" and hooked,
        "compile_mm_encoder": bool(vllm_config.compilation_config.compile_mm_encoder) and hooked,
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1 and mrope,
        "speculative_config": vllm_config.speculative_config is not None and mrope,
        "enable_dbo": bool(getattr(parallel, "enable_dbo", False)) and mrope,
        "tensor_parallel_size > 1 with a method that reads the vision tower's attention": (
            parallel.tensor_parallel_size > 1 and reads_tower
        ),
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"{name} does not go together with pruned images on {family}; leave it out")
