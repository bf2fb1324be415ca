"""Methods from their names and from parameters by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from stacktok.core.limits import shown
from stacktok.methods.base import Method
from stacktok.methods.registry import available, method_class

KEPT: Mapping[str, Mapping[str, Any]] = {"fastv": {"counting": "kept"}}
"""Defaults under which every budget can be met: FastV's as an average over layers leaves nothing for a small one."""


def build_methods(
    names: Sequence[str] | None,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Method]:
    """Methods by name, without a budget.

    Parameters
    ----------
    names
        Names of the registry; None for all.
    settings
        Parameters: ``name`` for every chosen method that has it, ``method.name`` for one of them.
    defaults
        Per method, parameters that hold where ``settings`` has none.
    """
    kinds = available() if names is None else {name.lower(): method_class(name) for name in names}
    parameters = {name: {field.name for field in fields(kind)} - {"budget"} for name, kind in kinds.items()}
    for key in settings:
        method, _, name = key.rpartition(".")
        chosen = [method.lower()] if method else list(kinds)
        if method and method.lower() not in kinds:
            raise ValueError(f"{shown(key)} names a method that is not chosen; the chosen are {', '.join(kinds)}")
        if not any(name in parameters[each] for each in chosen):
            known = sorted(set().union(*(parameters[each] for each in chosen)))
            raise ValueError(f"{', '.join(chosen)} has no parameter {shown(name)}; give one of {', '.join(known)}")
    built = {}
    for name, kind in kinds.items():
        own = dict((defaults or {}).get(name, {}))
        own |= {key: value for key, value in settings.items() if key in parameters[name]}
        own |= {key[len(name) + 1 :]: value for key, value in settings.items() if key.lower().startswith(f"{name}.")}
        built[name] = kind(**own)
    return built
