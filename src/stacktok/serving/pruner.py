"""The model's half: encodes what is not cached, selects, and hands the kept rows to vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stacktok.core.tokens import EncodedImage, Ints, single_crop
from stacktok.serving.cache import FeatureCache
from stacktok.serving.counters import Counters
from stacktok.serving.fields import PROFILE, Asked
from stacktok.serving.settings import Settings


class Kept(NamedTuple):
    """What the language model gets of an image.

    Attributes
    ----------
    rows
        Embeddings, (k, d).
    places
        Index of each row among the unpruned image's rows, (k,).
    """

    rows: torch.Tensor
    places: Ints


class Pruner:
    """Settings, cache and counters of one loaded model.

    Parameters
    ----------
    settings
        The server's.
    """

    def __init__(self, settings: Settings) -> None:
        self.method = settings.method
        self.cache = FeatureCache(settings.cache_bytes)
        self.counters = Counters()

    @property
    def reads_tower(self) -> bool:
        """Whether the method needs the vision tower's attention."""
        return self.method.facts.attention == "vision tower"

    def warm_up(self) -> None:
        """Compile the selector's kernels before the first request."""
        if self.method.budget is not None and not self.reads_tower:
            features = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
            self.method.reduce(single_crop(features, features, (4, 4)), features[:2], 4)

    def snapshot(self) -> dict[str, float]:
        """The counters now."""
        self.counters.encoder_cache_bytes = self.cache.bytes
        return self.counters.snapshot()

    @torch.no_grad()
    def embed(
        self,
        asked: Sequence[Asked],
        encode: Callable[[list[int]], list[EncodedImage]],
        embed_ids: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        newline: torch.Tensor | None = None,
    ) -> list[Kept]:
        """What the language model gets of the images of a batch.

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
            return [_whole(image, newline) for image in encode(list(range(len(asked))))]
        images = self._encoded(asked, encode, device)
        return [self._reduce(one, images[one.key], embed_ids, device, newline) for one in asked]

    def _encoded(
        self, asked: Sequence[Asked], encode: Callable[[list[int]], list[EncodedImage]], device: torch.device
    ) -> dict[bytes, EncodedImage]:
        images: dict[bytes, EncodedImage] = {}
        missing: dict[bytes, int] = {}
        for index, one in enumerate(asked):
            if one.key in images or one.key in missing:
                self.counters.encoder_cache_hits += 1
                continue
            found = self.cache.get(one.key, device)
            if found is None:
                missing[one.key] = index
            else:
                self.counters.encoder_cache_hits += 1
                images[one.key] = found
        if missing:
            self.counters.encoder_runs += len(missing)
            for key, image in zip(missing, encode(list(missing.values())), strict=True):
                images[key] = image
                self.cache.put(key, image)
        return images

    def _reduce(
        self,
        one: Asked,
        image: EncodedImage,
        embed_ids: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        newline: torch.Tensor | None,
    ) -> Kept:
        rows, places = _whole(image, newline)
        if one.keep >= 0:
            begin = time.perf_counter()
            query = embed_ids(one.query.to(device)) if len(one.query) else None
            reduction = self.method.reduce(image, query, one.keep)
            if len(reduction) != one.keep:
                raise ValueError(
                    f"{type(self.method).__name__} kept {len(reduction)} tokens where {one.keep} were reserved; "
                    "a served method must keep exactly its budget"
                )
            rows, places = image.gather(rows, reduction), image.places_of(reduction.anchors)
            self.counters.selection_seconds += time.perf_counter() - begin
        self.counters.images += 1
        self.counters.tokens_before += image.length
        self.counters.tokens_after += len(rows)
        return Kept(rows, places)


def _whole(image: EncodedImage, newline: torch.Tensor | None) -> Kept:
    return Kept(image_rows(image, newline), np.arange(image.length, dtype=np.int64))


def image_rows(image: EncodedImage, newline: torch.Tensor | None) -> torch.Tensor:
    """The rows that an unpruned image fills in the language model's input, (length, d)."""
    first = image.crops[0].projected
    if len(image.crops) == 1 and len(first) == image.length:
        return first
    rows = first.new_empty((image.length, first.shape[-1]))
    for crop in image.crops:
        placed = np.flatnonzero(crop.places >= 0)
        rows[torch.from_numpy(crop.places[placed]).to(rows.device)] = crop.projected[
            torch.from_numpy(placed).to(rows.device)
        ]
    if len(image.separators):
        if newline is None:
            raise ValueError("the image's layout has separators, but no embedding was given for them")
        rows[torch.from_numpy(image.separators).to(rows.device)] = newline.to(rows)
    return rows


def check_engine(vllm_config: Any, family: str, *, mrope: bool, reads_tower: bool) -> None:
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
    """
    parallel, multimodal = vllm_config.parallel_config, vllm_config.model_config.multimodal_config
    refused = {
        "video_pruning_rate": bool(multimodal.video_pruning_rate),
        "mm_encoder_tp_mode='data'": multimodal.mm_encoder_tp_mode == "data" and (mrope or reads_tower),
        "compile_mm_encoder": bool(vllm_config.compilation_config.compile_mm_encoder) and (mrope or reads_tower),
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
