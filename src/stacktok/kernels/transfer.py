"""From host to device without making the host wait: a blocking copy would wait for all work that is queued there."""

from __future__ import annotations

from typing import Any

import torch


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers of the host on a device; a GPU fetches them by itself, in the order of its stream.

    Parameters
    ----------
    values
        An array, a tensor in host memory, or numbers.
    device
        Where they are needed.
    dtype
        Their type; None for their own.
    """
    found = torch.as_tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)
