"""Three real Mooncake masters whose log is in a real etcd, the real wiper beside each, and a real client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import enginekit as kit
import httpx

CLUSTER = "5f0c6f6e-0000-4a8e-9b59-3d1b6a1c7d10"


def etcd_binary() -> Path:
    """The etcd that the local cluster is made with."""
    cache = Path(os.environ.get("MOONTIDE_CACHE") or Path.home() / ".cache" / "moontide")
    found = sorted(cache.glob("bin-*/etcd"), key=lambda path: path.stat().st_mtime)
    assert found, f"no etcd in {cache}: python3 -m hack.setup"
    return found[-1]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Etcd:
    """One member, without fsync."""

    def __init__(self, folder: Path) -> None:
        self.port, peer = free_ports(2)
        client, members = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        command = [
            *(str(etcd_binary()), "--name=etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={members}", f"--initial-advertise-peer-urls={members}"),
            f"--initial-cluster=etcd={members}",
        ]
        self.process = kit.spawn(command, {}, folder / "etcd.log")
        kit.wait_for("etcd", lambda: kit.get(f"{client}/health"), kit.PATIENCE, self.process)


class Master:
    """One master and its wiper, as they are in one pod."""

    def __init__(self, folder: Path, etcd: Etcd, number: int) -> None:
        self.rpc, self.metrics, self._wiper = free_ports(3)
        self.address = f"127.0.0.1:{self.rpc}"
        endpoint = f"127.0.0.1:{etcd.port}"
        command = [
            *(str(Path(sys.executable).with_name("mooncake_master")), f"-rpc_port={self.rpc}"),
            *(f"-metrics_port={self.metrics}", "-rpc_address=127.0.0.1", "-client_ttl=30", "-default_kv_lease_ttl=500"),
            *("-enable_ha=true", "-ha_backend_type=etcd", f"-etcd_endpoints={endpoint}", f"-cluster_id={CLUSTER}"),
            *("-enable_oplog=true", "-logtostderr"),
        ]
        self.process = kit.spawn(command, {}, folder / f"master{number}.log")
        environment = {
            "PYTHONPATH": str(kit.ROOT / "engine_patches"),
            "MOONTIDE_WIPER_HOST": "127.0.0.1",
            "MOONTIDE_WIPER_PORT": str(self._wiper),
            "MOONTIDE_WIPER_TOKEN_FILE": str(folder / "token"),
            "MOONTIDE_MASTER_ADDRESS": self.address,
            "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{self.metrics}",
            "MOONTIDE_ETCD_ENDPOINTS": endpoint,
            "MC_STORE_CLUSTER_ID": CLUSTER,
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }
        self.wiper = kit.spawn(
            [sys.executable, "-m", "moontide_engine.wiper"], environment, folder / f"wiper{number}.log"
        )

    @property
    def serves(self) -> bool:
        """Whether it says that it leads."""
        answer = kit.get(f"http://127.0.0.1:{self.metrics}/health")
        return answer is not None and answer.json().get("service_ready") is True

    def is_heard(self) -> bool:
        """Whether its wiper answers."""
        return kit.get(f"http://127.0.0.1:{self._wiper}/healthz") is not None

    def wipe(self, namespace: str, seconds: float = 30.0) -> dict[str, Any]:
        """The wiper's answer."""
        body = {"term": 1, "namespace": namespace, "timeoutSeconds": seconds}
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        url = f"http://127.0.0.1:{self._wiper}/moontide/v1/wipe"
        patience = seconds + kit.PATIENCE
        made: dict[str, Any] = httpx.post(url, json=body, headers=headers, timeout=patience, verify=False).json()
        return made

    def keys(self, namespace: str) -> int:
        """Keys of the namespace, by the master's own listing."""
        answer = kit.get(f"http://127.0.0.1:{self.metrics}/get_all_keys")
        assert answer is not None
        return sum(key.startswith(f"{namespace}@") for key in answer.text.split())

    def end(self) -> None:
        """End both."""
        for process in (self.wiper, self.process):
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGKILL)
            process.popen.wait()


class Masters:
    """Three of them."""

    def __init__(self, folder: Path) -> None:
        (folder / "token").write_text(kit.TOKEN + "\n")
        self.folder = folder
        self.etcd = Etcd(folder)
        self.all = [Master(folder, self.etcd, number) for number in (1, 2, 3)]
        for each in self.all:
            kit.wait_for("a wiper", each.is_heard, kit.PATIENCE, each.wiper)

    def leader(self, *without: Master) -> Master:
        """Wait until one of the others leads."""
        others = [each for each in self.all if each not in without]
        found: Master = kit.wait_for("a leader", lambda: next((m for m in others if m.serves), None), 90)
        return found

    def end(self) -> None:
        """End everything."""
        for each in self.all:
            each.end()
        self.etcd.process.signal(signal.SIGCONT)
        self.etcd.process.signal(signal.SIGKILL)
        self.etcd.process.popen.wait()


CLIENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
for line in sys.stdin:
    do, keys = json.loads(line)
    if do == "put":
        said = sum(store.put(key, key.encode()) == 0 for key in keys)
    elif do == "remove":
        said = store.remove_by_regex(keys[0], True)
    else:
        said = sum(store.get(key) == key.encode() for key in keys)
    print("said", said, flush=True)
"""


class Client:
    """A client that lends memory and finds the leader through etcd, in a process of its own."""

    def __init__(self, masters: Masters) -> None:
        names = ("PATH", "HOME")
        environment = {
            **{name: os.environ[name] for name in names if name in os.environ},
            "MC_STORE_CLUSTER_ID": CLUSTER,
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_RPC_CONNECT_TIMEOUT_MS": "500",
            "MC_RPC_TIMEOUT_MS": "2000",
        }
        self._log = (masters.folder / "client.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, f"etcd://127.0.0.1:{masters.etcd.port}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _ask(self, do: str, keys: list[str]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([do, keys]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("said "):
                return int(line.split()[1])
        raise AssertionError("the client ended")

    def put(self, keys: list[str]) -> int:
        """How many could be put."""
        return self._ask("put", keys)

    def found(self, keys: list[str]) -> int:
        """How many are there, each with its own content."""
        return self._ask("get", keys)

    def remove(self, pattern: str) -> int:
        """What the master says that it removed, with no proof asked for."""
        return self._ask("remove", [pattern])

    def end(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
