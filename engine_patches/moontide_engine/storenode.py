"""A memory node: a process that lends a segment of its memory to a pool, so that keys outlive engines.

``python -m moontide_engine.storenode`` lends until SIGTERM. Then it asks the master to move its keys to other segments
(the master moves sixteen objects of a client a second, and a key that is wiped meanwhile is gone), waits until all are
moved or the time is over, unmounts, and says what it moved and what it dropped. ``GET /readyz`` is 200 while the master
knows the segment, ``/healthz`` while the process serves, ``/moontide/v1/status`` says the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moontide_engine.jsonlog import log

CONNECTING, LENDING, APART, DRAINING, LEFT = "connecting", "lending", "apart", "draining", "left"
LOOK_SECONDS = 1.0
ASK_SECONDS = 3.0
"""A master that needs longer for one answer is not there."""
UNITS_AT_ONCE = 256
"""Moves that the master may have under way. A client fetches sixteen a second, whatever this is."""
STALL_SECONDS = 15.0
"""A drain in which no key moves for so long has no room to move them to."""
LINGER_SECONDS = 2.0
"""Between the end of a drain and the end of the process: for whoever wants to read how it ended."""
MASTER_GONE = "MasterGone"
_ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


@dataclass(frozen=True)
class Config:
    """What the node is told by its environment."""

    host: str
    port: int
    master: str
    metrics: str
    segment_bytes: int
    buffer_bytes: int
    drain_seconds: float
    protocol: str
    devices: str

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """Read the environment; raises KeyError for what is missing and ValueError for a number that is none."""
        return cls(
            host=env["MOONTIDE_NODE_HOST"],
            port=int(env.get("MOONTIDE_NODE_PORT", "9005")),
            master=env["MOONTIDE_MASTER_ADDRESS"],
            metrics=env["MOONTIDE_MASTER_METRICS"].rstrip("/"),
            segment_bytes=int(env["MOONTIDE_SEGMENT_BYTES"]),
            buffer_bytes=int(env.get("MOONTIDE_BUFFER_BYTES", str(16 * 2**20))),
            drain_seconds=float(env.get("MOONTIDE_DRAIN_SECONDS", "60")),
            protocol=env.get("MOONTIDE_PROTOCOL", "tcp"),
            devices=env.get("MOONTIDE_DEVICES", ""),
        )


@dataclass(frozen=True)
class Drain:
    """How far a drain has come, or how it ended. ``left_bytes`` are dropped when the node goes."""

    reason: str
    held_bytes: int = 0
    moved_keys: int = 0
    moved_bytes: int = 0
    failed_keys: int = 0
    seconds: float = 0.0
    ended: bool = False

    @property
    def left_bytes(self) -> int:
        """Bytes that were not moved."""
        return max(0, self.held_bytes - self.moved_bytes)

    def wire(self) -> dict[str, object]:
        """As the status shows it."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "left_bytes": self.left_bytes}


