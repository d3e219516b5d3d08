"""The client of engines and wipers against a real HTTP server that answers badly in every way we know of.

The server is a fault injector (``FaultyPeer``), not an engine: the answers of real engines are tested in
tests/component/engine and tests/e2e.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moontide.engines.client import (
    Unanswered,
    begin,
    collect,
    engine_status,
    fan_out,
    fetch,
    impatient,
    new_http_client,
    prepare,
    refuse_own_fault,
    send,
    wipe,
)
from moontide.errors import Retry
from moontide.planning.model import Collect, Command, EngineStatus, Fleet, Replica, Result, Step, Wipe

STATUS = {
    "bootId": "b1",
    "state": "open",
    "epoch": 1,
    "version": "1",
    "weightsVersion": "1",
    "clean": False,
    "drained": False,
    "running": 0,
}
FLEET = Fleet("tiny", "fleet-uid", "pool", "pool-uid")


class FaultyPeer:
    """Answers each request with what ``answer(path, body)`` returns: (status, raw body), or None to hang."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], tuple[int, bytes] | None]) -> None:
        self.answer = answer
        self.seen: list[tuple[str, dict[str, Any], str]] = []
        self.address = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ", 2)[1]
            headers = {
                name.lower(): value
                for line in head.split("\r\n")[1:]
                if ": " in line
                for name, value in [line.split(": ", 1)]
            }
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
            body = json.loads(raw) if raw else {}
            self.seen.append((path, body, headers.get("authorization", "")))
            answer = self.answer(path, body)
            if answer is None:
                await asyncio.sleep(30)
                return
            status, content = answer
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(content)))
            writer.write(content)
            await writer.drain()
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyPeer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()


def command(address: str, step: Step = Step.RESET, timeout: float = 5.0) -> Command:
    status = EngineStatus.model_validate(STATUS)
    replica = Replica("r", "pod-uid", "fleet-uid", address, "c1", True, status=status)
    return Command(step, replica, 3, {}, timeout)


async def sent(content: bytes, code: int = 200) -> Result:
    async with FaultyPeer(lambda path, body: (code, content)).running() as peer, new_http_client() as http:
        return await send(http, command(peer.address), "secret", 7)


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (b"", 200, "EmptyBody"),
        (b"<html>", 200, "NotJson"),
        (b"[true]", 200, "NotJson"),
        (b"{}", 200, "Http200"),
        (b'{"success": "true"}', 200, "Http200"),
        (b'{"success": 1}', 200, "Http200"),
        (b'{"success": false, "reason": "BlocksHeld"}', 200, "BlocksHeld"),
        (b'{"success": true}', 500, "Http500"),
        (b'{"success": false, "reason": "Fenced"}', 409, "Fenced"),
    ],
)
async def test_only_a_body_that_says_so_is_success(content: bytes, code: int, reason: str) -> None:
    result = await sent(content, code)
    assert not result.success
    assert result.reason == reason


async def test_success_and_what_a_command_carries() -> None:
    async with FaultyPeer(lambda path, body: (200, b'{"success": true}')).running() as peer, new_http_client() as http:
        result = await send(http, command(peer.address), "secret", 7)
    assert result.success
    path, body, auth = peer.seen[0]
    assert path == "/moontide/v1/reset"
    assert body == {"term": 7, "epoch": 3, "bootId": "b1", "timeoutSeconds": 5.0}
    assert auth == "Bearer secret"


async def test_the_next_token_is_tried_where_one_is_refused_and_not_where_the_command_is() -> None:
    known = "Bearer new"
    async with FaultyPeer(lambda path, body: None).running() as peer, new_http_client() as http:
        peer.answer = lambda path, body: (200 if peer.seen[-1][2] == known else 401, b'{"success": true}')
        assert (await send(http, command(peer.address), ("old", "new"), 7)).success
        assert [auth for *_, auth in peer.seen] == ["Bearer old", known]
        assert (await send(http, command(peer.address), ("old", "older"), 7)).reason == "Http401"
        peer.answer = lambda path, body: (403, b'{"success": false, "reason": "StaleTerm"}')
        before = len(peer.seen)
        assert (await send(http, command(peer.address), ("old", "new"), 7)).reason == "StaleTerm"
        assert len(peer.seen) == before + 1


async def test_a_peer_that_hangs_costs_its_bound_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.engines.client.MARGIN_SECONDS", 0.1)
    async with FaultyPeer(lambda path, body: None).running() as peer, new_http_client() as http:
        result = await asyncio.wait_for(send(http, command(peer.address, timeout=0.1), "t", 7), 60)
    assert (result.success, result.reason) == (False, "Timeout")


async def test_a_connection_that_the_peer_has_closed_meanwhile_is_no_failure() -> None:
    """It keeps the connection after its answer, and closes it at the next request, as uvicorn may."""
    seen, ended = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        with contextlib.suppress(asyncio.IncompleteReadError):
            for first in (True, False):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
                seen += 1
                if first:
                    writer.write(b'HTTP/1.1 200 X\r\ncontent-length: 17\r\n\r\n{"success": true}')
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    async with new_http_client() as http:
        for _ in range(3):
            assert (await send(http, command(f"{host}:{port}"), "secret", 7)).success
            ended.clear()
    await ended.wait()
    # Each that found its connection closed was sent twice.
    assert seen == 5
    server.close()


