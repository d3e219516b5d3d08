"""HTTP/1.1 to thousands of peers at once: connections that are kept, and little CPU a call.

A call is a line of headers, a small body, and an answer that is read to its end: httptools parses it (llhttp, as in
uvicorn and Node.js), asyncio connects and does TLS. A pause is as long as all of its calls together take on one core,
and a general client's take three to five times as much (docs/decisions/2026-11-30-calls-of-a-pause.md). There are no
proxies, no redirects, no cookies and no compression, and no time limit either: callers have one.

What will probably be asked soon can be sent ahead, all of it but its last byte (:meth:`Session.prepare`). A request
whose body is not complete is none: the peer waits for the rest, and forgets it with the connection. Asking for exactly
those bytes then costs one write of one byte (docs/decisions/2026-11-30-sent-ahead.md).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import httptools
from aiohappyeyeballs import start_connection
from yarl import URL

from moontide.engines import tls

KEEPALIVE_SECONDS = 4.0
"""Connections are kept for less time than uvicorn keeps them."""
ANSWER_BYTES = 16 * 2**20
"""What an answer may have: a peer that sends without end must not take the operator's memory."""
PREPARED_SECONDS = 10.0
"""Requests that were sent ahead and asked for by nobody are given up after this."""
SECOND_ADDRESS_SECONDS = 0.25
"""After which the next address of a name is tried beside the one before it (RFC 8305)."""

Answer = tuple[int, bytes]
"""Status code and body."""


class Disconnected(ConnectionError):
    """The peer closed the connection before its answer was complete."""


class Malformed(ValueError):
    """What came is no HTTP, or more than :data:`ANSWER_BYTES`."""


