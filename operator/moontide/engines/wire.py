"""HTTP/1.1 to thousands of peers at once: connections that are kept, and little CPU a call.

A call is a line of headers, a small body, and an answer that is read to its end: httptools parses it (llhttp, as in
uvicorn and Node.js), asyncio connects and does TLS. A pause is as long as all of its calls together take on one core,
and a general client's take three to five times as much (docs/decisions/2026-11-30-calls-of-a-pause.md). There are no
proxies, no redirects, no cookies and no compression, and no time limit either: callers have one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import httptools
from aiohappyeyeballs import start_connection
from yarl import URL

from moontide.engines import tls

KEEPALIVE_SECONDS = 4.0
"""Connections are kept for less time than uvicorn keeps them."""
ANSWER_BYTES = 16 * 2**20
"""What an answer may have: a peer that sends without end must not take the operator's memory."""
SECOND_ADDRESS_SECONDS = 0.25
"""After which the next address of a name is tried beside the one before it (RFC 8305)."""

Answer = tuple[int, bytes]
"""Status code and body."""


class Disconnected(ConnectionError):
    """The peer closed the connection before its answer was complete."""


class Malformed(ValueError):
    """What came is no HTTP, or more than :data:`ANSWER_BYTES`."""


@dataclass(frozen=True)
class _Place:
    """A URL, taken apart."""

    host: str
    port: int
    secured: bool
    named: bool
    """Whether the host is a name, which may have several addresses."""
    target: bytes
    """What follows the method: target, version, and the headers that go by the URL."""


@lru_cache(maxsize=16384)
def _place(url: str) -> _Place:
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.port is None:
        raise ValueError(f"{url} is no URL of a peer: write http://HOST:PORT or https://HOST:PORT")
    target = f" {parsed.raw_path_qs} HTTP/1.1\r\nhost: {parsed.host_port_subcomponent}\r\naccept: */*\r\n"
    return _Place(parsed.host, parsed.port, parsed.scheme == "https", not _is_address(parsed.host), target.encode())


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _request(method: str, place: _Place, headers: Mapping[str, str], body: bytes | None) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError("a header, which may be the token, has a line break or a NUL in it")
    if body is None:
        return b"%b%b%b\r\n" % (method.encode(), place.target, lines.encode())
    return b"%b%b%bcontent-length: %d\r\n\r\n%b" % (method.encode(), place.target, lines.encode(), len(body), body)