async def test_what_an_engine_says_with_its_answer_is_its_status() -> None:
    told = {"success": True, "status": {**STATUS, "state": "paused"}}
    assert (found := (await sent(json.dumps(told).encode())).status) is not None
    assert (found.state, found.boot_id) == ("paused", "b1")
    for odd in ({"success": True}, {"success": True, "status": {"state": "paused"}}, {**told, "success": False}):
        assert (await sent(json.dumps(odd).encode())).status is None


@pytest.mark.parametrize("wrong", ["address", "token"])
async def test_what_cannot_be_sent_ahead_is_said_when_it_is_sent(wrong: str) -> None:
    address = "https://[:8001" if wrong == "address" else "127.0.0.1:1"
    token = "line\nbreak" if wrong == "token" else "secret"
    async with new_http_client() as http:
        prepare(http, (command(address), command(address)), token, 7)
        begin(http, command(address), token, 7)
        result = await send(http, command(address), token, 7)
    assert not result.success
    assert "ValueError" in result.message


async def test_nobody_listening_is_a_reason() -> None:
    async with new_http_client() as http:
        answer = await engine_status(http, "127.0.0.1:9", "t")
    assert isinstance(answer, Unanswered)
    assert answer.reason == "Unreachable"


@pytest.mark.parametrize("missing", ["bootId", "state", "clean", "drained", "epoch", "running"])
async def test_a_status_without_a_deciding_field_is_no_status(missing: str) -> None:
    body = json.dumps({key: value for key, value in STATUS.items() if key != missing}).encode()
    async with FaultyPeer(lambda path, _: (200, body)).running() as peer, new_http_client() as http:
        answer = await engine_status(http, peer.address, "t")
    assert isinstance(answer, Unanswered)
    assert answer.reason == "NotAStatus"


async def test_a_gate_that_answers_for_a_frozen_engine_is_known_as_that() -> None:
    body = json.dumps({**STATUS, "running": None, "responsive": False, "fault": "no answer within 2 s"}).encode()
    async with FaultyPeer(lambda path, _: (200, body)).running() as peer, new_http_client() as http:
        answer = await engine_status(http, peer.address, "t")
    assert isinstance(answer, EngineStatus)
    assert (answer.responsive, answer.running, answer.fault) == (False, None, "no answer within 2 s")


async def test_a_whole_status_is_read() -> None:
    async with FaultyPeer(lambda path, _: (200, json.dumps(STATUS).encode())).running() as peer:
        async with new_http_client() as http:
            answer = await engine_status(http, peer.address, "t")
    assert isinstance(answer, EngineStatus)
    assert (answer.boot_id, answer.state) == ("b1", "open")


async def wiped(*removals: dict[str, Any]) -> tuple[Result, FaultyPeer]:
    answers = iter(removals)
    async with FaultyPeer(lambda path, body: (200, json.dumps(next(answers)).encode())).running() as peer:
        async with new_http_client() as http:
            return await wipe(http, Wipe(FLEET, 2.0), f"http://{peer.address}", "t", 3), peer


async def test_a_wipe_is_verified_by_a_second_removal_that_finds_nothing() -> None:
    result, peer = await wiped({"success": True, "removed": 7}, {"success": True, "removed": 0})
    assert (result.success, result.reason, result.removed) == (True, "Verified", 7)
    assert [body["namespace"] for _, body, _ in peer.seen] == ["fleet-uid", "fleet-uid"]


@pytest.mark.parametrize(
    ("removals", "reason"),
    [
        (({"success": True, "removed": 7}, {"success": True, "removed": 1}), "KeysLeft"),
        (({"success": True, "removed": 7}, {"success": True}), "KeysLeft"),
        (({"success": True, "removed": 7}, {"success": True, "removed": None}), "KeysLeft"),
        (({"success": False, "code": -900, "reason": "StoreError"},), "StoreError"),
        (({"success": True, "removed": 7}, {"success": False, "reason": "StoreTimeout"}), "StoreTimeout"),
    ],
)
async def test_anything_less_is_no_verified_wipe(removals: tuple[dict[str, Any], ...], reason: str) -> None:
    result, _ = await wiped(*removals)
    assert (result.success, result.reason) == (False, reason)


async def collected(*removals: dict[str, Any]) -> tuple[Result, FaultyPeer]:
    answers = iter(removals)
    async with FaultyPeer(lambda path, body: (200, json.dumps(next(answers)).encode())).running() as peer:
        async with new_http_client() as http:
            return await collect(http, Collect(FLEET, ("policy/2",), 2.0), f"http://{peer.address}", "t", 3), peer


