"""A real Mooncake master, real memory nodes and real clients on one machine, on ports that were free at the start."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import enginekit as kit
import httpx


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


PORT, METRICS = _free_ports(2)
MIB = 2**20
NATIVE = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_RPC_CONNECT_TIMEOUT_MS": "500", "MC_RPC_TIMEOUT_MS": "2000"}


class Pool(kit.Master):
    """A master with the flags of a test; its nodes and clients end with it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, PORT, METRICS)
        self.folder = folder
        self._flags = flags
        self.nodes: list[Node] = []
        self.clients: list[Any] = []

    def start(self) -> None:
        url = f"http://127.0.0.1:{METRICS}/health"
        assert kit.get(url) is None, f"something else listens on port {METRICS}"
        program = str(Path(sys.executable).with_name("mooncake_master"))
        # A machine that stands still for seconds is no subject: keys of a client that is not heard would be lost.
        command = [program, f"-rpc_port={PORT}", f"-metrics_port={METRICS}", "-client_ttl=30", *self._flags]
        self.process = kit.spawn(command, {}, self.folder / "pool-master.log")
        kit.wait_for(
            "master", lambda: (r := kit.get(url)) is not None and r.status_code == 200, kit.PATIENCE, self.process
        )

    def metric(self, name: str) -> float:
        """One gauge or counter of the master."""
        text = httpx.get(f"http://127.0.0.1:{METRICS}/metrics", timeout=kit.PATIENCE).text
        (value,) = (line.split()[-1] for line in text.splitlines() if line.split(" ")[0] == name)
        return float(value)

    def node(self, segment: int, drain_seconds: float = 30) -> Node:
        """A memory node that lends."""
        made = Node(self.folder, len(self.nodes), segment, drain_seconds)
        self.nodes.append(made)
        kit.wait_for("the node lends", lambda: made.state == "lending", kit.PATIENCE, made.process)
        return made

    def client(self, segment: int = 0) -> Any:
        """A client in this process."""
        from mooncake.store import MooncakeDistributedStore

        os.environ.update(NATIVE)
        made = MooncakeDistributedStore()
        code = made.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", f"127.0.0.1:{PORT}")
        assert code == 0, code
        self.clients.append(made)
        return made

    def end(self) -> None:
        """End everything."""
        for client in self.clients:
            client.close()
        for node in self.nodes:
            if node.process.popen.poll() is None:
                node.process.signal(9)
                node.process.popen.wait()
        if self.process is not None:
            self.process.end(10)


class Node:
    """The memory node's program."""

    def __init__(self, folder: Path, number: int, segment: int, drain_seconds: float) -> None:
        (self.port,) = _free_ports(1)
        environment = {
            **NATIVE,
            "PYTHONPATH": str(kit.ROOT / "engine_patches"),
            "MOONTIDE_NODE_HOST": "127.0.0.1",
            "MOONTIDE_NODE_PORT": str(self.port),
            "MOONTIDE_MASTER_ADDRESS": f"127.0.0.1:{PORT}",
            "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{METRICS}",
            "MOONTIDE_SEGMENT_BYTES": str(segment),
            "MOONTIDE_DRAIN_SECONDS": str(drain_seconds),
        }
        command = [sys.executable, "-m", "moontide_engine.storenode"]
        self.process = kit.spawn(command, environment, folder / f"node{number}.log")

    def get(self, path: str) -> httpx.Response | None:
        """One of its routes."""
        return kit.get(f"http://127.0.0.1:{self.port}{path}")

    def status(self) -> dict[str, Any]:
        """What it says of itself; empty while it does not answer."""
        answer = self.get("/moontide/v1/status")
        return answer.json() if answer is not None else {}

    @property
    def state(self) -> str:
        return str(self.status().get("state", ""))

    def leave(self, seconds: float = 60) -> dict[str, Any]:
        """SIGTERM. Returns the last state of its drain that it told."""
        last: dict[str, Any] = {}
        self.process.popen.terminate()

        def ended() -> bool:
            last.update(self.status().get("drain") or {})
            return self.process.popen.poll() is not None

        kit.wait_for("the node ends", ended, seconds)
        assert self.process.popen.returncode == 0, self.process.tail()
        if not last.get("ended"):
            # It serves its last state for two seconds: whoever comes later finds it in its log.
            lines = self.process.log.read_text().splitlines()
            last.update(json.loads(next(line for line in lines if "segment-drained" in line)))
        return last


@contextmanager
def pool(folder: Path, *flags: str) -> Iterator[Pool]:
    """A started master."""
    made = Pool(folder, *flags)
    try:
        made.start()
        yield made
    finally:
        made.end()


def put(client: Any, namespace: str, count: int, value: bytes, first: int = 0) -> int:
    """Write keys of a namespace as engines name them. Returns how many the store took."""
    return sum(client.put(f"{namespace}@tiny@{i:06d}", value) == 0 for i in range(first, first + count))


def right(client: Any, namespace: str, count: int, value: bytes, first: int = 0) -> int:
    """How many of them the store serves; fails for one that it serves with other bytes."""
    found = 0
    for i in range(first, first + count):
        got = client.get(f"{namespace}@tiny@{i:06d}")
        assert got in (b"", value), f"key {i} has other bytes"
        found += got == value
    return found
