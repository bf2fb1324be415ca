"""From features to the kept tokens' embeddings nothing reads the device: `make test-triton` runs this file.

There is no GPU here, so every tensor counts as one on a device: what would copy from a GPU to the host, or make the
host wait for it, is noted, whether torch's Python functions do it or operators below them. Triton's interpreter, which
reads memory itself, is left out while it runs.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stacktok.core import greedy, reference
from stacktok.core.parameters import Parameters
from stacktok.core.tokens import DeviceReduction, EncodedImage, ImageLayout
from stacktok.methods.mmtok import MMTok
from stacktok.methods.stacktok import StackTok
from tests.core.cases import affinities, features

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets kernels where TRITON_INTERPRET=1 is set", allow_module_level=True)

from stacktok.core.device import keeps  # noqa: E402
from stacktok.kernels import triton as kernels  # noqa: E402

READS = {"cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__", "equal"}
WAITS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim", "aten._unique2"}


class Functions(TorchFunctionMode):
    """Notes functions of torch that read a tensor."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.noted.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes operators whose result has a size that the numbers decide, or that hand a number to the host."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator.overloadpacket)
        indices = args[1] if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], list) else []
        if name in WAITS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.noted.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def record(monkeypatch):
    """A context in which what waits is noted, and the launches."""
    noted, launches = [], []

    class Launch:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(getattr(kernels, name), name)

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                launches.append((self.name, grid))
                with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                    self.kernel[grid](*args, **kwargs)

            return launch

    for name in ("facility_location", "merge", "swaps"):
        monkeypatch.setattr(getattr(kernels, name), name, Launch(name))

    @contextlib.contextmanager
    def recording():
        with Functions(noted), Operators(noted):
            yield

    recording.noted, recording.launches = noted, launches
    return recording


def encoded(*grids):
    layout = ImageLayout.raster(*grids)
    x, z, q = (torch.from_numpy(rows) for rows in features(layout.n, 3))
    return EncodedImage.of(layout, x, z), q


@pytest.mark.parametrize(
    ("method", "grids", "launches"),
    [
        (StackTok(backend="triton"), [(4, 5)], ["facility_location"] * 2 + ["swaps"]),
        (MMTok(backend="triton"), [(4, 5)], ["facility_location"] * 2 + ["swaps"]),
        (
            StackTok(backend="triton"),
            [(2, 4), (3, 3), (2, 3)],
            ["facility_location"] * 2 + ["merge", "swaps"],
        ),
    ],
)
def test_nothing_waits_between_features_and_kept_embeddings(method, grids, launches, record, monkeypatch):
    image, query = encoded(*grids)
    embeddings = torch.cat([crop.projected for crop in image.crops])
    with monkeypatch.context() as patch, record():
        # As on a GPU; tensors of the CPU are read.
        patch.setattr(greedy, "strictness", reference._tensor_strictness)
        reduction = method.prepare(image).reduce(query, 7)
        kept = image.gather(embeddings, reduction)
        assert len(reduction) == reduction.tokens == 7
    assert record.noted == []
    # The reference chain, the run, the merge where there are crops, and the retained set with its swaps.
    assert [name for name, _ in record.launches] == launches
    assert all(grid in ((len(grids),), (1,)) for _, grid in record.launches)
    # Looking at it reads the device, and finds what the host's backend keeps.
    expected = type(method)(**{**vars(method), "backend": "cpu"}).prepare(image).reduce(query, 7)
    assert isinstance(reduction, DeviceReduction)
    assert np.array_equal(reduction.anchors, expected.anchors)
    assert torch.equal(kept, image.gather(embeddings, expected))
    assert np.array_equal(reduction.record.order, expected.record.order)
    assert np.array_equal(reduction.read().anchors, expected.anchors)


@pytest.mark.parametrize("seed", range(3))
def test_strictness_of_a_tensor_is_that_of_an_array(seed):
    a_qv, _ = affinities(30, 4, seed=seed)
    expected = reference.strictness(a_qv, Parameters())
    assert float(reference._tensor_strictness(torch.from_numpy(a_qv), Parameters())) == pytest.approx(expected, 1e-12)


def test_what_waits_is_noticed(record):
    numbers = torch.arange(3.0)
    for wait in (lambda: numbers.tolist(), lambda: bool(numbers[0]), lambda: numbers.nonzero()):
        before = len(record.noted)
        with record():
            wait()
        assert len(record.noted) > before
    before = len(record.noted)
    with record():
        numbers[numbers > 1]
    assert len(record.noted) > before


def test_settings_that_need_the_host_in_between_are_decided_there():
    image, _ = encoded((2, 3), (2, 2))
    for settings in ({"allocation": "proportional"}, {"swap_passes": None}):
        units = StackTok(backend="triton", **settings).prepare(image).units
        assert not keeps([unit.reference for unit in units], units[0].parameters)


def test_features_that_are_not_finite_are_refused_when_the_record_is_looked_at():
    image, query = encoded((2, 3))
    image.crops[0].vision[4, 0] = float("nan")
    reduction = StackTok(backend="triton").prepare(image).reduce(query, 2)
    with pytest.raises(ValueError, match="vision holds NaN or infinity"):
        reduction.record  # noqa: B018
