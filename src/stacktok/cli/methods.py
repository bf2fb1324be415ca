"""``stacktok methods``: what can prune."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stacktok.cli.common import user_errors


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the methods: stage, whether they need attention scores or the question, paper, deviations."""
    with user_errors():
        from stacktok.methods import available

        found = available()
    if as_json:
        print(json.dumps({name: {"stage": method.stage, **asdict(method.facts)} for name, method in found.items()}))
        return
    table = Table(
        "--method", "name", "stage", "needs attention?", "query-aware?", "paper", "deviations from the original"
    )
    for name, method in found.items():
        facts = method.facts
        table.add_row(
            name,
            facts.name,
            f"{method.stage} the language model",
            f"of the {facts.attention}" if facts.attention else "no",
            "yes" if facts.query_aware else "no",
            facts.paper,
            "\n".join(f"- {deviation}" for deviation in facts.deviations) or "-",
            end_section=True,
        )
    Console(width=None if Console().is_terminal else 200).print(table)
