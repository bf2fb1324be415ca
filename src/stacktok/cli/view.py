"""``stacktok view``: the inspector page."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from stacktok.cli.common import (
    DEFAULT_MODEL,
    MODEL_HELP,
    SET_HELP,
    check_dtype,
    load,
    model_path,
    parse_settings,
    stderr,
    user_errors,
)


def view(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="Where to listen; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 for any free port.")] = 8017,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="Largest upload.")] = 20,
    max_megapixels: Annotated[float, typer.Option(min=0.001, help="Largest picture.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most visual tokens of a picture.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds within which a request is answered.")] = 120,
    settings: Annotated[list[str] | None, typer.Option("--set", help=SET_HELP)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Open a page that shows what the selector keeps of a picture, and why."""
    with user_errors():
        import webbrowser

        name, own = model_path(model), parse_settings(settings)
        check_dtype(dtype)
        # Before the model: a busy port is known at once.
        listener = listen(host, port)

        from stacktok.models.pictures import PictureLimits

        limits = PictureLimits(max_megabytes, max_megapixels, tokens=max_tokens)

        from stacktok.view.engine import Engine
        from stacktok.view.methods import default_methods
        from stacktok.view.samples import scene_samples
        from stacktok.view.server import create_app, serve

        methods = default_methods(own)
        loaded, processor = load(name, dtype, device, quiet=False)
        engine = Engine(
            loaded,
            processor,
            name=model or DEFAULT_MODEL,
            samples=scene_samples(),
            methods=methods,
            limits=limits,
            max_new_tokens=max_new_tokens,
        )
        engine.warm_up()
        # Whoever listens on all addresses is reached under names that are not known here.
        hosts = ("*",) if host in ("0.0.0.0", "::") else (host,)
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}/"
        stderr().print(f"the inspector is at {address} (Ctrl+C ends it)", highlight=False)
        if browser:
            webbrowser.open(address)
        serve(create_app(engine, hosts=hosts, deadline=deadline), listener)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; an address that is not available is an error that names it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"port {port} of {host} cannot be used ({error.strerror or error}); give another --port, or 0 for any "
            "free one"
        ) from None
