"""Gate to the server: only named addresses, requests of bounded size, answers that load nothing."""

from __future__ import annotations

import re
from typing import Any

MOST_BODY_BYTES = 4 * 2**20
"""Of a request. A megabyte of text in a field gets through, to be refused in a line that people see."""
OPEN = re.compile(
    r"/(files|report|runs|config|theme\.css|favicon\.ico|manifest\.json|robots\.txt|(assets|static)/.*)?"
    r"|/gradio_api/(info|app_id|startup-events|queue/(join|data)|heartbeat/\w+|cancel|reset)/?"
)
"""Addresses that the page itself asks for. Gradio's others read, write and pass on files, and are not needed."""

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; font-src 'self' data:;"
        b" script-src 'self' 'unsafe-inline' 'unsafe-eval'; worker-src 'self' blob:; connect-src 'self';"
        b" form-action 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""With them a browser asks no other machine for anything, whatever the page says."""


class Gate:
    """Passes on what is open, to an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not OPEN.fullmatch(scope["path"]):
            await _refuse(scope, send, 404, b"not found")
        elif _declared_length(scope) > MOST_BODY_BYTES:
            await _refuse(scope, send, 413, b"the request is too large")
        else:
            await self._app(scope, _bound_body(receive), _add_headers(send))


def _declared_length(scope: Any) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 16 else MOST_BODY_BYTES + 1


def _bound_body(receive: Any) -> Any:
    """Cut a body that does not say its length where it is too long, as if the other side were gone."""
    seen = 0

    async def received() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= MOST_BODY_BYTES else {"type": "http.disconnect"}

    return received


def _add_headers(send: Any) -> Any:
    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await send(message)

    return sent


async def _refuse(scope: Any, send: Any, status: int, text: bytes) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
