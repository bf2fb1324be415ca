"""Reading queries and keys where one attention module uses them, whatever attention backend runs.

The library's registry of attention functions is its public way in. The one module that is read gets a copy of its
config that names the function below, which hands queries and keys to a reader and then calls the very backend that
would have run; every other layer is untouched, and so is the model's own config.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_NAME = "stacktok_tap"
_ATTRIBUTE = "_stacktok_tap"

Reading = tuple[torch.Tensor, torch.Tensor, float]
"""Queries (B, H, q, d), keys (B, H_kv, S, d), both rotated, and the factor of the logits."""

Reader = Callable[[torch.Tensor, torch.Tensor, float, Any], None]
"""Called with the parts of a `Reading` and the attention mask."""


class Tap:
    """A reader on one attention module.

    Parameters
    ----------
    module
        The attention module; it has a ``config`` that names its backend.
    read
        Called before the backend runs.
    """

    def __init__(self, module: nn.Module, read: Reader) -> None:
        if _ATTRIBUTE in vars(module):
            raise ValueError(f"this {type(module).__name__} is already being read; leave the first with block first")
        self.module, self.read = module, read
        self._config: Any = module.config

    def attach(self, undo: list[Callable[[], object]]) -> None:
        """Set the tap; ``undo`` receives what takes it away."""
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _read_and_attend)
        config: Any = copy.copy(self._config)
        config._attn_implementation_internal = _NAME
        module: Any = self.module
        undo.append(self._detach)
        module.config = config
        module.__dict__[_ATTRIBUTE] = self

    def _detach(self) -> None:
        module: Any = self.module
        module.config = self._config
        vars(module).pop(_ATTRIBUTE, None)

    @property
    def backend(self) -> Callable[..., Any]:
        """The attention function that the module's own config names now."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # Eager attention is no entry of the registry but a function beside the module.
        eager: Any = getattr(sys.modules[type(self.module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self._config._attn_implementation, eager)


def _read_and_attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    tap: Tap = vars(module)[_ATTRIBUTE]
    scaling = kwargs.get("scaling")
    _read(tap, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling, attention_mask)
    return tap.backend(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _read(tap: Tap, query: torch.Tensor, key: torch.Tensor, scaling: float, mask: Any) -> None:
    tap.read(query, key, scaling, mask)


class _EnoughError(Exception):
    """Queries and keys are known; nothing has to attend to them."""


@torch.no_grad()
def read_without_attending(module: nn.Module, **arguments: Any) -> Reading:
    """Queries and keys that an attention module would use.

    Parameters
    ----------
    module
        The attention module, which is left alone: a copy that shares its weights runs as far as the attention.
    **arguments
        Of its ``forward``.
    """
    found: list[Reading] = []

    def read(query: torch.Tensor, key: torch.Tensor, scaling: float, mask: Any) -> None:
        found.append((query, key, scaling))
        raise _EnoughError

    twin: Any = copy.copy(module)
    vars(twin).pop(_ATTRIBUTE, None)
    Tap(twin, read).attach([])
    with suppress(_EnoughError):
        twin.forward(**arguments)
    if not found:
        raise ValueError(
            f"{type(module).__name__} attends without transformers' AttentionInterface, so that its queries and keys "
            "cannot be read; use a method that needs no attention of the next layer"
        )
    return found[0]