class Admin:
    """The master's HTTP routes. Raises OSError when it does not answer, or not with what it should."""

    def __init__(self, base: str) -> None:
        self._base = base

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object that the master answers with, also when it refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"} if data else {})
        try:
            with urllib.request.urlopen(request, timeout=ASK_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise OSError(f"{path} answers {text[:200]!r}")
        return answer

    def segment_state(self, segment: str) -> str:
        """OK, DRAINING, ... or empty for a segment that the master does not know."""
        answer = self.ask(f"/api/v1/segments/status?segment={urllib.parse.quote(segment)}")
        return str(answer.get("status_name", "")) if answer.get("success") is True else ""

    def segments(self) -> list[dict[str, Any]]:
        """All segments, with their state and fill."""
        return [each for each in self.ask("/get_segments_detail").get("segments") or () if isinstance(each, dict)]


def drain(admin: Admin, segment: str, seconds: float, report: Callable[[Drain], None]) -> Drain:
    """Have the master move what ``segment`` holds to other segments, for at most ``seconds``; ``report`` each step.

    Never raises: a master that is gone has lost the keys anyway.
    """
    began = time.monotonic()
    seen = Drain("Draining")

    def ended(reason: str, so_far: Drain) -> Drain:
        found = {**asdict(so_far), "reason": reason, "seconds": time.monotonic() - began, "ended": True}
        return Drain(**found)

    try:
        segments = admin.segments()
        held = sum(int(each["allocator_used_bytes"]) for each in segments if each.get("segment_name") == segment)
        seen = Drain("Draining", held_bytes=held)
        report(seen)
        if not held:
            return ended("Empty", seen)
        if seconds <= 0:
            return ended("NotAsked", seen)
        if not any(each.get("segment_name") != segment and each.get("status") == "OK" for each in segments):
            return ended("NowhereToGo", seen)
        wanted = {"segments": [segment], "target_segments": [], "max_concurrency": UNITS_AT_ONCE}
        answer = admin.ask("/api/v1/drain_jobs", wanted)
        job = answer.get("job_id")
        if answer.get("success") is not True or not job:
            return ended(f"Refused: {answer.get('error_message', '')}", seen)
        done, since = -1, began
        while True:
            answer = admin.ask(f"/api/v1/drain_jobs/query?job_id={urllib.parse.quote(str(job))}")
            seen = Drain(
                "Draining",
                held,
                int(answer.get("succeeded_units", 0)),
                int(answer.get("migrated_bytes", 0)),
                int(answer.get("failed_units", 0)),
                time.monotonic() - began,
            )
            report(seen)
            if answer.get("status_name") in _ENDED:
                return ended("Moved" if answer["status_name"] == "SUCCEEDED" else "Failed", seen)
            if seen.moved_keys + seen.failed_keys != done:
                done, since = seen.moved_keys + seen.failed_keys, time.monotonic()
            if time.monotonic() - began >= seconds:
                return ended("TimeIsOver", seen)
            if time.monotonic() - since >= STALL_SECONDS:
                return ended("NoRoom", seen)
            time.sleep(min(0.5, max(0.05, seconds - (time.monotonic() - began))))
    except (OSError, KeyError, TypeError, ValueError) as error:
        return ended(f"{MASTER_GONE}: {error}"[:200], seen)


class Node:
    """One segment, from its mounting to its end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._admin = Admin(config.metrics)
        self._lock = threading.Lock()
        self._state = CONNECTING
        self._segment = ""
        self._drain: Drain | None = None
        self._store: Any = None

    def status(self) -> dict[str, object]:
        """For people and for the operator."""
        with self._lock:
            return {
                "state": self._state,
                "segment": self._segment,
                "bytes": self._config.segment_bytes,
                "drain": self._drain.wire() if self._drain is not None else None,
            }

    @property
    def lending(self) -> bool:
        """Whether the master takes the segment for one that it may fill."""
        with self._lock:
            return self._state == LENDING

    def mount(self) -> None:
        """Lend the segment; waits for the master as long as it takes. Raises RuntimeError when the store refuses."""
        host, _, port = self._config.master.rpartition(":")
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=ASK_SECONDS).close()
                break
            except OSError:
                time.sleep(LOOK_SECONDS)
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        given = self._config
        code = self._store.setup(
            given.host,
            "P2PHANDSHAKE",
            given.segment_bytes,
            given.buffer_bytes,
            given.protocol,
            given.devices,
            given.master,
        )
        if code != 0:
            raise RuntimeError(f"the store answered {code} to setup")
        with self._lock:
            self._segment = str(self._store.get_hostname())
        log("segment-mounted", segment=self._segment, bytes=given.segment_bytes)

    def look(self) -> None:
        """Ask the master once whether it knows the segment. The client mounts it again by itself at a new master."""
        try:
            known = self._admin.segment_state(self._segment) == "OK"
        except OSError:
            known = False
        with self._lock:
            if self._state in (CONNECTING, LENDING, APART):
                self._state = LENDING if known else APART

    def leave(self) -> Drain:
        """Move the keys, and unmount. Ends in bounded time."""
        with self._lock:
            self._state = DRAINING
        ended = drain(self._admin, self._segment, self._config.drain_seconds, self._note)
        self._note(ended)
        log("segment-drained", segment=self._segment, **ended.wire())
        if ended.reason != "Empty":
            time.sleep(LINGER_SECONDS)
        # A master that is gone has nothing mounted, and the client would look for it for ten seconds.
        if not ended.reason.startswith(MASTER_GONE):
            self._store.close()
        with self._lock:
            self._state = LEFT
        log("segment-unmounted", segment=self._segment)
        return ended

    def _note(self, seen: Drain) -> None:
        with self._lock:
            self._drain = seen


def make_server(port: int, node: Node) -> ThreadingHTTPServer:
    """The HTTP server, bound and not yet serving. Its routes change nothing."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            if self.path == "/healthz":
                self._answer(200, {"ok": True})
            elif self.path == "/readyz":
                self._answer(200 if node.lending else 503, node.status())
            elif self.path == "/moontide/v1/status":
                self._answer(200, node.status())
            else:
                self._answer(404, {"reason": "NotFound", "message": "no such route"})

        def log_message(self, format: str, *args: Any) -> None:
            """No access log."""

        def _answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that leaves early is no event."""

    return Server(("0.0.0.0", port), Handler)


def run(config: Config, stop: threading.Event) -> int:
    """Lend until ``stop``. Returns the exit status."""
    node = Node(config)
    server = make_server(config.port, node)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    failures: list[BaseException] = []
    mounted = threading.Event()

    def mount() -> None:
        try:
            node.mount()
        except Exception as error:
            failures.append(error)
        mounted.set()

    # Not in the main thread: a native call there would keep signals from being handled.
    threading.Thread(target=mount, daemon=True).start()
    while not mounted.wait(0.1):
        if stop.is_set():
            return 0
    if failures:
        log("segment-refused", error=str(failures[0]))
        return 1
    while True:
        node.look()
        if stop.wait(LOOK_SECONDS):
            break
    node.leave()
    with contextlib.suppress(OSError):
        server.server_close()
    return 0


def main(arguments: list[str]) -> int:
    """Command line."""
    if arguments:
        print("usage: python -m moontide_engine.storenode", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return run(Config.from_env(os.environ), stop)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Not through the client's destructor: it may wait for a master that is gone.
    os._exit(code)
