"""One method of every stage on models whose modules are not the stock ones: quantised weights, compiled graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from stacktok.methods import (
    DART,
    SCOPE,
    FastV,
    HiPrune,
    PixelPrune,
    PruMergePlus,
    PyramidDrop,
    SparseVLM,
    VScanTwoStage,
)
from stacktok.methods.registry import available
from tests.models.test_pruned_models import greedy
from tests.tiny import build, picture

# Depth 4: two layers on all tokens leave two for the cuts.
METHODS = {
    "llava": (
        SCOPE(budget=6),
        HiPrune(budget=6),
        PruMergePlus(budget=6),
        FastV(budget=6, counting="kept"),
        SparseVLM(budget=6),
        DART(budget=6, counting="kept"),
        PyramidDrop(budget=6, counting="kept"),
        VScanTwoStage(budget=6, window=2),
    ),
    "qwen2_5_vl": (
        available()["stacktok"](budget=3, before=PixelPrune()),
        FastV(budget=3, counting="kept", before=PixelPrune()),
    ),
}
CASES = [(family, method) for family, methods in METHODS.items() for method in methods]


class Int8Linear(nn.Module):
    """A linear layer that holds whole numbers and a scale per output, as quantised checkpoints do."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.whole = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.whole * self.scale, self.bias)


def quantise(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))


def round_weights(model: nn.Module) -> None:
    """The same numbers in stock layers."""
    for module in model.modules():
        if type(module) is nn.Linear:
            held = Int8Linear(module)
            module.weight.data = held.whole * held.scale


def prompt(tiny: Any) -> Any:
    return tiny.inputs(["Is there a dog?", "What is it, please?"], [[picture(160, 100)], [picture(60, 170, 1)]])


@pytest.mark.parametrize(("family", "method"), CASES, ids=lambda value: getattr(value, "info", value))
def test_quantised_weights_are_pruned_like_the_same_numbers_in_stock_layers(family: str, method: Any) -> None:
    tiny = build(family, 4)
    inputs = prompt(tiny)
    outputs = []
    for change in (round_weights, quantise):
        model = copy.deepcopy(tiny.model)
        change(model)
        with method(model, tiny.processor) as pruned:
            outputs.append((greedy(model, inputs, 3), [result.reduction.anchors.tolist() for result in pruned.last]))
    (stock, kept), (held, same) = outputs
    assert same == kept
    for a, b in zip(stock.logits, held.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS["llava"][3::4], ids=lambda value: value.info.name)
def test_compiled_models_are_pruned_alike(method: Any) -> None:
    tiny = build("llava", 4)
    inputs = prompt(tiny)
    with method(tiny.model, tiny.processor), torch.no_grad():
        expected = tiny.model(**inputs).logits
    # The tracing is what hooks could break; which compiler gets the graphs does not matter.
    compiled = torch.compile(tiny.model, backend="eager")
    with method(compiled, tiny.processor) as pruned, torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-4, atol=2e-5)
    assert all(result.per_layer[0] > result.after for result in pruned.last)
    torch._dynamo.reset()
