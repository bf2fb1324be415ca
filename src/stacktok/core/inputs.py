"""Checking what a caller hands over: features, affinities, eligible positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = "torch.Tensor | NDArray[Any]"
Eligible: TypeAlias = "torch.Tensor | NDArray[Any] | Iterable[int] | None"
Mask: TypeAlias = "NDArray[np.bool_]"


def as_matrix(value: Any, name: str) -> torch.Tensor:
    """A two-dimensional floating-point tensor that shares memory with ``value`` where that is possible."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(np.require(value, requirements=("C", "W")))
        except TypeError:
            raise TypeError(f"{name} has dtype {value.dtype}, which torch does not know; give real numbers") from None
    else:
        raise TypeError(f"{name} has type {type(value).__name__}; give a torch tensor or a numpy array")
    if tensor.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give a matrix of two dimensions, one row per token")
    if tensor.is_floating_point():
        return tensor
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}; give real numbers")
    return tensor.double()


def check_same_device(**tensors: torch.Tensor) -> None:
    """Refuse tensors that lie on different devices."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"the inputs lie on different devices ({places}); move them to one")


def eligible_mask(eligible: Eligible, n: int) -> Mask:
    """Boolean mask (n,) of the positions that may be kept.

    Parameters
    ----------
    eligible
        None for all positions, a boolean mask of length n, or distinct indices in [0, n).
    n
        Number of encoded positions.
    """
    if eligible is None:
        return np.ones(n, dtype=np.bool_)
    if isinstance(eligible, torch.Tensor):
        values = eligible.detach().cpu().numpy()
    elif isinstance(eligible, np.ndarray):
        values = eligible
    elif isinstance(eligible, Iterable) and not isinstance(eligible, (str, bytes)):
        values = np.asarray(list(eligible))
    else:
        raise TypeError(f"eligible has type {type(eligible).__name__}; give indices or a boolean mask")
    if values.size == 0:
        values = values.reshape(-1).astype(np.int64)
    if values.ndim != 1:
        raise ValueError(f"eligible has shape {values.shape}; give one dimension")
    if values.dtype == np.bool_:
        if len(values) != n:
            raise ValueError(f"eligible is a mask of length {len(values)} for {n} positions; the lengths must agree")
        return np.array(values, dtype=np.bool_)
    if values.dtype.kind not in "iu":
        raise TypeError(f"eligible has dtype {values.dtype}; give integer indices or a boolean mask")
    outside = values[(values < 0) | (values >= n)]
    if outside.size:
        raise ValueError(f"eligible holds index {int(outside[0])}, outside 0 to {n - 1}")
    mask = np.zeros(n, dtype=np.bool_)
    mask[values] = True
    if int(mask.sum()) != len(values):
        unique, counts = np.unique(values, return_counts=True)
        raise ValueError(f"eligible holds index {int(unique[counts > 1][0])} more than once; give each index once")
    return mask
