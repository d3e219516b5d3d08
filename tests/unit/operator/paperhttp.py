"""A client of HTTP on paper: a transport of httpx, or a function, answers in place of a network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
import httpx


class _Answer:
    def __init__(self, answer: httpx.Response) -> None:
        self.status = answer.status_code
        self._content = answer.content

    async def read(self) -> bytes:
        return self._content


class _Session:
    """As much of an ``aiohttp.ClientSession`` as :mod:`moontide.engines.client` uses."""

    connector = None

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._http = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> _Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def request(self, method: str, url: object, **more: Any) -> AsyncIterator[_Answer]:
        name = more.get("server_hostname")
        extensions = {"sni_hostname": name} if name else None
        headers, content = more.get("headers"), more.get("data")
        try:
            answer = await self._http.request(method, str(url), headers=headers, content=content, extensions=extensions)
        except httpx.HTTPError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        yield _Answer(answer)


def session(
    network: httpx.AsyncBaseTransport | Callable[[httpx.Request], httpx.Response],
) -> aiohttp.ClientSession:
    """The client whose requests ``network`` answers; an exception of httpx becomes one of aiohttp."""
    transport = network if isinstance(network, httpx.AsyncBaseTransport) else httpx.MockTransport(network)
    return cast("aiohttp.ClientSession", _Session(transport))
