"""Engines and a wiper in one process, with one journal: ``python -m tests.integration.fleet_double JOURNAL``.

The gate, the admin plane and the wiper's HTTP app are the real ones. Each engine that is open serves all the time: it
reads whatever KV it can find under its salt, in its own cache or in the store, and what it computes is in both from
then on, in the store a little later. KV remembers the epoch it was computed in, so a stale read is seen and journalled.

What to do comes as one JSON object a line on stdin; each is answered with a line on stdout. The journal has one line
for each command that reached a gate, each change of a gate, each removal and each stale read, in the order in which
they happened, with the time of the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "engine_patches"))

import uvicorn

from moontide_engine import tls
from moontide_engine import wiper as wipers
from moontide_engine.admin import AdminApp, Answer, Commands
from moontide_engine.auth import TokenFile
from moontide_engine.engine import RankQueue
from moontide_engine.gate import Gate, Refusal, State
from moontide_engine.middleware import GateMiddleware
from moontide_engine.namespace import tag
from tests.integration.engine_double import IdleEngine, nothing
from tests.integration.pages import serve_pages

INFERENCE_PORT, ADMIN_PORT, WIPER_PORT, MASTER_PORT = 8000, 8001, 9004, 9003
TICK_SECONDS = 0.02
UNSALTED = "0" * 16

KV = tuple[str, int]
"""The salt in its key, and the epoch in which it was computed."""


class Journal:
    """One line an event, from any thread."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()

    def say(self, **event: object) -> None:
        with self._lock:
            os.write(self._file, json.dumps({"at": time.monotonic(), **event}).encode() + b"\n")


@dataclass
class Store:
    """Keys of every namespace, as a master has them, and the KV behind each."""

    keys: dict[str, KV] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, namespace: str, kv: KV) -> None:
        salt, epoch = kv
        head = tag(salt).hex() if salt else UNSALTED
        with self.lock:
            self.keys[f"{namespace}@tiny@{head}{epoch:048x}"] = kv

    def find(self, namespace: str) -> set[KV]:
        with self.lock:
            return {kv for key, kv in self.keys.items() if key.startswith(f"{namespace}@")}

    def remove(self, wanted: Callable[[str], object]) -> int:
        with self.lock:
            gone = [key for key in self.keys if wanted(key)]
            for key in gone:
                del self.keys[key]
            return len(gone)


class Engine(IdleEngine):
    """One engine, with a cache, a queue of puts, weights and faults."""

    store_configured = True

    def __init__(self, name: str, namespace: str, store: Store, journal: Journal, fences: bool) -> None:
        super().__init__()
        self.fence_unsupported = self.live_fence_unsupported = "" if fences else "its connector hashes tokens"
        self.name = name
        self.weights = "1"
        self.reset_fails = False
        self.gate = Gate(f"boot-{name}", time.monotonic)
        self.gate.listeners.append(self._changed)
        self._namespace = namespace
        self._store = store
        self._journal = journal
        self._salt = ""
        self._local: set[KV] = set()
        self._queue: set[KV] = set()

    def _changed(self, gate: Gate) -> None:
        epoch = None if gate.stamp is None else gate.stamp.epoch
        said = {"state": str(gate.state), "epoch": epoch, "salt": self._salt, "reason": gate.reason}
        self._journal.say(engine=self.name, **said)
        self.tick()

    def tick(self) -> None:
        """What was queued is put, and one request is answered, if the gate is open."""
        while self._queue:
            self._store.put(self._namespace, self._queue.pop())
        stamp = self.gate.stamp
        if self.gate.state is not State.OPEN or stamp is None:
            return
        there = self._local | self._store.find(self._namespace)
        stale = sorted(epoch for salt, epoch in there if salt == self._salt and epoch != stamp.epoch)
        if stale:
            self._journal.say(engine=self.name, stale=stale, epoch=stamp.epoch)
        self._local.add((self._salt, stamp.epoch))
        self._queue.add((self._salt, stamp.epoch))

    async def queues(self) -> list[RankQueue]:
        return [RankQueue(0, len(self._queue), 0, True, "")]

    async def weights_version(self) -> str:
        return self.weights

    async def set_weights_version(self, version: str) -> None:
        self.weights = version

    async def reset_prefix(self, preempt: bool = False) -> bool:
        if self.reset_fails:
            raise RuntimeError("it cannot")
        self._local.clear()
        return True

    async def switch(self, salt: str) -> None:
        self._salt = salt


class Recorded(Commands):
    """Says of each command what came of it."""

    def __init__(self, engine: Engine, namespace: str, journal: Journal, middleware: GateMiddleware) -> None:
        super().__init__(engine.gate, middleware, engine, "pod", namespace)
        self._name = engine.name
        self._journal = journal
        self._older = bool(engine.fence_unsupported)

    async def status(self) -> Answer:
        """Of those without a fence as an older plugin has it, so that there are some: it resumes with a command."""
        said = await super().status()
        return {name: value for name, value in said.items() if not (self._older and name == "admitResumes")}

    async def run(self, command: str, body: Mapping[str, Any]) -> Answer:
        said = {"engine": self._name, "step": command, "term": body["term"], "epoch": body["epoch"]}
        said |= {"version": body["version"]} if "version" in body else {}
        try:
            answer = await super().run(command, body)
        except Refusal as refusal:
            self._journal.say(**said, outcome=refusal.reason)
            raise
        self._journal.say(**said, outcome=answer["reason"])
        return answer


