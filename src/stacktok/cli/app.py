"""The commands and their order in the help."""

from __future__ import annotations

import typer

from stacktok.cli.ask import ask
from stacktok.cli.bench import bench
from stacktok.cli.demo import demo
from stacktok.cli.evaluate import evaluate, report
from stacktok.cli.methods import methods
from stacktok.cli.models import models
from stacktok.cli.serve import serve
from stacktok.cli.show import show
from stacktok.cli.view import view

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Training-free visual-token pruning for vision-language models.",
)
app.command()(demo)
app.command()(ask)
app.command()(bench)
app.command()(models)
app.command()(view)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(methods)
app.command()(show)
app.command("eval")(evaluate)
app.command()(report)


@app.callback()
def _root() -> None:
    """Keep one-command applications from losing their command's name."""
