"""The table of all methods: what each needs, and the time that its selection takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stacktok.bench.all_methods import SelectionTimes
    from stacktok.methods import Method

_BLOCK = re.compile(r"<!-- stacktok bench -->.*?<!-- end -->", re.DOTALL)
NOT_MEASURED = "-"


def facts(method: Method) -> tuple[str, ...]:
    """The needs of a method: attention of what, the question, whether it can be served, tokens of a layer."""
    from stacktok.cli.methods import described
    from stacktok.serving.settings import Settings

    info = described(type(method))
    try:
        Settings.read({"method": _registered(method), "budget": 64})
        served = "yes"
    except ValueError:
        served = "no"
    per_layer = "falls, layer by layer" if method.stage == "inside" else "the budget"
    return (
        info["name"],
        info["attention"] or "no",
        "yes" if method.query_aware else "no",
        served,
        per_layer,
    )


def markdown(methods: Mapping[str, Method], times: Mapping[str, SelectionTimes], sizes: Sequence[Any]) -> str:
    """The table of all methods; what was not measured has a dash."""
    head = ["method", "needs attention of", "needs the question", "servable", "tokens per layer"]
    head += [f"ms at {size}, first / further question" for size in sizes]
    rows = [head, ["---"] * len(head)]
    for name, method in methods.items():
        rows.append([*facts(method), *(_shown(times.get(name), size) for size in sizes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def check_marks(page: Path) -> None:
    """Refuse a page without the marks ``<!-- stacktok bench -->`` and ``<!-- end -->``."""
    if not _BLOCK.search(page.read_text()):
        raise ValueError(f"{page} has no place for the table; put <!-- stacktok bench --><!-- end --> where it belongs")


def write_into(page: Path, table: str) -> None:
    """Put the table between the marks of a page."""
    check_marks(page)
    page.write_text(_BLOCK.sub(lambda _: f"<!-- stacktok bench -->\n\n{table}\n\n<!-- end -->", page.read_text()))


def _shown(times: SelectionTimes | None, size: tuple[int, int]) -> str:
    if times is None or times.refused:
        return NOT_MEASURED
    return f"{times.first[size]:.1f} / {times.further[size]:.1f}"


def _registered(method: Method) -> str:
    from stacktok.methods import available

    return next(name for name, kind in available().items() if kind is type(method))
