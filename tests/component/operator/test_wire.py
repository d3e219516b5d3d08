"""The HTTP client of admin planes, and peers of every kind: what an answer is, and which connection is used again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from moontide.engines import wire
from moontide.engines.tls import Trust
from moontide.engines.wire import Disconnected, Malformed, Request, Session
from tests.component.engine.enginekit import PATIENCE
from tests.component.operator.served import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """Answers the requests of a connection with ``answers`` in turn, the last one again and again."""

    def __init__(self, *answers: bytes, close: bool = False) -> None:
        self.answers, self.close = answers, close
        self.seen: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()
        """Set while no connection is open, once there was one."""
        self.before: Callable[[], Awaitable[object]] | None = None
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.gone.clear()
        answers = list(self.answers)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, mark, length = head.lower().partition(b"content-length:")
                body = await reader.readexactly(int(length.split(b"\r\n")[0])) if mark else b""
                self.seen.append(head + body)
                self.asked.set()
                if self.before is not None:
                    await self.before()
                last = len(answers) == 1
                writer.write(answers[0] if last else answers.pop(0))
                await writer.drain()
                if self.close and last:
                    break
        writer.close()
        self.open -= 1
        if not self.open:
            self.gone.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Peer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        try:
            yield self
        finally:
            server.close()


def session() -> Session:
    return Session(Trust())


@pytest.mark.parametrize(
    ("raw", "code", "body"),
    [
        (OK, 200, b"ok"),
        (b"HTTP/1.1 204 No\r\n\r\n", 204, b""),
        (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", 500, b""),
        (b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.1 100 Go\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 302 X\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n", 302, b""),
    ],
)
async def test_what_an_answer_is(raw: bytes, code: int, body: bytes) -> None:
    async with Peer(raw).running() as peer, session() as http:
        for _ in range(3):
            assert await http.ask("GET", peer.url, {}) == (code, body)
        assert (peer.connections, len(peer.seen)) == (1, 3)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_may_end_with_its_connection(version: bytes) -> None:
    raw = b"HTTP/%b 200 X\r\nconnection: close\r\n\r\nall of it" % version
    async with Peer(raw, close=True).running() as peer, session() as http:
        for _ in range(2):
            assert await http.ask("GET", peer.url, {}) == (200, b"all of it")
        assert peer.connections == 2


async def test_an_answer_in_small_pieces() -> None:
    async with Peer(b"").running() as peer, session() as http:

        async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for number in range(len(OK)):
                writer.write(OK[number : number + 1])
                await writer.drain()
                await asyncio.sleep(0)
            writer.close()

        server = await asyncio.start_server(slowly, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await http.ask("GET", f"http://127.0.0.1:{port}/", {}) == (200, b"ok")
        server.close()
        assert peer.connections == 0


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", Malformed),
        (b"HTTP/1.1 200 X\r\ncontent-length: many\r\n\r\n", Malformed),
        (b"HTTP/1.1 101 X\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n", Malformed),
        (b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\nshort", Disconnected),
        (b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n9\r\nshort", Disconnected),
        (b"HTTP/1.1 200 X\r\ncontent-le", Disconnected),
        (b"", Disconnected),
    ],
)
async def test_what_no_answer_is(raw: bytes, error: type[Exception]) -> None:
    """And nothing of it is asked again: the connection was new."""
    async with Peer(raw, close=True).running() as peer, session() as http:
        with pytest.raises(error):
            await http.ask("GET", peer.url, {})
        assert len(peer.seen) == 1


async def test_an_answer_without_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ANSWER_BYTES", 10_000)
    endless = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
    for raw in (endless + endless.partition(b"\r\n\r\n")[2] * 20, b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 4000):
        async with Peer(raw).running() as peer, session() as http:
            with pytest.raises(Malformed, match="more than 10000 bytes"):
                await http.ask("GET", peer.url, {})
            await asyncio.wait_for(peer.gone.wait(), PATIENCE)


async def test_a_connection_serves_one_request_at_a_time_and_the_next_one_after_it() -> None:
    async with Peer(OK).running() as peer, session() as http:
        met = asyncio.Barrier(8)
        peer.before = met.wait
        await asyncio.gather(*(http.ask("POST", peer.url, {}, b"{}") for _ in range(8)))
        assert peer.connections == 8
        await asyncio.gather(*(http.ask("POST", peer.url, {}, b"{}") for _ in range(8)))
        assert peer.connections == 8


async def test_an_answer_that_came_too_late_is_nobodys() -> None:
    """The connection of a call that was given up is closed: the next call must not hear what was meant for it."""
    async with Peer(OK).running() as peer, session() as http:
        answered = asyncio.Event()
        peer.before = answered.wait
        late = asyncio.create_task(http.ask("GET", peer.url, {}))
        await asyncio.wait_for(peer.asked.wait(), PATIENCE)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        answered.set()
        assert await http.ask("GET", peer.url, {}) == (200, b"ok")
        assert peer.connections == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "peer.rl.svc"])
async def test_a_call_may_be_given_up_at_any_moment(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is left open by it: a warning would fail this test."""
    loop = asyncio.get_running_loop()

    async def resolved(_: str, port: int, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (1, 2)]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    async with Peer(OK).running() as peer:
        url = peer.url.replace("127.0.0.1", host)
        done = 0
        for moments in range(60):
            async with session() as http:
                asking = asyncio.create_task(http.ask("GET", url, {}))
                for _ in range(moments):
                    await asyncio.sleep(0)
                asking.cancel()
                done += await asyncio.gather(asking, return_exceptions=True) == [(200, b"ok")]
        async with session() as http:
            assert await http.ask("GET", url, {}) == (200, b"ok")
        # Some were given up before they were sent, and some after it.
        assert (done < 60, len(peer.seen) > 1) == (True, True)
    gc.collect()


