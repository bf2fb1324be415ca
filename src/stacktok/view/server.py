"""The server: the page's files and the JSON API that the page uses; `docs/inspector.md` describes both."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stacktok.core.limits import JSON_CHARACTERS, QUESTION_CHARACTERS, parse_json
from stacktok.models.pictures import PictureError
from stacktok.view import export
from stacktok.view.engine import Engine
from stacktok.view.jobs import Busy, Job, Jobs, Late, Superseded
from stacktok.view.pictures import STATUS, Refused, png

STATIC = Path(__file__).parent / "static"

# The page needs nothing from anywhere else, and may show nothing from anywhere else.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

T = TypeVar("T")
Page = Annotated[str, Header(alias="X-Page", min_length=1, max_length=64)]
Serial = Annotated[int, Header(alias="X-Serial", ge=0, le=2**53)]

UPLOAD = "/api/images"
"""Where pictures go; every other body is JSON."""


class SelectionQuery(BaseModel):
    """A question on a picture under a method."""

    image: str = Field(max_length=64)
    question: str = Field(max_length=QUESTION_CHARACTERS)
    method: str = Field(max_length=64)


class AtBudget(SelectionQuery):
    """The same at a budget."""

    budget: int = Field(ge=1, le=10**9)


class Exported(AtBudget):
    """The same, to take away."""

    form: Literal["svg", "json", "python"]


class Unpruned(BaseModel):
    """A question on a picture, with all tokens."""

    image: str = Field(max_length=64)
    question: str = Field(max_length=QUESTION_CHARACTERS)


class BoundedBodies:
    """Middleware that turns down JSON which is too long or nests too deep, before anything parses it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass it on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == UPLOAD:
            await self.app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
            if len(body) > JSON_CHARACTERS:
                detail = f"The request has more than {JSON_CHARACTERS} bytes; send less."
                await JSONResponse({"detail": detail}, 413)(scope, receive, send)
                return
        try:
            parse_json("the request", body.decode("utf-8"))
        except ValueError as error:
            await JSONResponse({"detail": _sentence(error)}, 422)(scope, receive, send)
            return
        kept: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return kept.pop() if kept else await receive()

        await self.app(scope, again, send)


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def create_app(engine: Engine, *, hosts: tuple[str, ...] = (), waiting: int = 16, deadline: float = 120) -> FastAPI:
    """The inspector as an ASGI application.

    Parameters
    ----------
    engine
        The model behind it.
    hosts
        Names under which the server is reached, besides those of this machine.
    waiting
        Requests that may wait for the model.
    deadline
        Seconds within which every request is answered, if only by saying that it took too long.
    """
    jobs = Jobs(waiting, deadline)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()

    app = FastAPI(
        title="StackTok inspector", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", lifespan=lifespan
    )
    app.add_middleware(BoundedBodies)
    # A name that a foreign page made point here is not one of ours.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", *hosts])

    @app.middleware("http")
    async def secure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    @app.exception_handler(PictureError)
    async def no_picture(_: Request, error: PictureError) -> JSONResponse:
        return JSONResponse({"detail": _sentence(error)}, STATUS[error.reason])

    @app.exception_handler(ValueError)
    async def wrong(_: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"detail": _sentence(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without the values that were sent: they may be long.
        problems = (f"{entry['loc'][-1]}: {entry['msg']}" for entry in error.errors()[:5])
        return JSONResponse({"detail": "; ".join(problems)}, 422)

    @app.exception_handler(Late)
    async def late(_: Request, error: Late) -> JSONResponse:
        detail = f"{error} Ask again, or start the inspector with a larger --deadline."
        return JSONResponse({"detail": detail}, 504)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        # Nobody reads this; without it a broken-off upload is logged as a fault of the server.
        return Response(status_code=400)

    @app.exception_handler(Superseded)
    async def superseded(_: Request, error: Superseded) -> JSONResponse:
        return JSONResponse({"detail": "This page has asked for something newer."}, 409)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> JSONResponse:
        detail = f"{waiting} requests wait already; try again in a moment."
        return JSONResponse({"detail": detail}, 503, {"Retry-After": "1"})

    async def run(page: str, serial: int, work: Callable[[Job], T]) -> T:
        return await asyncio.wrap_future(jobs.submit(page, serial, work))

    @app.get("/api/info")
    async def info() -> dict[str, Any]:
        """The model, the methods, the samples, the limits."""
        return {
            "model": engine.name,
            "family": engine.adapter.family,
            "methods": list(engine.methods),
            "samples": [{"image": s.name, "questions": list(s.questions)} for s in engine.samples.values()],
            "limits": asdict(engine.limits),
        }

    @app.get("/api/samples/{name}.png")
    async def sample(name: str) -> Response:
        """A sample's picture."""
        if name not in engine.samples:
            raise Refused(404, f"No sample is called {name!r}.")
        thumbnail = engine.samples[name].picture.copy()
        thumbnail.thumbnail((160, 160))
        return Response(png(thumbnail), media_type="image/png")

    @app.post(UPLOAD)
    async def upload(request: Request, page: Page, serial: Serial) -> dict[str, Any]:
        """Take a picture: the file itself is the body; it is held in memory alone."""
        data = bytearray()
        async for chunk in request.stream():
            data.extend(chunk)
            engine.limits.check_bytes(len(data))
        return await run(page, serial, lambda _: engine.describe(engine.upload(bytes(data))))

    @app.get("/api/images/{name}")
    async def image(name: str, page: Page, serial: Serial) -> dict[str, Any]:
        """A sample or a held upload: its crops, their grids, what may be kept."""
        return await run(page, serial, lambda _: engine.describe(engine.picture(name)))

    @app.get("/api/images/{name}/crops/{crop}.png")
    async def crop(name: str, crop: int) -> Response:
        """The encoder's view of a crop."""
        views = engine.views(name)
        if views is None or not 0 <= crop < len(views):
            raise Refused(404, "This picture is not held any more, or has no such crop.")
        return Response(views[crop], media_type="image/png")

    @app.post("/api/trace")
    async def trace(query: SelectionQuery, page: Page, serial: Serial) -> dict[str, Any]:
        """The whole run of a method: what every budget keeps, along which curves, by which criterion."""
        return await run(page, serial, lambda _: engine.trace(query.image, query.question, query.method))

    @app.post("/api/kept")
    async def kept(query: AtBudget, page: Page, serial: Serial) -> dict[str, Any]:
        """The tokens that a method keeps at one budget."""
        return await run(
            page, serial, lambda job: engine.kept(query.image, query.question, query.method, query.budget, job)
        )

    @app.post("/api/answer")
    async def answer(query: AtBudget, page: Page, serial: Serial) -> dict[str, Any]:
        """The model's answer with pruned tokens."""
        return await run(
            page, serial, lambda job: engine.answer(query.image, query.question, query.method, query.budget, job)
        )

    @app.post("/api/answer/full")
    async def full_answer(query: Unpruned, page: Page, serial: Serial) -> dict[str, Any]:
        """The model's answer with all tokens."""
        return await run(page, serial, lambda job: engine.answer(query.image, query.question, None, None, job))

    @app.post("/api/export")
    async def exported(query: Exported, page: Page, serial: Serial) -> Response:
        """The state as a drawing, as its full trace, or as a program."""
        state = (query.image, query.question, query.method, query.budget)
        if query.form == "json":
            return JSONResponse(await run(page, serial, lambda _: export.json_trace(engine, *state)))
        if query.form == "python":
            return PlainTextResponse(await run(page, serial, lambda _: export.python_lines(engine, *state)))
        drawing = await run(page, serial, lambda _: export.svg(engine, *state))
        return Response(drawing, media_type="image/svg+xml")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until Ctrl+C, which ends the server whatever the model is busy with.

    Parameters
    ----------
    app
        From `create_app`.
    listener
        A bound socket.
    """
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])
