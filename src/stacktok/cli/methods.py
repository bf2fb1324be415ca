"""``stacktok methods``: what can prune."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stacktok.cli.common import stdout, user_errors

if TYPE_CHECKING:
    from stacktok.methods import Method, PixelMethod


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the methods: stage, whether they need attention scores or the question, paper, deviations."""
    with user_errors():
        from stacktok.methods.registry import available, available_before_tower, available_for_pictures

        found = {name: described(method) for name, method in (available() | available_for_pictures()).items()}
        found |= {name: before_tower(method) for name, method in available_before_tower().items()}
    if as_json:
        print(json.dumps(found))
        return

    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table("--method", "name", "stage", "attention of", "question", box=None, padding=(0, 2, 0, 0))
    table.add_column("paper", overflow="fold")
    table.columns[1].no_wrap = True
    for name, info in found.items():
        asked = "yes" if info["query_aware"] else "no"
        table.add_row(name, info["name"], info["stage"], info["attention"] or "-", asked, info["paper"])
    console = stdout()
    console.print(table)
    console.print("\nstage: before or inside the language model; question: whether it has a say", highlight=False)
    console.print("picture: before the processor; in `ask` and in plans of lmms-eval", highlight=False)
    console.print("tower: before the vision tower; joins any method by `--set before=pixelprune`\n", highlight=False)
    for info in found.values():
        if info["deviations"]:
            console.print(f"{info['name']}, against the original:", highlight=False)
            for deviation in info["deviations"]:
                console.print(Padding(Text(f"- {deviation}"), (0, 0, 0, 2)))


def before_tower(method: type[PixelMethod]) -> dict[str, Any]:
    """A row of the table for a method that works before the vision tower."""
    needs = {"stage": method.stage, "query_aware": False, "attention": "", "merges": False}
    return {**needs, **asdict(method.info)}


def described(method: type[Method]) -> dict[str, Any]:
    """A row of the table: what the method needs, and its `MethodInfo`; attention is empty for none."""
    read = {"vision tower": method.reads_tower, "language model": method.stage == "inside"}
    attention = ", ".join(where for where, needed in read.items() if needed)
    return {
        "stage": method.stage,
        "query_aware": method.query_aware,
        "attention": attention,
        "merges": method.merges,
        **asdict(method.info),
    }