async def test_what_comes_behind_an_answer_is_nobodys() -> None:
    other = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"
    for behind in (other, b"junk", other + other):
        async with Peer(OK + behind).running() as peer, session() as http:
            for number in range(1, 4):
                assert await http.ask("GET", peer.url, {}) == (200, b"ok")
                assert peer.connections == number


async def test_a_connection_that_is_not_to_be_kept_is_not() -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    async with Peer(raw).running() as peer, session() as http:
        for number in (1, 2):
            assert await http.ask("GET", peer.url, {}) == (200, b"ok")
            assert peer.connections == number
            await asyncio.wait_for(peer.gone.wait(), PATIENCE)


async def test_what_a_kept_connection_did_not_take_is_sent_once_more() -> None:
    async with Peer(OK, b"", close=True).running() as peer, session() as http:
        assert await http.ask("POST", peer.url, {}, b"1") == (200, b"ok")
        assert await http.ask("POST", peer.url, {}, b"2") == (200, b"ok")
        assert [each[-1:] for each in peer.seen] == [b"1", b"2", b"2"]


async def test_half_an_answer_on_a_kept_connection_is_not_asked_for_again() -> None:
    async with Peer(OK, OK[:-1], close=True).running() as peer, session() as http:
        assert await http.ask("POST", peer.url, {}, b"1") == (200, b"ok")
        with pytest.raises(Disconnected):
            await http.ask("POST", peer.url, {}, b"2")
        assert len(peer.seen) == 2


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEPALIVE_SECONDS", 0.05)
    async with Peer(OK).running() as peer, session() as http:
        await asyncio.gather(*(http.ask("GET", peer.url, {}) for _ in range(3)))
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        before = peer.connections
        assert await http.ask("GET", peer.url, {}) == (200, b"ok")
        assert peer.connections == before + 1


async def test_closing_leaves_nothing_open() -> None:
    async with Peer(OK).running() as peer:
        http = session()
        await asyncio.gather(*(http.ask("GET", peer.url, {}) for _ in range(3)))
        await http.close()
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        await session().close()


async def test_what_is_being_connected_while_it_is_closed_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect, begun, closed = loop.create_connection, asyncio.Event(), asyncio.Event()

    async def late(*given: Any, **more: Any) -> Any:
        begun.set()
        await closed.wait()
        return await connect(*given, **more)

    monkeypatch.setattr(loop, "create_connection", late)
    async with Peer(OK).running() as peer:
        http = session()
        asking = asyncio.create_task(http.ask("GET", peer.url, {}))
        await begun.wait()
        await http.close()
        closed.set()
        with pytest.raises(Disconnected):
            await asking
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        assert peer.seen == []


async def test_what_a_request_is() -> None:
    async with Peer(OK).running() as peer, session() as http:
        await http.ask("POST", f"{peer.url}/y?z=%20ä", {"authorization": "Bearer t", "a": "b"}, b'{"c": 1}')
        await http.ask("GET", peer.url, {})
    first, second = peer.seen
    host = peer.url.removeprefix("http://").removesuffix("/x").encode()
    assert first.split(b"\r\n") == [
        b"POST /x/y?z=%20%C3%A4 HTTP/1.1",
        b"host: " + host,
        b"accept: */*",
        b"authorization: Bearer t",
        b"a: b",
        b"content-length: 8",
        b"",
        b'{"c": 1}',
    ]
    assert second.split(b"\r\n") == [b"GET /x HTTP/1.1", b"host: " + host, b"accept: */*", b"", b""]


async def test_a_name_is_resolved() -> None:
    async with Peer(OK).running() as peer, session() as http:
        assert await http.ask("GET", peer.url.replace("127.0.0.1", "localhost"), {}) == (200, b"ok")


