"""The command line. Commands import what they need when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``stacktok`` command."""
    try:
        from stacktok.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("the command line needs typer and rich: pip install 'stacktok[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="stacktok")
