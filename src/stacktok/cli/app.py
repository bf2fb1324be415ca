"""The commands and their order in the help."""

from __future__ import annotations

from typing import Annotated

import typer

from stacktok import __version__
from stacktok.cli.ask import ask
from stacktok.cli.batch import batch
from stacktok.cli.bench import bench
from stacktok.cli.check import check
from stacktok.cli.demo import demo
from stacktok.cli.evaluate import evaluate, report
from stacktok.cli.methods import methods
from stacktok.cli.models import models
from stacktok.cli.serve import serve
from stacktok.cli.show import show
from stacktok.cli.tune import tune
from stacktok.cli.view import view

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: rich would load a Markdown parser for it, half of the time that a usage error takes.
    rich_markup_mode=None,
    help="Training-free visual-token pruning for vision-language models.",
)
app.command()(demo)
app.command()(ask)
app.command()(batch)
app.command()(check)
app.command()(tune)
app.command()(bench)
app.command()(models)
app.command()(view)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(methods)
app.command()(show)
app.command("eval")(evaluate)
app.command()(report)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stacktok {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
