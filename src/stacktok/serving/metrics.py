"""Our counters beside vLLM's at /metrics.

The selector runs in vLLM's engine process and /metrics is answered in its server process, so the numbers are fetched
when they are asked for. The server loads this class by its own flag, ``--middleware``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from stacktok.serving.counters import Snapshot, exposition

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

# Beyond this a step of the engine is still running, and the last known numbers are given.
_PATIENCE = 2.0


class CountersMiddleware:
    """Adds the counters of the engine to what the application answers at /metrics.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self._last: Snapshot = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; answer /metrics with more."""
        if scope["type"] != "http" or scope["path"].rstrip("/") != "/metrics":
            await self.app(scope, receive, send)
            return
        # Plain text is what lines can be added to: neither compressed nor in a format with an end mark.
        headers = [header for header in scope["headers"] if header[0] not in (b"accept", b"accept-encoding")]
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        await self.app({**scope, "headers": headers}, receive, keep)
        start = next(message for message in answer if message["type"] == "http.response.start")
        body = b"".join(message.get("body", b"") for message in answer if message["type"] == "http.response.body")
        if start["status"] == 200:
            body += exposition([await self._counters(scope["app"])]).encode()
        kept = [header for header in start["headers"] if header[0] != b"content-length"]
        await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    async def _counters(self, application: Any) -> Snapshot:
        engine = application.state.engine_client
        try:
            workers = await asyncio.wait_for(engine.collective_rpc("stacktok_counters"), _PATIENCE)
        except asyncio.TimeoutError:
            return self._last
        # Ranks of a tensor-parallel engine all select the same tokens and count the same images.
        self._last = dict(workers[0])
        return self._last
