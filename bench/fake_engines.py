"""Fake engines for scale: the admin plane of many replicas in one process, with delays that a seed decides.

``python -m bench.fake_engines FIRST COUNT``: one HTTP server an address, from the IPv4 address FIRST on, at the port of
the admin plane; over TLS with ``--tls FOLDER``, which holds ``tls.crt`` and ``tls.key``. ``--after N``: others of the
same fleet come before them, and these draw other delays. Nothing is served or cached
here, every token is good, and a command takes as long as its replica's delay says; then its effect is there. For
benches of the operator only.

What to do comes as one JSON object a line on stdin, each answered with a line on stdout:

``{"do": "mix", "slow": [3], "hung": []}``: who is slow, and who answers nothing from now on, by their numbers.
``{"do": "clear"}``: forget what was measured.
``{"do": "report"}``: seconds of the pause, of each replica's own calls, and what else was measured since then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import random
import socket
import ssl
import sys
import time
from typing import Any, cast

import uvloop
from pydantic_core import from_json, to_json

PORT = 8001
MEDIAN_SECONDS = 0.003
"""Of one call: the network of one rack and an engine that ends its step."""
SPREAD = 0.4
"""Sigma of its logarithm."""
SLOW_TIMES = 50
"""A slow replica's delays are this much longer."""
STEPS = ("quiesce", "admit", "resume", "fence", "drain", "reset", "close")


class FakeEngine:
    """The gate of one replica, as far as the operator sees it."""

    def __init__(self, number: int, with_status: bool, after: int = 0) -> None:
        self.number = number
        self.random = random.Random(after + number)
        self.slow = self.hung = False
        self.state, self.epoch, self.version, self.salt = "closed", 0, None, ""
        self.term = self.command_epoch = 0
        self.with_status = with_status
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self.paused_at = self.opened_at = None
        self.paused = 0.0
        """Seconds for which it held requests."""
        self.own: dict[str, float] = {}
        """By step: seconds that its own calls took, without anybody's waiting between them."""
        self.calls: dict[str, int] = {}

    def delay(self) -> float:
        """Seconds of the next call."""
        drawn = MEDIAN_SECONDS * math.exp(self.random.gauss(0.0, SPREAD))
        return drawn * (SLOW_TIMES if self.slow else 1)

    def status(self) -> dict[str, Any]:
        """As ``GET /moontide/v1/status`` has it."""
        return {
            "bootId": f"fake-{self.number}",
            "podUid": "",
            "state": self.state,
            "reason": "",
            "term": self.term,
            "commandEpoch": self.command_epoch,
            "epoch": self.epoch,
            "version": self.version,
            "admitted": self.epoch > 0,
            "admitResumes": True,
            "weightsVersion": "1",
            "loading": None,
            "clean": self.state == "closed",
            "drained": self.state != "open",
            "inFlight": 0,
            "running": 0,
            "waiting": 0,
            "held": 0,
            "responsive": True,
            "fault": "",
            "engineVersion": "fake",
            "patches": {},
            "ranks": 1,
            "store": {"configured": False, "attached": False, "reason": "NotConfigured"},
            "keyNamespace": "",
            "salt": self.salt,
            "fence": {"supported": True, "live": True, "reason": ""},
        }

    def obey(self, step: str, body: dict[str, Any], began: float) -> dict[str, Any]:
        """Carry a command out, whose call began at ``began``."""
        now = time.monotonic()
        self.term, self.command_epoch = body["term"], body["epoch"]
        self.calls[step] = self.calls.get(step, 0) + 1
        if step in ("quiesce", "close"):
            if self.state == "open":
                self.paused_at = began
            self.state = "paused" if step == "quiesce" else "closed"
        elif step in ("admit", "fence"):
            self.epoch, self.version, self.salt = body["epoch"], body.get("version"), body.get("salt") or ""
            if step == "admit" and self.state == "closed":
                self.state = "paused"
        if step == "fence":
            self.paused_at, self.opened_at = began if self.paused_at is None else self.paused_at, now
            self.paused += now - began
        if step == "resume" or body.get("resume"):
            self.opened_at, self.state = now, "open"
            if self.paused_at is not None:
                self.paused += now - self.paused_at
        answer = {"success": True, "reason": "Done", "message": "", "bootId": f"fake-{self.number}"}
        return {**answer, "state": self.state, **({"status": self.status()} if self.with_status else {})}


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as little of it as the operator's clients need: one request after the other."""

    opened = 0

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._data = b""
        self._complete = 0
        """Bytes of a request whose head has come; 0: not known."""
        self._later = asyncio.get_running_loop().call_later
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        Connection.opened += 1

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) < self._complete:
            return
        head, mark, rest = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        at = max(head.find(b"content-length:"), head.find(b"Content-Length:"))
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._complete = len(head) + 4 + length
        if len(rest) < length:
            return
        self._data, self._complete = rest[length:], 0
        if self._engine.hung:
            return
        step = head[: head.index(b"\r\n")].split(b" ", 2)[1].rsplit(b"/", 1)[-1].decode()
        body = from_json(rest[:length]) if length else {}
        began, seconds = time.monotonic(), self._engine.delay()
        self._later(seconds, self._answer, step, body, began, seconds)

    def _answer(self, step: str, body: dict[str, Any], began: float, seconds: float) -> None:
        engine = self._engine
        if step in STEPS:
            engine.own[step] = engine.own.get(step, 0.0) + seconds
            said = engine.obey(step, body, began)
        else:
            said = engine.status()
        text = to_json(said)
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        self._transport.write(head + text)


