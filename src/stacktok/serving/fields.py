"""Fields of vLLM's multimodal inputs in which the processor describes each image to the model.

The encoder never sees the prompt, and the processor never sees features: the number of tokens to keep, the query's
token ids and the image's identity travel with the pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

KEEP, QUERY, IMAGE, ELIGIBLE = "stacktok_keep", "stacktok_query", "stacktok_image", "stacktok_eligible"
REQUEST = "stacktok_request"
FIELDS = (KEEP, QUERY, IMAGE, ELIGIBLE, REQUEST)

ALL = -1
"""Value of ``keep`` that leaves an image unpruned."""

PROFILE = -2
"""The same for an image that vLLM made up to measure memory: it is neither cached nor counted."""


class ImageRequest(NamedTuple):
    """A request for one image.

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
    """

    keep: int
    query: torch.Tensor
    key: bytes
    eligible: torch.Tensor | None
    request: int = 0


def pack(
    keep: Sequence[int],
    query: Sequence[int],
    images: Sequence[str],
    eligible: Sequence[torch.Tensor] | None,
    request: int = 0,
) -> dict[str, Any]:
    """Fields of the images of one request.

    Parameters
    ----------
    keep
        Tokens to keep of each image.
    query
        Token ids of the request's query.
    images
        Identity of each image.
    eligible
        Which tokens of each image may be kept, (n,) each, or None.
    request
        The request's number.
    """
    count = len(keep)
    fields: dict[str, Any] = {
        KEEP: torch.tensor(keep, dtype=torch.long)[:, None],
        QUERY: torch.tensor(query, dtype=torch.long).expand(count, len(query)).contiguous(),
        IMAGE: torch.stack([_digest(image) for image in images]),
        REQUEST: torch.full((count, 1), request, dtype=torch.long),
    }
    if eligible is not None:
        fields[ELIGIBLE] = list(eligible)
    return fields


def unpack(kwargs: Mapping[str, Any]) -> list[ImageRequest]:
    """The requests for all images of a batch; empty where the batch brings no fields."""
    if KEEP not in kwargs:
        return []
    eligible: Any = kwargs.get(ELIGIBLE)
    return [
        ImageRequest(
            int(keep.item()),
            kwargs[QUERY][index].long(),
            bytes(kwargs[IMAGE][index].tolist()),
            None if eligible is None else eligible[index].bool(),
            int(kwargs[REQUEST][index].item()),
        )
        for index, keep in enumerate(kwargs[KEEP])
    ]


def _digest(text: str) -> torch.Tensor:
    """A fixed-size digest, (32,), of an identity of any length."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
