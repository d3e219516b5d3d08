"""The few ASGI types and answers that the gate and the admin plane share."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTooLarge(Exception):
    """A request body is longer than the limit it was read with."""


async def send_json(send: Send, status: int, body: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Send a whole JSON answer."""
    await send_body(send, status, json.dumps(body, separators=(",", ":")).encode(), b"application/json", headers)


async def send_body(
    send: Send, status: int, data: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send a whole answer."""
    length = str(len(data)).encode()
    fields = [(b"content-type", content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": data})


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Turn a WebSocket down before it is accepted (the client sees HTTP 403)."""
    await receive()
    await send({"type": "websocket.close", "code": 1008})


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole request body, None if the client left before its end. Raises BodyTooLarge beyond ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
