"""``stacktok models``: what can be pruned."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stacktok.cli.common import stdout, user_errors


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the model families that can be pruned, and the shapes that `bench` knows."""
    with user_errors():
        from stacktok.bench.presets import PRESETS
        from stacktok.models.registry import supported

        families = supported()
    if as_json:
        print(json.dumps({"families": families, "presets": {name: p.family for name, p in PRESETS.items()}}))
        return
    from rich.table import Table

    table = Table("model type", "family", "bench presets")
    for model_type, family in families.items():
        table.add_row(model_type, family, ", ".join(n for n, p in PRESETS.items() if p.family == model_type))
    stdout().print(table)