def report(engines: list[FakeEngine]) -> dict[str, Any]:
    """What was measured: what bench/fakes.py makes one report of. The floor is the longest sum of a healthy replica's
    own calls; the bound, the sum of each step's longest, is for whoever may begin no step before all are done with the
    one before it."""
    moved = [each for each in engines if each.paused_at is not None and each.opened_at is not None]
    healthy = [each for each in engines if not each.hung]
    calls: dict[str, int] = {}
    for each in engines:
        for step, count in each.calls.items():
            calls[step] = calls.get(step, 0) + count
    return {
        "replicas": len(engines),
        "moved": len(moved),
        "healthy": len(healthy),
        "open": sum(each.state == "open" for each in engines),
        "epochs": sorted({each.epoch for each in healthy}),
        "first": min((e.paused_at or 0.0 for e in moved), default=0.0),
        "last": max((e.opened_at or 0.0 for e in moved), default=0.0),
        "floor": max((sum(each.own.values()) for each in healthy), default=0.0),
        "slowest": {step: max((each.own.get(step, 0.0) for each in healthy), default=0.0) for step in STEPS},
        "longest": max((each.paused for each in healthy), default=0.0),
        "beyond": max((each.paused - sum(each.own.values()) for each in healthy), default=0.0),
        "calls": calls,
        "connections": Connection.opened,
    }


async def serve(first: str, count: int, with_status: bool, folder: str, after: int) -> None:
    """Serve until stdin ends. ``folder``: of the certificate; empty: plain HTTP."""
    loop = asyncio.get_running_loop()
    secured = None
    if folder:
        secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        secured.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    engines = [FakeEngine(number, with_status, after) for number in range(count)]
    base = int(ipaddress.IPv4Address(first))
    for engine in engines:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(ipaddress.IPv4Address(base + engine.number)), PORT))
        await loop.create_server(lambda engine=engine: Connection(engine), sock=listener, backlog=16, ssl=secured)
    print(json.dumps({"ready": count}), flush=True)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        answer: dict[str, Any] = {"done": order["do"]}
        if order["do"] == "mix":
            for engine in engines:
                engine.slow, engine.hung = engine.number in order["slow"], engine.number in order["hung"]
        elif order["do"] == "clear":
            for engine in engines:
                engine.clear()
        elif order["do"] == "report":
            answer = report(engines)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    certificate = sys.argv[sys.argv.index("--tls") + 1] if "--tls" in sys.argv else ""
    # They share the machine's cores with what is measured, so they take as little of them as can be.
    before = int(sys.argv[sys.argv.index("--after") + 1]) if "--after" in sys.argv else 0
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), "--no-status" not in sys.argv, certificate, before))