class Request(NamedTuple):
    """One to a peer, with a body."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


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
        self.prepared: list[bytes] = []
        """Requests to come, in their order. Of the first all was sent but its last byte."""
        self._unsent = b""
        """What waits for :meth:`send`."""
        self._lasts = False
        """Whether another request may follow."""
        self._begin()

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self._bytes = 0
        self._headed = False
        self._measured = False
        """Whether the answer says where it ends. One that does not ends with the connection."""

    def hold(self, data: bytes) -> asyncio.Future[Answer]:
        """Have ``data``, which completes a request, ready for :meth:`send`. Its answer, for :meth:`answer`. Raises
        OSError."""
        self._begin()
        if self._transport is None or self._transport.is_closing():
            raise Disconnected("the connection was closed")
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiter, self._unsent = waiter, data
        return waiter

    def prepare(self, requests: list[bytes]) -> None:
        """Send all of the first of ``requests`` but its last byte. Nothing else may be asked here before them."""
        assert self._transport is not None
        self.prepared = requests
        self._transport.write(requests[0][:-1])

    def complete(self) -> asyncio.Future[Answer]:
        """As :meth:`hold`, of what completes the first that is prepared, and all but the last byte of the next one."""
        rest = self.prepared.pop(0)[-1:]
        return self.hold(rest + self.prepared[0][:-1] if self.prepared else rest)

    def send(self) -> None:
        """Send what is ready."""
        data, self._unsent = self._unsent, b""
        if data and self._transport is not None:
            self._transport.write(data)

    async def answer(self, waiter: asyncio.Future[Answer]) -> Answer:
        """What comes. Raises OSError and :class:`Malformed`; whoever is cancelled has closed the connection."""
        try:
            return await waiter
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
        self._prepared: dict[_Key, _Connection] = {}
        self._begun: dict[tuple[_Key, bytes], tuple[_Connection, asyncio.Future[Answer]]] = {}
        """Requests that were sent whole before anybody asked, and their answers."""
        self._together = 0
        self._held: list[_Connection] = []
        """What :meth:`together` sends at its end."""
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
        key = self._key(place, server_name)
        kept, waiter = self._begun.pop((key, request), (None, None))
        if kept is None:
            kept = self._ready(key, request) or self._kept(key)
        if kept is None and key in self._prepared:
            # One connection is enough for a peer, and this is closed before the next one opens.
            self._give_up(key)
            await asyncio.sleep(0)
        if kept is not None:
            try:
                return await self._use(kept, key, request, waiter)
            except ConnectionError:
                if not kept.untouched:
                    raise
        return await self._use(await self._connect(place, key[2], server_name), key, request)

    async def _use(
        self,
        connection: _Connection,
        key: _Key,
        request: bytes,
        waiter: asyncio.Future[Answer] | None = None,
    ) -> Answer:
        """``waiter``: for the answer, where the request was sent already."""
        if waiter is None:
            waiter = connection.complete() if connection.prepared else connection.hold(request)
            if self._together:
                self._held.append(connection)
            else:
                connection.send()
        answer = await connection.answer(waiter)
        self._keep(key, connection)
        return answer

    def _key(self, place: _Place, server_name: str) -> _Key:
        return place.host, place.port, self._trust.context() if place.secured else None, server_name

    def prepare(self, *requests: Request, server_name: str = "") -> None:
        """``requests`` will probably be asked of one peer, one after the other: send it all of the first but its last
        byte, and of each other one when the one before it is asked.

        Only where a connection to the peer is idle; what was prepared for it before is given up then. Whoever asks for
        the same bytes has the rest sent. Whoever asks for anything else has another connection, and what was prepared
        is given up if there is none. Raises ValueError as :meth:`ask` does, and for a request without a body.
        """
        first = _place(requests[0].url)
        key = self._key(first, server_name)
        data = []
        for method, url, headers, body in requests:
            place = _place(url)
            if (place.host, place.port, place.secured) != (first.host, first.port, first.secured) or not body:
                raise ValueError(f"{method} {url} cannot be prepared: it has no body, or is for another peer")
            data.append(_request(method, place, headers, body))
        kept = self._kept(key)
        if kept is not None:
            kept.prepare(data)
            self._set_aside(key, kept)

    def begin(self, request: Request, server_name: str = "") -> None:
        """Send the rest of ``request`` where it was prepared; :meth:`ask` with the same has to follow, for its answer.

        What else asking costs is then no part of the time for which the peer waits.
        """
        place = _place(request.url)
        key = self._key(place, server_name)
        data = _request(request.method, place, request.headers, request.body)
        connection = self._ready(key, data)
        if connection is not None and connection.reusable:
            waiter = connection.complete()
            # Should nobody ask, nobody has to know.
            waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
            connection.send()
            connection.since = asyncio.get_running_loop().time()
            self._begun[key, data] = connection, waiter

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is asked meanwhile on connections that are there is sent at the end of it, all in one go: between the
        first peer that gets its request and the last one nothing else is done."""
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            if not self._together:
                held, self._held = self._held, []
                for connection in held:
                    connection.send()

    def _ready(self, key: _Key, request: bytes) -> _Connection | None:
        """The connection on which exactly ``request`` was prepared."""
        connection = self._prepared.get(key)
        if connection is None or connection.prepared[0] != request:
            return None
        return self._prepared.pop(key)

    def _give_up(self, key: _Key) -> None:
        connection = self._prepared.pop(key, None)
        if connection is not None:
            connection.abort()

    def _set_aside(self, key: _Key, connection: _Connection) -> None:
        self._give_up(key)
        connection.since = asyncio.get_running_loop().time()
        self._prepared[key] = connection
        self._sweep_later()

    async def close(self) -> None:
        """Close all connections, and those that are being made as soon as they are."""
        self._over = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        self._prepared.clear()
        self._begun.clear()
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
        if connection.prepared:
            # Of the next one all was sent but its last byte.
            self._set_aside(key, connection)
            return
        connection.since = asyncio.get_running_loop().time()
        self._idle.setdefault(key, []).append(connection)
        self._sweep_later()

    def _sweep_later(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEEPALIVE_SECONDS, self._close_idle)

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
        for key, connection in list(self._prepared.items()):
            if connection.since <= loop.time() - PREPARED_SECONDS or not connection.reusable:
                self._give_up(key)
        for begun, (connection, _) in list(self._begun.items()):
            if connection.since <= loop.time() - PREPARED_SECONDS:
                del self._begun[begun]
                connection.abort()
        if self._idle or self._prepared or self._begun:
            self._sweep = loop.call_later(max(first - over, 0.1), self._close_idle)
