"""Finding a method by name: the built-in ones, and those that other packages register as entry points."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from stacktok.methods.base import Method

if TYPE_CHECKING:
    from stacktok.methods.pixel_method import PixelMethod

GROUP = "stacktok.methods"
"""Entry-point group: name = the method's name, value = a `Method` subclass."""

BUILT_IN = {
    "stacktok": "stacktok.methods.stacktok:StackTok",
    "mmtok": "stacktok.methods.mmtok:MMTok",
    "divprune": "stacktok.methods.divprune:DivPrune",
    "cdpruner": "stacktok.methods.cdpruner:CDPruner",
    "spotlight": "stacktok.methods.spotlight:Spotlight",
    "visionzip": "stacktok.methods.visionzip:VisionZip",
    "vispruner": "stacktok.methods.vispruner:VisPruner",
    "scope": "stacktok.methods.scope:SCOPE",
    "holov": "stacktok.methods.holov:HoloV",
    "dart-emb": "stacktok.methods.dart_embeddings:DARTEmbeddings",
    "hiprune": "stacktok.methods.hiprune:HiPrune",
    "vscan": "stacktok.methods.vscan:VScan",
    "prumerge": "stacktok.methods.prumerge:PruMergePlus",
    "evs": "stacktok.methods.evs:EVS",
    "vidcom2": "stacktok.methods.vidcom2:VidCom2",
    "random": "stacktok.methods.random_tokens:RandomTokens",
    "uniform": "stacktok.methods.uniform_grid:UniformGrid",
    "pool": "stacktok.methods.average_pool:AveragePool",
    "fastv": "stacktok.methods.fastv:FastV",
    "sparsevlm": "stacktok.methods.sparsevlm:SparseVLM",
    "dart": "stacktok.methods.dart:DART",
    "pyramiddrop": "stacktok.methods.pyramiddrop:PyramidDrop",
    "vscan-2": "stacktok.methods.vscan_two_stage:VScanTwoStage",
}


BEFORE_TOWER = {"pixelprune": "stacktok.methods.pixelprune:PixelPrune"}
"""Methods that work before the vision tower, which others are combined with."""

PICTURE = {"downsample": "stacktok.methods.downsample:DownSample"}
"""Methods that change the picture before the processor; `ask` and plans of lmms-eval know them."""


def available_before_tower() -> dict[str, type[PixelMethod]]:
    """Every method that works before the vision tower, by name."""
    found = {}
    for name, path in BEFORE_TOWER.items():
        module, attribute = path.split(":")
        found[name] = getattr(import_module(module), attribute)
    return found


def available_for_pictures() -> dict[str, type[Method]]:
    """Every method that changes the picture, by name."""
    found = {}
    for name, path in PICTURE.items():
        module, attribute = path.split(":")
        found[name] = getattr(import_module(module), attribute)
    return found


def pixel_method(name: str) -> PixelMethod:
    """The method before the vision tower of a name, with its defaults."""
    methods = available_before_tower()
    if name.lower() not in methods:
        raise ValueError(f"before={name!r} is not known; give one of {', '.join(methods)}, or an object")
    return methods[name.lower()]()


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
    methods = _found() | available_for_pictures()
    if name.lower() not in methods:
        raise ValueError(f"no method is called {name!r}; the methods are {', '.join(methods)}")
    return methods[name.lower()]
