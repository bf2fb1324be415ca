"""Checking what a caller hands over: features, affinities, eligible positions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Array: TypeAlias = "torch.Tensor | NDArray[Any]"
Eligible: TypeAlias = "torch.Tensor | NDArray[Any] | Iterable[int] | None"
Mask: TypeAlias = "NDArray[np.bool_]"


@cache
def _first_process() -> int:
    """The process in which the first input was read; a forked child inherits its parent's."""
    return os.getpid()


@cache
def _warn_forked(process: int) -> None:
    """Say in a forked child, once, that torch's threads may be waited for without end."""
    if process != _first_process() and torch.get_num_threads() > 1:
        logging.getLogger("stacktok").warning(
            "this process was forked from one that has selected tokens; torch's threads do not survive that, and it "
            "may hang: call torch.set_num_threads(1) in it, or start it by spawn"
        )


def as_matrix(value: Any, name: str) -> torch.Tensor:
    """A two-dimensional floating-point tensor that shares memory with ``value`` where that is possible."""
    _first_process()
    _warn_forked(os.getpid())
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        _check_dense(tensor, name)
    elif isinstance(value, np.ndarray):
        try:
            native = value.dtype.newbyteorder("=")
            tensor = torch.from_numpy(np.require(value, dtype=native, requirements=("C", "W")))
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


def _check_dense(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors that are not plain numbers in memory."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name} lies on the meta device and holds no numbers; give a tensor with data")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; give one matrix per image, or crops to select_crops")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; give a dense tensor, such as {name}.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"{name} is quantised ({tensor.dtype}); give real numbers, such as {name}.dequantize()")


def check_same_device(**tensors: torch.Tensor) -> None:
    """Refuse tensors that lie on different devices."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"the inputs lie on different devices ({places}); move them to one")


def check_list(values: object, name: str, remedy: str) -> None:
    """Refuse what is not a list, tuple or the like."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name} has type {type(values).__name__}; give a list of {remedy}")


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
        _check_dense(eligible, "eligible")
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
