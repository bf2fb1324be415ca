"""Which methods the page offers."""

from __future__ import annotations

from stacktok.methods.base import Method
from stacktok.methods.fastv import FastV
from stacktok.methods.registry import available
from stacktok.methods.stacktok import StackTok


def default_methods() -> dict[str, Method]:
    """Every method, then the selector's variants: deeper relevance and ablations.

    FastV's budget is what stays after its cut: as an average over layers no small budget could be met in a shallow
    language model.
    """
    methods = {name: kind() for name, kind in available().items()}
    for name, method in methods.items():
        if type(method) is FastV:
            methods[name] = FastV(counting="kept")
    return methods | {
        "stacktok, depth 8": StackTok(relevance_depth=8),
        "relevance only": StackTok(criterion="relevance"),
        "coverage only": StackTok(criterion="coverage"),
        "scalarized": StackTok(criterion="scalarized", swap_limit=0),
    }
