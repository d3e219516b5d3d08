"""The gate as an ASGI layer around the whole of vLLM's app: holding, stamping, counting and cancelling of requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from moontide_engine.asgi import App, Message, Receive, Scope, Send, refuse_websocket, send_body, send_json
from moontide_engine.exposition import CONTENT_TYPE, exposition
from moontide_engine.gate import Entry, Gate, Stamp, State
from moontide_engine.jsonlog import log
from moontide_engine.routes import Kind, classify

VERSION_HEADER = b"x-moontide-version"
EPOCH_HEADER = b"x-moontide-epoch"
# A request that passed in one epoch and ends in another: the one it ends in. A header where that is known before the
# first byte of the answer; in a stream of server-sent events a comment, last of all.
LAST_EPOCH_HEADER = b"x-moontide-last-epoch"

# Body bytes kept for one held request while its connection is watched for a disconnect. Beyond it the server's own flow
# control stops reading, and the disconnect is noticed when the request runs.
HELD_BODY_LIMIT = 4 * 1024 * 1024


class GateMiddleware:
    """Outermost layer of the inference port.

    ``held`` counts requests that wait for a resume; at most ``max_held`` do, the rest get 503. The in-flight count is
    the gate's: a request is in flight from the moment it passes until the app below has returned, body and background
    work included.
    """

    def __init__(self, app: App, gate: Gate, max_held: int, root_path: str = "") -> None:
        self._app = app
        self._gate = gate
        self._max_held = max_held
        self._root_path = root_path
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._held = 0
        self.refused = 0
        """Inference requests that were answered 503 here."""
        self._running: set[_Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        gate.listeners.append(self._on_change)

    @property
    def held(self) -> int:
        """Requests that wait for the gate to open."""
        return self._held

    def leave(self) -> None:
        """The process is about to end and serves for a moment yet: each answer asks its client to come back on another
        connection, which another replica will get."""
        self._leaving = True

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is in flight, at most ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A socket outlives epochs: none of its turns could be stamped, and a barrier would wait for it for ever.
            await refuse_websocket(receive, send)
            return
        send = self._parting(send)
        kind = classify(scope["path"], self._root_path)
        if kind is Kind.INFERENCE:
            await self.infer(scope, receive, send)
        elif kind is Kind.PUBLIC:
            await self._app(scope, receive, send)
        elif kind is Kind.READY:
            ready = self._gate.state is not State.CLOSED
            await send_json(send, 200 if ready else 503, {"ready": ready})
        elif kind is Kind.METRICS:
            await send_body(send, 200, exposition(self._gate, self), CONTENT_TYPE)
        else:
            await send_json(send, 404, {"detail": "Not Found"})

    def _parting(self, send: Send) -> Send:
        async def parting(message: Message) -> None:
            if message["type"] == "http.response.start" and (self._leaving or self._gate.terminating):
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        return parting

    async def infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one inference request through the gate."""
        entry = self._gate.enter()
        if entry is Entry.HOLD:
            if self._held >= self._max_held:
                self.refused += 1
                await _unavailable(send, f"the engine is paused and {self._held} requests wait already")
                return
            held = _HeldReceive(receive)
            receive = held
            self._held += 1
            try:
                while entry is Entry.HOLD:
                    if not await self._hold(held):
                        return
                    entry = self._gate.enter()
            finally:
                self._held -= 1
        if entry is Entry.REFUSE:
            self.refused += 1
            await _unavailable(send, self._why())
            return
        stamp = self._gate.stamp
        self._idle.clear()
        try:
            if stamp is None:
                raise RuntimeError("the gate let a request pass without an admission")
            await self._run(scope, receive, send, stamp)
        finally:
            self._gate.leave()
            if self._gate.in_flight == 0:
                self._idle.set()

    async def _hold(self, receive: _HeldReceive) -> bool:
        """Wait until the gate changes (True) or the client leaves (False)."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = asyncio.ensure_future(receive.watch())
        self._waiters.append(waiter)
        try:
            while not waiter.done():
                waits: set[asyncio.Future[Any]] = {waiter} if watch.done() else {waiter, watch}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if watch.done() and watch.result():
                    return False
            return True
        finally:
            self._waiters.remove(waiter)
            watch.cancel()
            # Its receive() must have let go of the connection before the app below calls receive() itself.
            await asyncio.wait((watch,))

    async def _run(self, scope: Scope, receive: Receive, send: Send, stamp: Stamp) -> None:
        running = _Running(receive, send, self._gate, stamp)
        self._running.add(running)
        try:
            await self._app(scope, running.receive, running.send)
        except BaseException:
            # What the app raises because its client seems to have left is no fault.
            if not running.ended.is_set():
                raise
        finally:
            self._running.discard(running)
        if running.ended.is_set() and not running.complete and not running.started:
            await _unavailable(send, self._why())
        # A body that had begun stays cut short, and the server drops the connection.

    def _on_change(self, gate: Gate) -> None:
        log(
            "gate",
            boot=gate.boot_id,
            state=gate.state,
            reason=gate.reason,
            term=gate.fence.term,
            epoch=None if gate.stamp is None else gate.stamp.epoch,
            inFlight=gate.in_flight,
            held=self._held,
            lastPauseSeconds=gate.last_pause_seconds,
        )
        if gate.state is not State.PAUSED:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if gate.state is State.CLOSED and not gate.terminating:
            for running in self._running:
                running.ended.set()

    def _why(self) -> str:
        if self._gate.state is State.PAUSED:
            return "the engine is paused for a change of policy"
        return f"the engine is closed: {self._gate.reason}"


class _Running:
    """Channels of a request that passed the gate.

    Ending it looks to the app below like a client that has left. That is the one way to stop a request that every
    handler of vLLM knows: a cancelled task leaves its inner tasks running.
    """

    def __init__(self, receive: Receive, send: Send, gate: Gate, stamp: Stamp) -> None:
        self.ended = asyncio.Event()
        self.started = False
        self.complete = False
        self._receive = receive
        self._send = send
        self._gate = gate
        self._stamp = stamp
        self._told = False
        self._events = False

    def _last_epoch(self) -> bytes:
        """The epoch it is in by now, empty if that is the one it began in or its client knows already."""
        now = self._gate.stamp
        return b"" if self._told or now is None or now.epoch == self._stamp.epoch else str(now.epoch).encode()

    async def receive(self) -> Message:
        """The client's messages, and a disconnect once the request was ended."""
        if self.ended.is_set():
            return {"type": "http.disconnect"}
        message = asyncio.ensure_future(self._receive())
        end = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((message, end), return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() and not end.done() else {"type": "http.disconnect"}
        finally:
            end.cancel()
            message.cancel()

    async def send(self, message: Message) -> None:
        """The app's messages with the stamp; after the end nothing reaches the client any more."""
        if self.ended.is_set():
            raise OSError("the gate was closed")
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), *_stamp_headers(self._stamp)]
            fields = {name.lower(): value for name, value in headers}
            self._events = b"text/event-stream" in fields.get(b"content-type", b"") and b"content-length" not in fields
            if not self._events and (last := self._last_epoch()):
                headers.append((LAST_EPOCH_HEADER, last))
                self._told = True
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            if self._events and (last := self._last_epoch()):
                self._told = True
                comment = b": " + LAST_EPOCH_HEADER + b": " + last + b"\n\n"
                message = {**message, "body": message.get("body", b"") + comment}
        await self._send(message)


class _HeldReceive:
    """``receive`` of a held request: reads ahead, so that a client who leaves is noticed, and replays what it read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()

    async def watch(self) -> bool:
        """True once the client has left, False once the body is too long to keep on reading."""
        size = 0
        while size < HELD_BODY_LIMIT:
            message = await self._receive()
            self._kept.append(message)
            if message["type"] == "http.disconnect":
                return True
            size += len(message.get("body", b""))
        return False

    async def __call__(self) -> Message:
        if self._kept:
            return self._kept.popleft()
        return await self._receive()


def _stamp_headers(stamp: Stamp) -> Iterator[tuple[bytes, bytes]]:
    yield EPOCH_HEADER, str(stamp.epoch).encode()
    if stamp.version is not None:
        yield VERSION_HEADER, stamp.version.encode()


async def _unavailable(send: Send, message: str) -> None:
    body = {"error": {"message": message, "type": "service_unavailable", "param": None, "code": 503}}
    await send_json(send, 503, body, [(b"retry-after", b"1")])
