"""What server-side apply needs of a request: the API server reads its body as YAML, and the client writes JSON."""

from __future__ import annotations

import re

import aiohttp

APPLY = "application/apply-patch+yaml"
_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)", re.IGNORECASE)


def yaml_of(text: str) -> str:
    """JSON ``text`` as YAML: the same, but for characters beyond U+FFFF. YAML knows no pairs of escapes."""

    def character(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        pair = bytes.fromhex(found[1] + found[2])
        return pair.decode("utf-16-be")

    return _ESCAPE.sub(character, text)


async def readable_as_yaml(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A middleware of aiohttp's client: without it, one emoji in a spec or a message, and a status is refused."""
    if request.headers.get("Content-Type") == APPLY and isinstance(request.body, aiohttp.Payload):
        written = await request.body.as_bytes()
        readable = yaml_of(written.decode()).encode()
        if readable != written:
            await request.update_body(readable)
    return await handler(request)
