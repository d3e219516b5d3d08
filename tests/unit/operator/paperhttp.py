"""A client of HTTP on paper: a transport of httpx, or a function, answers in place of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx

from moontide.engines.tls import Trust
from moontide.engines.wire import Answer, Session


class _Paper(Session):
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        super().__init__(Trust())
        self._http = httpx.AsyncClient(transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, server_name: str = ""
    ) -> Answer:
        extensions = {"sni_hostname": server_name} if server_name else None
        try:
            answer = await self._http.request(method, url, headers=headers, content=body, extensions=extensions)
        except httpx.HTTPError as error:
            raise ConnectionError(str(error)) from error
        return answer.status_code, answer.content


def session(network: httpx.AsyncBaseTransport | Callable[[httpx.Request], httpx.Response]) -> Session:
    """The client whose requests ``network`` answers; an exception of httpx becomes a ConnectionError."""
    return _Paper(network if isinstance(network, httpx.AsyncBaseTransport) else httpx.MockTransport(network))
