"""Fields of vLLM's multimodal inputs in which the processor describes each image to the model.

The encoder never sees the prompt, and the processor never sees features: the number of tokens to keep, the query's
token ids and the image's identity travel with the pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

NAMES = ("keep", "query", "item", "request", "eligible", "text")
"""Fields of an item; each modality has its own."""

ALL = -1
"""Value of ``keep`` that leaves an image unpruned."""

PROFILE = -2
"""The same for an image that vLLM made up to measure memory: it is neither cached nor counted."""


def field(modality: str, name: str) -> str:
    """A field's name in vLLM's inputs."""
    return f"stacktok_{modality}_{name}"


class ImageRequest(NamedTuple):
    """A request for one image or video.

    Attributes
    ----------
    keep
        Tokens to keep, `ALL` or `PROFILE`.
    query
        Token ids of the query, (m,).
    key
        Identity of the image and of what its pixels were made by, the same for every question.
    eligible
        Which tokens may be kept, (n,); None where that follows from the image's size.
    request
        Number of the request that brought the image to vLLM's caches, for logs.
    text
        Tokens of the prompt that stand between the image's own: ids and how many of the unpruned image's tokens stand
        before each, (2, s); None where the prompt holds them.
    """

    keep: int
    query: torch.Tensor
    key: bytes
    eligible: torch.Tensor | None
    request: int = 0
    text: torch.Tensor | None = None


def pack(
    modality: str,
    keep: Sequence[int],
    query: Sequence[int],
    items: Sequence[str],
    request: int = 0,
    **lists: Sequence[torch.Tensor] | None,
) -> dict[str, Any]:
    """Fields of the images, or videos, of one request.

    Parameters
    ----------
    modality
        "image" or "video".
    keep
        Tokens to keep of each.
    query
        Token ids of the request's query.
    items
        Identity of each.
    request
        The request's number.
    **lists
        ``eligible`` and ``text``: a tensor for each, or None.
    """
    count = len(keep)
    fields: dict[str, Any] = {
        "keep": torch.tensor(keep, dtype=torch.long)[:, None],
        "query": torch.tensor(query, dtype=torch.long).expand(count, len(query)).contiguous(),
        "item": torch.stack([_digest(item) for item in items]),
        "request": torch.full((count, 1), request, dtype=torch.long),
        **{name: list(values) for name, values in lists.items() if values is not None},
    }
    return {field(modality, name): value for name, value in fields.items()}


def modality_of(kwargs: Mapping[str, Any]) -> str | None:
    """The modality of a batch; None where it brings no fields of ours."""
    return next((name for name in ("image", "video") if field(name, "keep") in kwargs), None)


def unpack(kwargs: Mapping[str, Any]) -> list[ImageRequest]:
    """The requests for all items of a batch; empty where the batch brings no fields."""
    modality = modality_of(kwargs)
    if modality is None:
        return []
    own = {name: kwargs.get(field(modality, name)) for name in NAMES}
    return [
        ImageRequest(
            int(keep.item()),
            own["query"][index].long(),  # type: ignore[index]
            bytes(own["item"][index].tolist()),  # type: ignore[index]
            None if own["eligible"] is None else own["eligible"][index].bool(),
            int(own["request"][index].item()),  # type: ignore[index]
            None if own["text"] is None else own["text"][index].long(),
        )
        for index, keep in enumerate(own["keep"])  # type: ignore[arg-type]
    ]


def without_fields(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without our fields."""
    return {name: value for name, value in kwargs.items() if not name.startswith("stacktok_")}


def _digest(text: str) -> torch.Tensor:
    """A fixed-size digest, (32,), of an identity of any length."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
