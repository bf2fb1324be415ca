"""The prompts of a call in host memory, read before the vision tower runs.

Where an image stands, where its row is padded and what its question is decide the shape of everything that follows, and
the host must know shapes. Token ids and mask have just come from the host, so reading them back waits for nothing;
after the tower is queued it would wait for the tower. A forward pass reads them when it begins. Generation encodes
pictures before its first forward pass, so a stand-in for ``generate``, an attribute of this one model object, reads
them there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stacktok.core.inputs import Mask
from stacktok.core.tokens import Ints


@dataclass(frozen=True, eq=False)
class HostPrompt:
    """A batch of prompts in host memory.

    Attributes
    ----------
    ids
        Token ids, (B, S).
    valid
        Tokens that are not padding, (B, S); None where a 2-D mask does not tell.
    """

    ids: Ints
    valid: Mask | None

    @classmethod
    def read(cls, input_ids: torch.Tensor, mask: Any) -> HostPrompt:
        """Of token ids, (B, S), and the attention mask that comes with them."""
        ids, valid = input_ids.cpu().numpy(), None
        if mask is None:
            valid = np.ones(ids.shape, dtype=np.bool_)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= ids.shape[1]:
            valid = np.broadcast_to(mask[:, -ids.shape[1] :].bool().cpu().numpy(), ids.shape)
        return cls(ids, valid)

    def repeated(self, rows: int, mask: Any) -> HostPrompt:
        """The prompts of a batch of ``rows``, each as often in a row as beams repeat it; ``mask`` comes with them."""
        times = rows // len(self.ids)
        valid = np.ones(self.ids.shape, dtype=np.bool_) if mask is None else self.valid
        return HostPrompt(self.ids.repeat(times, 0), None if valid is None else valid.repeat(times, 0))

    def cut(self, tokens: int) -> HostPrompt:
        """The prompts without their first tokens."""
        return HostPrompt(self.ids[:, tokens:], None if self.valid is None else self.valid[:, tokens:])


class GenerateTap:
    """Stands in for ``generate`` on one model object, and reads the prompts of calls with images.

    Parameters
    ----------
    function
        The function.
    note
        Called with the prompts, and with None when the call is over.
    """

    def __init__(self, function: Callable[..., Any], note: Callable[[HostPrompt | None], None]) -> None:
        self._function, self._note = function, note
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if has_images(kwargs) and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            mask = kwargs.get("attention_mask")
            prompt = HostPrompt.read(ids, mask)
            # Without a mask generation makes one of the padding's token.
            self._note(prompt if mask is not None else HostPrompt(prompt.ids, None))
        try:
            return self._function(*args, **kwargs)
        finally:
            self._note(None)


def has_images(arguments: Mapping[str, Any]) -> bool:
    """Whether a call's arguments hold pictures, as pixels or encoded."""
    return any(
        value is not None and (name.startswith("pixel_values") or name == "mm_encoder_outputs")
        for name, value in arguments.items()
    )
