"""Methods from their names, from parameters by name, and from settings files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from stacktok.core.budget import Budget, Coverage
from stacktok.core.limits import shown
from stacktok.methods.base import Method
from stacktok.methods.registry import BEFORE_TOWER, available, method_class, pixel_method

KEPT: Mapping[str, Mapping[str, Any]] = {name: {"counting": "kept"} for name in ("fastv", "dart", "pyramiddrop")}
"""Defaults under which every budget is met: as an average over layers a small one leaves nothing, and DART's published
counting keeps 4 more than a multiple of 8."""


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


FORMAT = 1
"""Of settings files."""

_ENTRIES = ("stacktok", "model", "method", "budget", "positions", "parameters", "measured")


def load(path: str | Path) -> Method:
    """The method that a settings file describes, budget included; `stacktok tune` writes such files.

    Parameters
    ----------
    path
        A YAML file with ``stacktok: 1``, ``method`` and ``budget``, and where they differ from the defaults
        ``positions`` and ``parameters``; ``model`` and ``measured`` say where it comes from and change nothing.
    """
    import yaml

    source = Path(path)
    try:
        values = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(
            f"settings {source} cannot be read ({reason}); give a file that `stacktok tune` wrote"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"settings {source}{where} is not YAML; give a file that `stacktok tune` wrote") from None
    if not isinstance(values, dict) or values.get("stacktok") != FORMAT:
        raise ValueError(f"settings {source} does not begin with 'stacktok: {FORMAT}'; give a file of `stacktok tune`")
    for name in values:
        if name not in _ENTRIES:
            raise ValueError(f"settings {source} has the entry {shown(name)}; it may have {', '.join(_ENTRIES)}")
    if "method" not in values or "budget" not in values:
        raise ValueError(f"settings {source} has no method or no budget; give both")
    own, positions = values.get("parameters") or {}, values.get("positions")
    if not isinstance(own, dict):
        raise ValueError(
            f"settings {source} has parameters={shown(own)}; give a mapping such as {{relevance_depth: 8}}"
        )
    kind = method_class(str(values["method"]))
    budget = values["budget"]
    try:
        return kind(
            budget=Coverage.of(budget) or budget, **own | ({} if positions is None else {"positions": positions})
        )
    except TypeError as error:
        raise ValueError(f"settings {source} cannot be used: {error}") from None


def method_name(method: Method) -> str:
    """A method's name in the registry."""
    for name, kind in available().items():
        if type(method) is kind:
            return name
    raise ValueError(f"{type(method).__name__} is not registered; see docs/add-a-method.md")


def own_parameters(method: Method) -> dict[str, Any]:
    """Parameters that differ from the method's defaults; budget and positions left out."""
    found = {}
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name == "before" and value is not None:
            value = next((name for name in BEFORE_TOWER if pixel_method(name) == value), value)
        if field.name not in ("budget", "positions") and (field.default is MISSING or value != field.default):
            found[field.name] = value
    return found


def settings_text(method: Method, *, model: str | None = None, measured: Mapping[str, Any] | None = None) -> str:
    """The settings file of a method; see `load`.

    Parameters
    ----------
    method
        With its budget.
    model
        The model that it was chosen for.
    measured
        What was measured of it, as plain values.
    """
    import yaml

    budget: Budget | None = method.budget
    values: dict[str, Any] = {"stacktok": FORMAT}
    if model is not None:
        values["model"] = model
    values |= {"method": method_name(method), "budget": str(budget) if isinstance(budget, Coverage) else budget}
    if method.positions is not None:
        values["positions"] = method.positions
    own = own_parameters(method)
    values |= ({"parameters": own} if own else {}) | ({"measured": dict(measured)} if measured else {})
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text
