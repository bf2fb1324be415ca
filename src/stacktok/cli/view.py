"""``stacktok view``: the inspector page."""

from __future__ import annotations

from typing import Annotated

import typer

from stacktok.cli.common import DEFAULT_MODEL, MODEL_HELP, load, model_path, stderr, user_errors


def view(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="Where to listen; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 for any free port.")] = 8017,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="Largest upload.")] = 20,
    max_megapixels: Annotated[float, typer.Option(min=0.001, help="Largest picture.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Open a page that shows what the selector keeps of a picture, and why."""
    with user_errors():
        import socket
        import webbrowser

        import uvicorn

        from stacktok.view.engine import Engine
        from stacktok.view.pictures import Limits
        from stacktok.view.samples import scene_samples
        from stacktok.view.server import create_app

        loaded, processor = load(model_path(model), dtype, device, quiet=False)
        engine = Engine(
            loaded,
            processor,
            name=model or DEFAULT_MODEL,
            samples=scene_samples(),
            limits=Limits(max_megabytes, max_megapixels),
            max_new_tokens=max_new_tokens,
        )
        engine.warm_up()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # Whoever listens on all addresses is reached under names that are not known here.
        hosts = ("*",) if host in ("0.0.0.0", "::") else (host,)
        server = uvicorn.Server(uvicorn.Config(create_app(engine, hosts=hosts), log_level="warning"))
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}/"
        stderr().print(f"the inspector is at {address} (Ctrl+C ends it)", highlight=False)
        if browser:
            webbrowser.open(address)
        server.run(sockets=[listener])
