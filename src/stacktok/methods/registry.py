"""Finding a method by name: the built-in ones, and those that other packages register as entry points."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from stacktok.methods.base import Method

GROUP = "stacktok.methods"
"""Entry-point group: name = the method's name, value = a `Method` subclass."""

BUILT_IN = {
    "stacktok": "stacktok.methods.stacktok:StackTok",
    "mmtok": "stacktok.methods.mmtok:MMTok",
    "divprune": "stacktok.methods.divprune:DivPrune",
    "cdpruner": "stacktok.methods.cdpruner:CDPruner",
    "visionzip": "stacktok.methods.visionzip:VisionZip",
    "vispruner": "stacktok.methods.vispruner:VisPruner",
    "scope": "stacktok.methods.scope:SCOPE",
    "holov": "stacktok.methods.holov:HoloV",
    "dart-embeddings": "stacktok.methods.dart_embeddings:DARTEmbeddings",
    "evs": "stacktok.methods.evs:EVS",
    "vidcom2": "stacktok.methods.vidcom2:VidCom2",
    "random": "stacktok.methods.random_tokens:RandomTokens",
    "uniform": "stacktok.methods.uniform_grid:UniformGrid",
    "pool": "stacktok.methods.average_pool:AveragePool",
    "fastv": "stacktok.methods.fastv:FastV",
    "sparsevlm": "stacktok.methods.sparsevlm:SparseVLM",
    "dart": "stacktok.methods.dart:DART",
    "pyramiddrop": "stacktok.methods.pyramiddrop:PyramidDrop",
}


def available() -> dict[str, type[Method]]:
    """Every method that can be used here, by name: the built-in ones in the order of the tables, then installed ones.

    An installed method may take the place of a built-in one of the same name. Packages are looked up once per process.
    """
    return dict(_found())


@cache
def _found() -> dict[str, type[Method]]:
    found: dict[str, Any] = {}
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, path in BUILT_IN.items():
        if name not in installed:
            module, attribute = path.split(":")
            found[name] = getattr(import_module(module), attribute)
    for name, entry in sorted(installed.items()):
        method = entry.load()
        if not (isinstance(method, type) and issubclass(method, Method)):
            raise TypeError(f"entry point {name!r} of group {GROUP!r} is {method!r}; it must name a subclass of Method")
        found[name.lower()] = method
    return found


def method_class(name: str) -> type[Method]:
    """The method of a name, in any spelling of case; an unknown one is an error that lists the known."""
    methods = _found()
    if name.lower() not in methods:
        raise ValueError(f"no method is called {name!r}; the methods are {', '.join(methods)}")
    return methods[name.lower()]