class Wiper(wipers.Wiper):
    """The real one, which asks the store at hand instead of a child."""

    def __init__(self, store: Store, journal: Journal) -> None:
        super().__init__("")
        self._store = store
        self._journal = journal

    def wipe(self, namespace: str, timeout: float) -> wipers.Answer:
        answer = super().wipe(namespace, timeout)
        self._journal.say(removal="wipe", namespace=namespace, removed=answer["removed"])
        return answer

    def collect(self, metrics: str, namespace: str, keep: Sequence[str], timeout: float) -> wipers.Answer:
        answer = super().collect(metrics, namespace, keep, timeout)
        self._journal.say(removal="collect", namespace=namespace, removed=answer["removed"])
        return answer

    def _ask(self, request: Mapping[str, object], deadline: float) -> int:
        if "remove" in request:
            return self._store.remove(re.compile(str(request["remove"])).match)
        keys = request["keys"]
        assert isinstance(keys, list)
        return self._store.remove(set(keys).__contains__)


class Doubles:
    """Everything in this process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._store = Store()
        self._engines: dict[str, Engine] = {}
        self._gates: dict[str, GateMiddleware] = {}
        self._tasks: dict[str, tuple[uvicorn.Server, asyncio.Task[None]]] = {}

    async def engine(
        self, name: str, host: str, token: str, namespace: str, fences: bool, weights: str, folder: str = ""
    ) -> None:
        """Start an engine process, so to speak: closed, with these weights. ``folder``: of its certificate, for TLS."""
        made = self._engines[name] = Engine(name, namespace, self._store, self._journal, fences)
        made.weights = weights
        middleware = self._gates[name] = GateMiddleware(nothing, made.gate, 16)
        commands = Recorded(made, namespace, self._journal, middleware)
        app = AdminApp(commands, middleware, nothing, TokenFile(token))
        await self._serve(name, app, host, ADMIN_PORT, folder)

    async def inference(self, name: str, host: str) -> None:
        """Serve an engine's inference port, too: its gate, and 404 behind it."""
        await self._serve(f"{name} inference", self._gates[name], host, INFERENCE_PORT)

    async def _serve(self, name: str, app: Any, host: str, port: int, folder: str = "") -> None:
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off")
        if folder:
            tls.secure(config, tls.Certificate(folder))
        server = uvicorn.Server(config)
        self._tasks[name] = server, asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def wiper(self, host: str, token: str, folder: str = "") -> None:
        """Start the wiper. ``folder``: of its certificate, for TLS."""

        def list_keys(metrics: str, timeout: float) -> Iterator[str]:
            with self._store.lock:
                return iter(list(self._store.keys))

        wipers.list_keys = list_keys
        config = wipers.Config(host, WIPER_PORT, token, "", "", tls=folder)
        server = wipers.make_server(config, Wiper(self._store, self._journal))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    async def master(self, host: str, capacity: int, bytes_a_key: int) -> None:
        """Start what the operator reads of a master: that it serves, and its gauges."""
        store = self._store

        def page(path: str) -> str:
            if path == "/health":
                return json.dumps({"service_ready": True})
            with store.lock:
                keys = len(store.keys)
            gauges = {"active_clients": 0, "key_count": keys, "allocated_bytes": keys * bytes_a_key}
            gauges["total_capacity_bytes"] = capacity
            return "".join(f"master_{gauge} {value}\n" for gauge, value in gauges.items())

        serve_pages(host, MASTER_PORT, page)

    async def kill(self, name: str) -> None:
        """End an engine process."""
        self._engines.pop(name)
        self._gates.pop(name)
        for each in (name, f"{name} inference"):
            if each in self._tasks:
                server, task = self._tasks.pop(each)
                server.should_exit = server.force_exit = True
                await task

    async def change(self, names: Sequence[str], **changes: object) -> None:
        """Set attributes of engines: ``weights``, ``reset_fails``."""
        for name in names:
            for attribute, value in changes.items():
                assert hasattr(self._engines[name], attribute)
                setattr(self._engines[name], attribute, value)

    async def states(self) -> dict[str, tuple[str, int | None]]:
        """State and epoch of every engine."""
        gates = {name: engine.gate for name, engine in self._engines.items()}
        return {name: (str(g.state), None if g.stamp is None else g.stamp.epoch) for name, g in gates.items()}

    async def tick(self) -> None:
        """Let every engine work, for ever."""
        while True:
            for engine in self._engines.values():
                engine.tick()
            await asyncio.sleep(TICK_SECONDS)


async def main() -> None:
    """Serve until stdin ends."""
    doubles = Doubles(Journal(sys.argv[1]))
    ticking = asyncio.create_task(doubles.tick())
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        answer = await getattr(doubles, order.pop("do"))(**order)
        assert not ticking.done()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
