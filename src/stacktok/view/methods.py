"""The methods that the page offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stacktok.methods.base import Method
from stacktok.methods.settings import KEPT, build_methods
from stacktok.methods.stacktok import StackTok
from stacktok.methods.video_method import VideoMethod


def default_methods(settings: Mapping[str, Any] | None = None) -> dict[str, Method]:
    """Every method, then the selector's variants: deeper relevance and ablations.

    Parameters
    ----------
    settings
        Parameters of the methods, see `build_methods`; the variants keep theirs. FastV's budget is what stays after
        its cut unless they say otherwise.
    """
    # The page shows pictures.
    built = build_methods(None, settings or {}, KEPT)
    return {name: method for name, method in built.items() if not isinstance(method, VideoMethod)} | {
        "stacktok, depth 8": StackTok(relevance_depth=8),
        "relevance only": StackTok(criterion="relevance"),
        "coverage only": StackTok(criterion="coverage"),
        "scalarized": StackTok(criterion="scalarized", swap_limit=0),
    }


def possible(methods: Mapping[str, Method], model: Any, processor: Any) -> dict[str, Method]:
    """Those of the methods that do not refuse a model, as methods inside the language model do on some families."""
    found = {}
    for name, method in methods.items():
        try:
            with method(model, processor):
                found[name] = method
        except ValueError:
            continue
    return found