async def test_a_collection_is_verified_by_a_second_one_that_finds_nothing() -> None:
    result, peer = await collected({"success": True, "removed": 7, "left": 0}, {"success": True, "removed": 0})
    assert (result.success, result.reason, result.removed) == (True, "Verified", 7)
    told = [(path, body["keep"], body["term"]) for path, body, _ in peer.seen]
    assert told == [("/moontide/v1/collect", ["policy/2"], 3)] * 2


async def test_a_collection_that_finds_nothing_is_its_own_proof() -> None:
    """It may be the second of one whose first had no time left: another would have none either."""
    result, peer = await collected({"success": True, "removed": 0, "left": 0})
    assert (result.success, result.reason, result.removed, len(peer.seen)) == (True, "Verified", 0, 1)
    # A wipe is not: what an engine still puts is what the second is for.
    result, peer = await wiped({"success": True, "removed": 0}, {"success": True, "removed": 0})
    assert (result.success, len(peer.seen)) == (True, 2)


async def test_keys_in_use_are_counted_and_left_for_another_time() -> None:
    left = {"success": False, "removed": 5, "left": 2, "reason": "KeysLeft", "message": "2 keys were not removed"}
    result, _ = await collected(left)
    assert (result.success, result.reason, result.removed) == (False, "KeysLeft", 5)
    result, _ = await collected({"success": True, "removed": 7}, {"success": True, "removed": 1})
    assert (result.success, result.reason, result.removed) == (False, "KeysLeft", 7)


async def test_the_fan_out_is_bounded_and_keeps_the_order() -> None:
    busy = most = 0

    async def call(item: int) -> int:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.001)
        busy -= 1
        return item * 2

    assert await fan_out(list(range(50)), call, limit=5) == [2 * n for n in range(50)]
    assert most == 5


async def test_who_is_done_does_not_wait_for_long() -> None:
    ended: list[str] = []

    async def call(name: str) -> str:
        await asyncio.sleep({"quick": 0.0, "soon": 0.05, "never": 600.0, "needed": 0.3}[name])
        ended.append(name)
        return name

    began = time.monotonic()
    found = await impatient(
        ["never", "quick", "soon", "needed"], call, lambda name: None if name == "needed" else f"{name}, late", 0.2
    )
    assert found == ["never, late", "quick", "soon", "needed"]
    assert time.monotonic() - began < 60
    assert ended == ["quick", "soon", "needed"]
    assert await impatient([], call, lambda name: name, 0.2) == []


class Leaping(selectors.DefaultSelector):
    """Does not wait: its clock is then at the time that was waited for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is not None:
            self.now += max(timeout, 0.0)
        return found


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """What it comes to where nothing but time is waited for, and no machine is too slow."""
    clock = Leaping()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with contextlib.closing(loop):
        return loop.run_until_complete(work)


def test_patience_begins_anew_with_each_answer() -> None:
    async def call(item: int) -> int:
        await asyncio.sleep(item * 0.1)
        return item

    # Each is later than the patience after the first, and none later than that after another.
    assert at_once(impatient([1, 2, 3, 4, 5, 6], call, lambda item: -item, 0.25)) == [1, 2, 3, 4, 5, 6]
    assert at_once(impatient([1, 2, 5], call, lambda item: -item, 0.25)) == [1, 2, -5]


async def test_the_impatient_raise_the_failure_itself_after_all_have_ended() -> None:
    async def call(item: int) -> int:
        if item == 1:
            raise Retry(2.0, "the API server is busy")
        await asyncio.sleep(30)
        return item

    with pytest.raises(Retry, match="busy"):
        await impatient([1, 2], call, lambda item: item, 0.05)
    # Cancelling it cancels what is under way.
    task = asyncio.ensure_future(impatient([2, 3], call, lambda item: item, 0.05))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_fan_out_raises_the_failure_itself_after_all_have_ended() -> None:
    ended: list[int] = []

    async def call(item: int) -> int:
        await asyncio.sleep(0.001 * item)
        ended.append(item)
        if item == 1:
            raise Retry(2.0, "the API server is busy")
        return item

    with pytest.raises(Retry, match="busy"):
        await fan_out([1, 2, 3], call)
    assert ended == [1, 2, 3]
    # No cancellation is left behind for what is awaited next.
    await asyncio.sleep(0)


async def test_an_operator_that_may_open_no_more_files_blames_no_engine() -> None:
    peer = FaultyPeer(lambda path, body: (200, json.dumps(STATUS).encode()))
    async with peer.running(), new_http_client() as http:
        answers = [await engine_status(http, peer.address, "t")]
        refuse_own_fault(answers)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = os.open("/dev/null", os.O_RDONLY)
        os.close(taken)
        # The lowest number that is free is over the limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
        try:
            answers.append(await engine_status(http, peer.address, "t"))
            with pytest.raises(Retry, match="a higher limit of open files"):
                await fetch(http, f"http://{peer.address}/health", 60.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(answers[1], Unanswered)
    assert answers[1].reason == "TooManyFiles"
    with pytest.raises(Retry, match="a higher limit of open files"):
        refuse_own_fault(answers)
