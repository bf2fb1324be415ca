"""Readiness that asks the engine: vLLM's own /health knows whether the engine has ended, not whether it answers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from stacktok.serving.metrics import Application, Message, Receive, Send

# An engine answers between two steps, and on a CPU a step of many images takes a while.
_PATIENCE, _STUCK = 2.0, 60.0


class ReadinessMiddleware:
    """Answers /ready: 200 while the engine answers, 503 once it has ended or has been silent for a minute.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self._question: asyncio.Task[Any] | None = None
        self._since = 0.0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on but /ready."""
        if scope["type"] != "http" or scope["path"].rstrip("/") != "/ready":
            await self.app(scope, receive, send)
            return
        reason = await self._reason(scope["app"].state.engine_client)
        answer = {"ready": reason is None, **({} if reason is None else {"reason": reason})}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        status = 200 if reason is None else 503
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _reason(self, engine: Any) -> str | None:
        """Why the engine is not ready, or None."""
        # A question to an engine that has ended may never be answered.
        try:
            await engine.check_health()
        except Exception as error:
            return f"the engine has ended: {type(error).__name__}"
        if self._question is None:
            self._question = asyncio.ensure_future(engine.collective_rpc("stacktok_counters"))
            self._since = time.monotonic()
        question = self._question
        await asyncio.wait([question], timeout=_PATIENCE)
        if not question.done():
            silent = time.monotonic() - self._since
            return f"the engine has not answered for {silent:.0f} s" if silent > _STUCK else None
        self._question = None
        failed = question.exception()
        return None if failed is None else f"the engine does not answer: {type(failed).__name__}"
