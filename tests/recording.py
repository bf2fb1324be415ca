"""A device that does not exist: tensors that say they are on a GPU, and a record of what would make the host wait.

`OnDevice` wraps a tensor of the CPU and reports ``cuda:0``. While a `Recorder` is active, everything that is made on or
sent to that device is such a tensor, so that code takes the paths that it takes on a GPU. Noted is what a GPU would
have to be waited for: copies to the host, operators whose result's size depends on the numbers, and copies from
pageable memory, which CUDA synchronises.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda:0")

# Their results have sizes that the numbers decide, or are numbers of the host.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"}
_WAITS |= {"is_nonzero", "bincount"}


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    # Torch's own way into these sets the current device first, which a build without CUDA cannot.
    def __getitem__(self, index: Any) -> Any:
        note_index(index)
        return OnDevice(self.inner[_plain(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        note_index(index)
        if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.ndim:
            note("setitem")
        self.inner[_plain(index)] = _plain(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Any:
        return self if self.inner.is_contiguous() else torch.clone(self, memory_format=memory_format)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        return torch.ops.aten.copy_(self, source, non_blocking)

    def nonzero(self) -> Any:
        return torch.ops.aten.nonzero(self)

    def __invert__(self) -> Any:
        return torch.ops.aten.bitwise_not(self)

    def _read(self, name: str) -> Any:
        note(name)
        return getattr(self.inner, name)()

    def item(self) -> Any:
        return self._read("item")

    def tolist(self) -> Any:
        return self._read("tolist")

    def __bool__(self) -> bool:
        return self._read("__bool__")

    def __int__(self) -> int:
        return self._read("__int__")

    def __index__(self) -> int:
        return self._read("__index__")

    def __float__(self) -> float:
        return self._read("__float__")

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        """The address that Triton's interpreter reads."""
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operator, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({tuple(self.shape)})"


def _plain(value: Any) -> Any:
    return tree_map(lambda own: own.inner if isinstance(own, OnDevice) else own, value)


def note(name: str) -> None:
    """Note a wait with the recorder that is active, if one is."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder):
            mode.note(name)


def note_index(index: Any) -> None:
    """Note an index that must be waited for: a mask, whose number of ones is not known, or numbers of the host."""
    for own in index if isinstance(index, tuple) else (index,):
        if isinstance(own, (list, np.ndarray)) or (isinstance(own, torch.Tensor) and not isinstance(own, OnDevice)):
            note("index from the host")
        elif isinstance(own, OnDevice) and own.dtype in (torch.bool, torch.uint8):
            note("index by a mask")


def run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; the result is on the device if an argument is, or if it is asked for there."""
    wrappers: dict[int, OnDevice] = {}
    given: dict[int, torch.Tensor] = {}

    def unwrapped(value: Any) -> Any:
        if isinstance(value, OnDevice):
            wrappers[id(value.inner)] = given[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.Tensor):
            given[id(value)] = value
        return value

    plain_args, plain_kwargs = tree_map(unwrapped, (args, kwargs))
    wanted = kwargs.get("device")
    there = bool(wrappers) if wanted is None else torch.device(wanted).type == "cuda"
    if wanted is not None:
        plain_kwargs["device"] = torch.device("cpu")
    plain_kwargs.pop("pin_memory", None)
    found = operator(*plain_args, **plain_kwargs)

    def wrapped(value: Any) -> Any:
        # An operator that works in place returns its argument.
        if not isinstance(value, torch.Tensor) or id(value) in given:
            return given.get(id(value), value)
        return OnDevice(value)

    return tree_map(wrapped, found) if there else found


class Wait(NamedTuple):
    """Something that makes the host wait.

    Attributes
    ----------
    operator
        Its name.
    where
        File and line of the innermost call in this package or in the library that runs the model.
    ours
        Whether that is this package.
    """

    operator: str
    where: str
    ours: bool


class Recorder(TorchDispatchMode):
    """Runs everything on the pretended device, and notes what waits while it is told to.

    Attributes
    ----------
    active
        Whether waits are noted.
    waits
        Those that were.
    launches
        Kernels that were launched meanwhile, with their grids.
    """

    def __init__(self, library: str) -> None:
        super().__init__()
        self.active, self.library = False, f"/{library}/"
        self.waits: list[Wait] = []
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        self.pinned: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        if self._waits(name, args, kwargs):
            self.note(name)
        found = run(operator, args, kwargs)
        if kwargs.get("pin_memory"):
            self.pinned.add(found.data_ptr())
        return found

    def note(self, name: str) -> None:
        """Note a wait, while that is asked for."""
        if self.active:
            self.waits.append(Wait(name, *_where(self.library)))

    def _waits(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        there = [isinstance(value, OnDevice) for value in args if isinstance(value, torch.Tensor)]
        if name == "_to_copy":
            to_device = torch.device(kwargs.get("device") or args[0].device).type == "cuda"
            if to_device and not there[0]:
                return not (kwargs.get("non_blocking") and args[0].data_ptr() in self.pinned)
            return there[0] and not to_device
        if name == "copy_" and len(there) == 2 and there[0] != there[1]:
            host = args[there.index(False)]
            return not ((args[2:] or [kwargs.get("non_blocking")])[0] and host.data_ptr() in self.pinned)
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(isinstance(index, OnDevice) and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return True
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            return any(there)
        return name in _WAITS and any(there)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what waits while the block lasts."""
        self.active = True
        try:
            yield
        finally:
            self.active = False


def _where(library: str) -> tuple[str, bool]:
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for package, ours in (("/stacktok/", True), (library, False)):
            if package in path and "/tests/" not in path:
                return f"{path.rsplit(package, 1)[1]}:{frame.f_lineno}", ours
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere", False


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """A recorder in whose reach torch believes in a GPU; ``recorder_library`` of a test module names the stock code."""
    from stacktok.kernels import triton as kernels

    recorder = Recorder(getattr(request.module, "LIBRARY", "transformers"))

    class Launch:
        """A kernel that reads what the device's tensors wrap, and is noted."""

        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                recorder.launches.append((self.name, grid))
                plain = [value.inner if isinstance(value, OnDevice) else value for value in args]
                with _disable_current_modes():
                    self.kernel[grid](*plain, **kwargs)

            return launch

    for name in ("facility_location", "merge", "swaps", "max_min", "determinantal"):
        module = sys.modules[f"{kernels.__name__}.{name}"]
        monkeypatch.setattr(module, name, Launch(name, getattr(module, name)))

    def pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        recorder.pinned.add(tensor.data_ptr())
        return tensor

    make = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **settings: Any) -> torch.Tensor:
        """As torch's, whose own would take a number on the device for a sequence."""
        numbers = tree_map(lambda own: own.item() if isinstance(own, OnDevice) and not own.ndim else own, data)
        found = make(numbers, dtype=dtype, **settings)
        return found if device is None else found.to(device)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    lift: Any = torch._C._set_only_lift_cpu_tensors
    lift(True)
    try:
        with recorder:
            yield recorder
    finally:
        lift(False)


def on_device(value: Any) -> Any:
    """Tensors, or a copy of a module, or the values of a mapping, on the device."""
    if isinstance(value, torch.Tensor):
        return OnDevice(value)
    if isinstance(value, nn.Module):
        with _disable_current_modes():
            value = copy.deepcopy(value)
        for module in value.modules():
            for name, own in module._parameters.items():
                if own is not None:
                    module._parameters[name] = nn.Parameter(OnDevice(own.data), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = OnDevice(buffer)
        return value
    return {name: on_device(own) if isinstance(own, torch.Tensor) else own for name, own in value.items()}