async def test_an_address_of_ipv6_has_its_brackets_in_the_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is led to an address that every machine has."""
    loop = asyncio.get_running_loop()
    connect, hosts = loop.create_connection, []

    async def led(factory: Any, host: str, port: int, **more: Any) -> Any:
        hosts.append(host)
        return await connect(factory, "127.0.0.1", port, **more)

    monkeypatch.setattr(loop, "create_connection", led)
    async with Peer(OK).running() as peer, session() as http:
        assert await http.ask("GET", peer.url.replace("127.0.0.1", "[::1]"), {}) == (200, b"ok")
        assert hosts == ["::1"]
        assert b"host: [::1]:" in peer.seen[0]


@pytest.mark.parametrize("value", ["t\r\nx-more: 1", "t\n", "\rt", "t\0"])
async def test_a_token_cannot_be_a_second_header(value: str) -> None:
    async with Peer(OK).running() as peer, session() as http:
        with pytest.raises(ValueError, match="a line break or a NUL"):
            await http.ask("GET", peer.url, {"authorization": f"Bearer {value}"})
        assert peer.connections == 0


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "127.0.0.1:80/x", "http:///x", "http://127.0.0.1:99999/x", ""])
async def test_what_is_no_url_is_said(url: str) -> None:
    async with session() as http:
        with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
            await http.ask("GET", url, {})


# Requests that are sent before they are asked for --------------------------------------------------------------------


def told(peer: Peer, body: bytes) -> Request:
    return Request("POST", peer.url, {"authorization": "Bearer t"}, body)


async def ask(http: Session, request: Request) -> wire.Answer:
    return await http.ask(*request)


def bodies(peer: Peer) -> list[bytes]:
    """Of the requests that were complete."""
    return [each.partition(b"\r\n\r\n")[2] for each in peer.seen]


class Tap:
    """The bytes that a session writes, a call of the transport each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[bytes] = []
        made = wire._Connection.connection_made

        def tapped(connection: wire._Connection, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            write = transport.write

            def noted(data: bytes) -> None:
                self.written.append(bytes(data))
                write(data)

            monkeypatch.setattr(transport, "write", noted, raising=False)
            made(connection, transport)

        monkeypatch.setattr(wire._Connection, "connection_made", tapped)


async def settle() -> None:
    """Time for what should not come."""
    await asyncio.sleep(0.05)


@pytest.fixture(name="tap")
def _tap(monkeypatch: pytest.MonkeyPatch) -> Tap:
    return Tap(monkeypatch)


async def test_what_was_sent_ahead_is_complete_when_it_is_asked_for_and_no_sooner(tap: Tap) -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        tap.written.clear()
        http.prepare(told(peer, b"[1]"), told(peer, b"[2]"))
        await settle()
        assert bodies(peer) == [b"0"]
        assert await ask(http, told(peer, b"[1]")) == (200, b"ok")
        await settle()
        assert bodies(peer) == [b"0", b"[1]"]
        assert await ask(http, told(peer, b"[2]")) == (200, b"ok")
        assert (bodies(peer), peer.connections) == ([b"0", b"[1]", b"[2]"], 1)
        # The second one's beginning went with the first one's end, and its own end was one byte.
        first, second, third = tap.written
        assert (first[-2:], second[:1], second[-2:], third) == (b"[1", b"]", b"[2", b"]")
        assert await ask(http, told(peer, b"[3]")) == (200, b"ok")
        assert peer.connections == 1


async def test_anything_else_is_asked_on_another_connection_and_what_was_prepared_is_given_up() -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"), told(peer, b"2"))
        for other in (b"2", b"x", b"1"):
            assert await ask(http, told(peer, other)) == (200, b"ok")
            assert http._prepared == {}
        assert bodies(peer) == [b"0", b"2", b"x", b"1"]
        assert peer.connections == 2


async def test_a_header_may_not_differ_either() -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"))
        assert await ask(http, told(peer, b"1")._replace(headers={"authorization": "Bearer u"})) == (200, b"ok")
        assert peer.connections == 2
        assert b"Bearer u" in peer.seen[-1]


async def test_what_is_prepared_anew_replaces_what_was() -> None:
    async with Peer(OK).running() as peer, session() as http:
        met = asyncio.Barrier(2)
        peer.before = met.wait
        await asyncio.gather(*(ask(http, told(peer, b"0")) for _ in range(2)))
        peer.before = None
        http.prepare(told(peer, b"1"))
        http.prepare(told(peer, b"2"))
        assert await ask(http, told(peer, b"2")) == (200, b"ok")
        assert (bodies(peer), peer.connections) == ([b"0", b"0", b"2"], 2)


async def test_nothing_is_prepared_where_no_connection_is_idle() -> None:
    async with Peer(OK).running() as peer, session() as http:
        http.prepare(told(peer, b"1"))
        http.begin(told(peer, b"1"))
        await settle()
        assert peer.connections == 0
        assert await ask(http, told(peer, b"1")) == (200, b"ok")
        assert bodies(peer) == [b"1"]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_peer_that_closes_meanwhile_is_asked_on_a_new_connection(begun: bool) -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"))
        for connection in http._living:
            connection.abort()
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        if begun:
            http.begin(told(peer, b"1"))
        assert await ask(http, told(peer, b"1")) == (200, b"ok")
        assert (bodies(peer), peer.connections) == ([b"0", b"1"], 2)


async def test_whoever_answers_before_the_end_of_a_request_is_asked_anew() -> None:
    """A peer that refuses a token need not wait for the body: what it says is not the answer to what is asked later."""
    early = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 401 X\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            early.set()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with session() as http:
        assert await http.ask("POST", url, {}, b"0") == (200, b"ok")
        http.prepare(Request("POST", url, {}, b"1"))
        await asyncio.wait_for(early.wait(), PATIENCE)
        await until(lambda: not http._living)
        assert await http.ask("POST", url, {}, b"1") == (200, b"ok")
    server.close()


async def test_what_is_next_is_not_prepared_where_the_connection_ends_with_the_answer() -> None:
    last = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    async with Peer(OK, last).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"), told(peer, b"2"))
        for body in (b"1", b"2"):
            assert await ask(http, told(peer, body)) == (200, b"ok")
        assert (bodies(peer), peer.connections) == ([b"0", b"1", b"2"], 2)


async def test_what_was_begun_is_not_sent_again_when_its_answer_is_asked_for() -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"))
        http.begin(told(peer, b"2"))
        await settle()
        assert bodies(peer) == [b"0"]
        http.begin(told(peer, b"1"))
        await until(lambda: bodies(peer) == [b"0", b"1"])
        assert await ask(http, told(peer, b"1")) == (200, b"ok")
        # The next one like it is another one.
        assert await ask(http, told(peer, b"1")) == (200, b"ok")
        assert (bodies(peer), peer.connections) == ([b"0", b"1", b"1"], 1)


@pytest.mark.parametrize("begun", [False, True])
async def test_what_nobody_asks_for_is_given_up(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(wire, "PREPARED_SECONDS", 0.1)
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        if begun:
            hung = asyncio.Event()
            peer.before = hung.wait
        http.prepare(told(peer, b"1"))
        if begun:
            http.begin(told(peer, b"1"))
            await until(lambda: len(peer.seen) == 2)
            hung.set()
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        assert bodies(peer) == [b"0", b"1"][: 1 + begun]
        assert (http._prepared, http._begun) == ({}, {})


async def test_what_is_asked_together_is_sent_together(tap: Tap) -> None:
    async with Peer(OK).running() as peer, Peer(OK).running() as other, session() as http:
        for each in (peer, other):
            await ask(http, told(each, b"0"))
        http.prepare(told(peer, b"[1]"))
        tap.written.clear()
        with http.together():
            asking = [asyncio.create_task(ask(http, told(each, b"[1]"))) for each in (peer, other)]
            await settle()
            assert (bodies(peer), bodies(other), tap.written) == ([b"0"], [b"0"], [])
        assert await asyncio.gather(*asking) == [(200, b"ok")] * 2
        assert (bodies(peer), bodies(other)) == ([b"0", b"[1]"], [b"0", b"[1]"])
        assert tap.written[0] == b"]"
        # And what is asked later waits for nobody.
        assert await ask(http, told(peer, b"2")) == (200, b"ok")


async def test_who_gives_up_while_all_are_held_has_sent_nothing() -> None:
    async with Peer(OK).running() as peer, session() as http:
        await ask(http, told(peer, b"0"))
        http.prepare(told(peer, b"1"))
        with http.together():
            asking = asyncio.create_task(ask(http, told(peer, b"1")))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(peer.gone.wait(), PATIENCE)
        assert bodies(peer) == [b"0"]


async def test_closing_ends_what_was_prepared_and_begun() -> None:
    async with Peer(OK).running() as peer, Peer(OK).running() as other:
        http = session()
        for each in (peer, other):
            await ask(http, told(each, b"0"))
            http.prepare(told(each, b"1"))
        hung = asyncio.Event()
        other.before = hung.wait
        http.begin(told(other, b"1"))
        await http.close()
        hung.set()
        for each in (peer, other):
            await asyncio.wait_for(each.gone.wait(), PATIENCE)
        assert bodies(peer) == [b"0"]


async def test_what_cannot_be_prepared_is_said() -> None:
    async with Peer(OK).running() as peer, Peer(OK).running() as other, session() as http:
        for requests in ((told(peer, b""),), (told(peer, b"1"), told(other, b"2"))):
            with pytest.raises(ValueError, match="cannot be prepared"):
                http.prepare(*requests)
