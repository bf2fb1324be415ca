"""Requests are checked before anything is done for them, whether or not they bring a picture.

vLLM passes ``mm_processor_kwargs`` to a processor only with a picture, and ``media_io_kwargs`` to the decoder of
pictures before that. Its server loads this class by its own flag, ``--middleware``.
"""

from __future__ import annotations

import json
from typing import Any

from stacktok.serving.metrics import Application, Message, Receive, Send
from stacktok.serving.settings import KEY, Settings, check_request

# Names that JSON can only spell otherwise with an escape, or in an encoding with zero bytes.
_NAMES = (b"mm_processor_kwargs", b"media_io_kwargs", b"\\u", b"\0")


class RequestMiddleware:
    """Checks bodies on their way to the application, after authentication.

    Parameters
    ----------
    app
        The application.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self._settings: Settings | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; a body that may not be is an error where the application reads it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        pieces: list[bytes] = []

        async def checked() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    self._check(b"".join(pieces), scope["app"])
                    pieces.clear()
            return message

        await self.app(scope, checked, send)

    def _check(self, body: bytes, application: Any) -> None:
        from fastapi import HTTPException

        if not any(name in body for name in _NAMES):
            return
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            # The application says what is wrong with it.
            return
        if not isinstance(found, dict):
            return
        if self._settings is None:
            config = application.state.engine_client.model_config.hf_config
            self._settings = Settings.read(getattr(config, KEY, {}))
        try:
            check_request(found, self._settings)
        except (ValueError, TypeError) as error:
            raise HTTPException(400, str(error)) from error
