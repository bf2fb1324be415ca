"""``stacktok serve``: vLLM's server with pruned image tokens."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from stacktok.cli.common import MODEL_HELP, SETTINGS_HELP, load_settings, model_path, user_errors
from stacktok.core.budget import parse_budget


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help=f"{MODEL_HELP} Goes before any flag of vLLM."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Tokens to keep per image: 64, 0.2, 20%, or all; 64 if not given.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="How to prune, see `methods`; stacktok if not given.")] = None,
    parameters: Annotated[str | None, typer.Option(help="The method's own parameters, as JSON.")] = None,
    settings_file: Annotated[Path | None, typer.Option("--settings", help=SETTINGS_HELP)] = None,
    cache_megabytes: Annotated[float, typer.Option(min=0, help="Cache of unpruned encoder outputs.")] = 512,
    host: Annotated[str, typer.Option(help="Where to listen; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen.")] = 8000,
    hf_overrides: Annotated[str, typer.Option(help="vLLM's --hf-overrides, as JSON; ours are added.")] = "{}",
    allow_media_domain: Annotated[
        list[str] | None,
        typer.Option(help="A host from which pictures may be fetched, again for more; without, data URLs alone."),
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as JSON, an object per line.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start the server again when it ends by itself.")] = False,
) -> None:
    """Serve a model with vLLM and pruned image tokens; all other flags go to vLLM as they are."""
    with user_errors():
        settings: dict[str, Any] = {
            "budget": None if budget == "all" else parse_budget(budget or "64"),
            "method": method or "stacktok",
            "parameters": _json("parameters", parameters or "{}"),
            "cache_megabytes": cache_megabytes,
        }
        if settings_file is not None:
            settings |= _from_file(settings_file, method=method, budget=budget, parameters=parameters)
        if find_spec("vllm") is None:
            raise ValueError("this command needs vLLM: pip install 'stacktok[vllm]' (on a CPU: docs/serving.md)")

        from stacktok.models.loading import read_config
        from stacktok.serving import launch
        from stacktok.serving.supervise import supervise

        launch.check_address(host, port)
        # Without a model the first flag that is not ours stands in its place.
        passed = [model, *context.args] if model is not None and model.startswith("-") else context.args
        name = model_path(None if model is None or model.startswith("-") else model)
        model_type = read_config(name).model_type
        extra = ["--host", host, "--port", str(port), *passed]
        overrides = _json("hf-overrides", hf_overrides)
        flags = launch.server_arguments(
            name, model_type, settings, overrides, extra, domains=allow_media_domain or (), log_json=log_json
        )
    if restart:
        again = [argument for argument in sys.argv[1:] if argument != "--restart"]
        raise typer.Exit(supervise([sys.executable, "-c", "from stacktok.cli import main; main()", *again]))
    if not log_json:
        typer.echo(launch.summary(name, model_type, settings, host, port, passed))
    launch.serve(flags)


def _from_file(path: Path, **others: object) -> dict[str, Any]:
    """A settings file as a server's settings, refused where vLLM cannot do what it says."""
    from stacktok.methods.settings import method_name, own_parameters
    from stacktok.serving.settings import Settings

    chosen = load_settings(path, **others)
    positions = {} if chosen.positions is None else {"positions": chosen.positions}
    found = {
        "budget": chosen.budget,
        "method": method_name(chosen),
        "parameters": {**own_parameters(chosen), **positions},
    }
    Settings.read(found)
    return found


def _json(name: str, text: str) -> dict[str, Any]:
    from stacktok.core.limits import parse_json, shown

    found = parse_json(name, text)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {shown(text)}; give an object such as '{{}}'")
    return found