class _Connection(asyncio.Protocol):
    """To one peer. One request at a time."""

    def __init__(self, made: Callable[[_Connection], None], lost: Callable[[_Connection], None]) -> None:
        """``made`` and ``lost`` are called once each, as it opens and when it is closed."""
        self._made, self._lost = made, lost
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.since = 0.0
        """When it became idle, by the loop's clock."""
        self._lasts = False
        """Whether another request may follow."""
        self._begin()

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self._bytes = 0
        self._headed = False
        self._measured = False
        """Whether the answer says where it ends. One that does not ends with the connection."""

    async def ask(self, request: bytes) -> Answer:
        """The answer to ``request``. Raises OSError and :class:`Malformed`; whoever is cancelled has closed it."""
        self._begin()
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Disconnected("the connection was closed")
        self._waiter = asyncio.get_running_loop().create_future()
        transport.write(request)
        try:
            return await self._waiter
        except BaseException:
            self._waiter = None
            self.abort()
            raise

    @property
    def untouched(self) -> bool:
        """Whether nothing of an answer has come."""
        return self._bytes == 0

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self._lasts and self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's calls ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._made(self)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._bytes += len(data)
        if self._waiter is None:
            # Nobody asked.
            self.abort()
        elif self._bytes > ANSWER_BYTES:
            self._fail(Malformed(f"the answer has more than {ANSWER_BYTES} bytes"))
        else:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                if self._waiter is None:
                    # The answer was complete, and this came behind it.
                    self.abort()
                else:
                    self._fail(Malformed(f"what answers does not speak HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = None
        self._lost(self)
        if self._waiter is None:
            return
        if exc is None and self._headed and not self._measured:
            self._answer()
        else:
            self._fail(exc or Disconnected("the connection was closed before the answer was complete"))

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _answer(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result((self._parser.get_status_code(), b"".join(self._body)))

    # The parser's calls ---------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the parser."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._measured = True

    def on_headers_complete(self) -> None:
        """Of the parser."""
        self._headed = True

    def on_body(self, body: bytes) -> None:
        """Of the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Of the parser."""
        if self._parser.get_status_code() < 200:
            # Not yet the answer.
            self._headed = self._measured = False
            self._body.clear()
        elif self._waiter is None:
            # A second answer to one request.
            self.abort()
        else:
            self._lasts = self._parser.should_keep_alive()
            self._answer()


_Key = tuple[str, int, ssl.SSLContext | None, str]
"""Host, port, whom to trust, and the name that was verified."""


class Session:
    """Connections to peers: as many as are needed at once, each kept for :data:`KEEPALIVE_SECONDS`.

    One is used again only for the address, the authorities and the name for which it was made. Needs a running loop.
    """

    def __init__(self, trust: tls.Trust) -> None:
        """``trust``: for peers whose URL begins with https."""
        self._trust = trust
        self._turns = tls.Turns()
        self._idle: dict[_Key, list[_Connection]] = {}
        self._living: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._none = asyncio.Event()
        """Set while no connection is open."""
        self._none.set()
        self._over = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, server_name: str = ""
    ) -> Answer:
        """The answer of the peer at ``url``, whatever its status code is.

        ``server_name``: whom a peer with TLS must be; empty: the URL's host. A peer may close a connection that was
        kept at the moment in which it is used again: what was sent then is sent once more, on a new one, so every
        request must be one that may be repeated. Raises OSError (ssl.SSLError among them) where nobody answers, and
        ValueError for a URL, a header or an answer that is none.
        """
        place = _place(url)
        request = _request(method, place, headers, body)
        context = self._trust.context() if place.secured else None
        key = (place.host, place.port, context, server_name)
        kept = self._kept(key)
        if kept is not None:
            try:
                return await self._use(kept, key, request)
            except ConnectionError:
                if not kept.untouched:
                    raise
        return await self._use(await self._connect(place, context, server_name), key, request)

    async def _use(self, connection: _Connection, key: _Key, request: bytes) -> Answer:
        answer = await connection.ask(request)
        self._keep(key, connection)
        return answer

    async def close(self) -> None:
        """Close all connections, and those that are being made as soon as they are."""
        self._over = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        for connection in list(self._living):
            connection.abort()
        await self._none.wait()

    async def _connect(self, place: _Place, context: ssl.SSLContext | None, server_name: str) -> _Connection:
        if context is None:
            return await self._open(place, None, None)
        async with self._turns.one():
            return await self._open(place, context, server_name or place.host)

    async def _open(self, place: _Place, context: ssl.SSLContext | None, server_name: str | None) -> _Connection:
        loop = asyncio.get_running_loop()
        where: dict[str, Any] = {"host": place.host, "port": place.port}
        if place.named:
            # asyncio's own way to try several addresses loses a socket where it is cancelled.
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            where = {"sock": await start_connection(found, happy_eyeballs_delay=SECOND_ADDRESS_SECONDS)}
        _, made = await loop.create_connection(
            lambda: _Connection(self._opened, self._closed), ssl=context, server_hostname=server_name, **where
        )
        return made

    def _opened(self, connection: _Connection) -> None:
        self._living.add(connection)
        self._none.clear()
        if self._over:
            connection.abort()

    def _closed(self, connection: _Connection) -> None:
        self._living.discard(connection)
        if not self._living:
            self._none.set()

    def _kept(self, key: _Key) -> _Connection | None:
        idle = self._idle.get(key)
        over = asyncio.get_running_loop().time() - KEEPALIVE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.since > over and connection.reusable:
                return connection
            connection.abort()
        return None

    def _keep(self, key: _Key, connection: _Connection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.since = loop.time()
        self._idle.setdefault(key, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        first = loop.time()
        over = first - KEEPALIVE_SECONDS
        for key, idle in list(self._idle.items()):
            for connection in idle:
                if connection.since <= over:
                    connection.abort()
                else:
                    first = min(first, connection.since)
            left = [each for each in idle if each.reusable]
            if left:
                self._idle[key] = left
            else:
                del self._idle[key]
        if self._idle:
            self._sweep = loop.call_later(max(first - over, 0.1), self._close_idle)
