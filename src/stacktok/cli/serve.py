"""``stacktok serve``: vLLM's server with pruned image tokens."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from stacktok.cli.common import MODEL_HELP, model_path, user_errors
from stacktok.core.budget import parse_budget


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help=f"{MODEL_HELP} Goes before any flag of vLLM."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Tokens to keep per image: 64, 0.2, 20%, or all.")] = "64",
    method: Annotated[str, typer.Option(help="How to prune; see `methods`.")] = "stacktok",
    parameters: Annotated[str, typer.Option(help="The method's own parameters, as JSON.")] = "{}",
    cache_megabytes: Annotated[float, typer.Option(min=0, help="Cache of unpruned encoder outputs.")] = 512,
    host: Annotated[str, typer.Option(help="Where to listen; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen.")] = 8000,
    hf_overrides: Annotated[str, typer.Option(help="vLLM's --hf-overrides, as JSON; ours are added.")] = "{}",
) -> None:
    """Serve a model with vLLM and pruned image tokens; all other flags go to vLLM as they are."""
    with user_errors():
        from stacktok.serving.launch import serve as run
        from stacktok.serving.launch import server_arguments

        settings: dict[str, Any] = {
            "budget": None if budget == "all" else parse_budget(budget),
            "method": method,
            "parameters": _json("parameters", parameters),
            "cache_megabytes": cache_megabytes,
        }
        if find_spec("vllm") is None:
            raise ValueError("this command needs vLLM: pip install 'stacktok[vllm]' (on a CPU: docs/serving.md)")
        # Without a model the first flag that is not ours stands in its place.
        passed = [model, *context.args] if model is not None and model.startswith("-") else context.args
        name = model_path(None if model is None or model.startswith("-") else model)
        transformers: Any = import_module("transformers")
        model_type = transformers.AutoConfig.from_pretrained(name).model_type
        extra = ["--host", host, "--port", str(port), *passed]
        flags = server_arguments(name, model_type, settings, _json("hf-overrides", hf_overrides), extra)
    run(flags)


def _json(name: str, text: str) -> dict[str, Any]:
    import json

    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {text!r}; give an object such as '{{}}'")
    return found
