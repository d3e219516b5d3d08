"""Real vLLM processes on the CPU and a real Mooncake master, as the component tests of the engine use them.

Runs in the engine's environment. Ports 18100 to 18199 of the loopback interface are ours.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[3]
MAKER = ROOT / "hack" / "tinymodels" / "make.py"
MASTER_PORT, MASTER_METRICS = 18150, 18151
WIPER_PORT = 18160
NAMESPACE = "5f0c6f6e-2f0b-4a8e-9b59-3d1b6a1c7d10"
TOKEN = "admin-token-of-the-tests"
START_SECONDS = 400.0
PATIENCE = 60.0
"""Seconds for an answer that comes at once, on a machine whose processors stand still at times."""
BUSY = 20.0
"""Seconds that such a machine may add to what is bounded."""
BLOCK = 32

# All is plain HTTP, and reading the certificates takes a hundred times longer than the rest of a client.
_get = functools.partial(httpx.get, verify=False)
_post = functools.partial(httpx.post, verify=False)


@dataclass
class Process:
    """A child in a process group of its own; the group ends with it."""

    popen: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        """Signal every process of the group."""
        os.killpg(self.popen.pid, number)

    def members(self) -> list[int]:
        """PIDs of the group."""
        found = []
        for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(ProcessLookupError):
                found += [pid] if os.getpgid(pid) == self.popen.pid else []
        return found

    def end(self, seconds: float = 60.0) -> int:
        """SIGTERM to the main process, SIGKILL to the group if that does not do in time. Exit code."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
        code = self.popen.wait()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        return code

    def tail(self, lines: int = 40) -> str:
        """Last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def whole(env: Mapping[str, str]) -> dict[str, str]:
    """It and a few basics, with this checkout's plugin.

    The engine's environment is shared by all checkouts, and the plugin in it is that of the last one set up.
    """
    basics = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    path = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
    return {**basics, **env, "PYTHONPATH": os.pathsep.join([*path, str(ROOT / "engine_patches")])}


def spawn(command: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start a command with nothing but what :func:`whole` makes of this environment."""
    with log.open("ab") as out:
        popen = subprocess.Popen(
            list(command),
            env=whole(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Process(popen, log)


def wait_for(what: str, done: Callable[[], Any], seconds: float, process: Process | None = None) -> Any:
    """Poll until it is truthy, and return that. Fails the test with the process's last output otherwise."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := done():
            return value
        if process is not None and process.popen.poll() is not None:
            pytest.fail(f"{what}: the process ended with {process.popen.returncode}\n{process.tail()}")
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {seconds:g} s" + (f"\n{process.tail()}" if process is not None else ""))


def get(url: str, **more: Any) -> httpx.Response | None:
    """GET, None if nobody answers."""
    try:
        return _get(url, timeout=PATIENCE, **more)
    except httpx.TransportError:
        return None


def store_config(folder: Path, port: int = MASTER_PORT) -> None:
    """Write the token of the admin port, and what a replica has to know of its store."""
    (folder / "token").write_text(TOKEN + "\n")
    store = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "global_segment_size": "128MB",
        "local_buffer_size": "32MB",
        "protocol": "tcp",
        "device_name": "",
    }
    (folder / "mooncake.json").write_text(json.dumps(store))


class Master:
    """The Mooncake master."""

    def __init__(self, folder: Path, port: int = MASTER_PORT, metrics: int = MASTER_METRICS) -> None:
        self._folder = folder
        self.port = port
        self._metrics = metrics
        self.process: Process | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        url = f"http://127.0.0.1:{self._metrics}/health"
        assert get(url) is None, f"something else listens on port {self._metrics}"
        command = [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"-rpc_port={self.port}",
            f"-metrics_port={self._metrics}",
            # A busy machine can starve it and the engines' pings for some seconds, and then their blocks would be lost.
            "-client_ttl=15",
        ]
        self.process = spawn(command, {}, self._folder / "master.log")
        wait_for("master", lambda: (r := get(url)) is not None and r.status_code == 200, PATIENCE, self.process)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.signal(signal.SIGKILL)
        self.process.popen.wait()

    def signal(self, number: int) -> None:
        """Signal it."""
        assert self.process is not None
        self.process.signal(number)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys, by the master's own listing."""
        answer = _get(f"http://127.0.0.1:{self._metrics}/get_all_keys", timeout=PATIENCE)
        return [key for key in answer.text.split() if key.startswith(prefix)]

    def segments(self) -> list[str]:
        """Segments that clients lend."""
        return _get(f"http://127.0.0.1:{self._metrics}/get_all_segments", timeout=PATIENCE).text.split()


def engine_environment(folder: Path, number: int) -> dict[str, str]:
    """Environment of one replica on this machine; the contract's variables are set, the plugin is on."""
    scratch = folder / f"tmp{number}"
    scratch.mkdir(exist_ok=True)
    return {
        "VLLM_HOST_IP": "127.0.0.1",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MC_RPC_CONNECT_TIMEOUT_MS": "500",
        "MC_RPC_TIMEOUT_MS": "2000",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(scratch),
        "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
        "VLLM_SERVER_DEV_MODE": "1",
        "MOONTIDE_ENABLED": "1",
        "MOONTIDE_ADMIN_HOST": "127.0.0.1",
        "MOONTIDE_ADMIN_PORT": str(18110 + number),
        "MOONTIDE_ADMIN_TOKEN_FILE": str(folder / "token"),
        "MOONTIDE_POD_UID": f"pod-{number}",
        "MOONTIDE_KEY_NAMESPACE": NAMESPACE,
        "MOONTIDE_WEIGHTS_VERSION": "weights-a",
        "MOONTIDE_STORE_TIMEOUT_SECONDS": "6",
        "MOONTIDE_LOAD_TIMEOUT_SECONDS": "10",
        "MOONTIDE_WORKER_SPIN_SECONDS": "0.005",
        # The second replica as vLLM's CPU build starts by itself, all others as its GPU builds and our CPU image do.
        "MOONTIDE_CPU_START_METHOD": "spawn" if number == 2 else "fork",
    }


def transfer_config(number: int, prefix: str = NAMESPACE) -> dict[str, Any]:
    """Connector of one replica."""
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_rpc_port": 18100 + number, "cache_prefix": prefix},
    }


def engine_command(model: Path, number: int, prefix: str = NAMESPACE) -> list[str]:
    """Command of one replica. Single precision: in half, batching alone changes one greedy answer in twenty."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(18100 + number)),
        *("--max-model-len", "4096", "--block-size", str(BLOCK), "--enforce-eager", "--shutdown-timeout", "60"),
        *("--kv-transfer-config", json.dumps(transfer_config(number, prefix))),
    ]


@dataclass
class Answer:
    """One completion."""

    status: int
    tokens: list[int]
    finish: str
    epoch: str | None
    version: str | None
    body: Any
    last_epoch: str | None = None
    """Where it ended, if that is not where it began."""


@dataclass
class Replica:
    """One engine and both of its ports."""

    number: int
    process: Process
    boot_id: str = ""
    at_start: dict[str, Any] = field(default_factory=dict)

    @property
    def inference(self) -> str:
        """Base URL of the inference port."""
        return f"http://127.0.0.1:{18100 + self.number}"

    @property
    def admin(self) -> str:
        """Base URL of the admin port."""
        return f"http://127.0.0.1:{18110 + self.number}"

    def post(self, path: str, body: object = None, token: str | None = TOKEN, timeout: float = 90) -> httpx.Response:
        """POST on the admin port."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return _post(self.admin + path, json=body, headers=headers, timeout=timeout)

    def stock_reset(self, **query: bool) -> dict[str, Any]:
        """Body of vLLM's own reset route."""
        answer = self.post("/reset_prefix_cache?" + "&".join(f"{name}={value}" for name, value in query.items()))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def status(self) -> dict[str, Any]:
        """The engine's own status."""
        url = f"{self.admin}/moontide/v1/status"
        answer = _get(url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE)
        assert answer.status_code == 200
        status: dict[str, Any] = answer.json()
        return status

    def command(self, name: str, epoch: int, term: int = 1, **more: Any) -> tuple[int, dict[str, Any]]:
        """One command of the contract."""
        body: dict[str, Any] = {"term": term, "epoch": epoch, "bootId": self.boot_id}
        if name in ("quiesce", "drain", "reset"):
            body["timeoutSeconds"] = 60
        if name == "quiesce":
            body |= {"mode": "wait", "requestsDuringBarrier": "Queue", "ttlSeconds": 300}
        answer = self.post(f"/moontide/v1/{name}", {**body, **more})
        return answer.status_code, answer.json()

    def succeed(self, name: str, epoch: int, **more: Any) -> dict[str, Any]:
        """One command that must do what it says."""
        status, answer = self.command(name, epoch, **more)
        assert (status, answer["success"]) == (200, True), answer
        return answer

    def complete(self, prompt: str, tokens: int = 12, rank: int | None = None) -> Answer:
        """Greedy completion on the inference port, by one data-parallel rank if one is named."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = _post(f"{self.inference}/v1/completions", json=body, headers=headers, timeout=120)
        parsed = answer.json()
        choice = parsed["choices"][0] if answer.status_code == 200 else {}
        return Answer(
            answer.status_code,
            choice.get("token_ids") or [],
            choice.get("finish_reason", ""),
            answer.headers.get("x-moontide-epoch"),
            answer.headers.get("x-moontide-version"),
            parsed,
            answer.headers.get("x-moontide-last-epoch"),
        )

    def counters(self, rank: int | None = None) -> dict[str, float]:
        """Prompt tokens that hit: ``local`` and ``external``; of all data-parallel ranks or of one."""
        text = _get(f"{self.inference}/metrics", timeout=PATIENCE).text
        names = {"local": "prefix_cache_hits_total", "external": "external_prefix_cache_hits_total"}
        found = {}
        for key, name in names.items():
            engine = "" if rank is None else f'engine="{rank}"'
            values = re.findall(rf"^vllm:{name}\{{{engine}[^}}]*\}} (\S+)$", text, re.MULTILINE)
            assert values, f"no metric {name}"
            found[key] = sum(map(float, values))
        return found

    def hits(self, prompt: str, rank: int | None = None) -> tuple[Answer, dict[str, float]]:
        """A completion and the hits that it had. Nothing else may run."""
        before = self.counters(rank)
        answer = self.complete(prompt, rank=rank)
        after = self.counters(rank)
        return answer, {key: after[key] - before[key] for key in before}

    def pids(self, title: str) -> list[int]:
        """Processes of this replica with this title (EngineCore, Worker)."""
        out = subprocess.run(
            ["ps", "-o", "pid=,args=", "-g", str(self.process.popen.pid)], capture_output=True, text=True, check=True
        ).stdout
        return [int(line.split()[0]) for line in out.splitlines() if title in line]


@dataclass
class Fleet:
    """The replicas and their store, with an epoch that only goes up."""

    folder: Path
    models: dict[str, Path]
    master: Master
    replicas: tuple[Replica, ...]
    pool: ThreadPoolExecutor
    epoch: int = 0

    def next_epoch(self) -> int:
        """An epoch that was never used."""
        self.epoch += 1
        return self.epoch

    def wipe(self) -> None:
        """Remove all keys behind the engines' back."""
        done = run_store_script(f"print(store.remove_by_regex('^{NAMESPACE}@', True))", self.master.port)
        assert int(done) >= 0

    def load_weights(self, replica: Replica, which: str) -> None:
        """What a trainer does: swap the weights, then say which they are."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.models[which])}}
        assert replica.post("/collective_rpc", body).status_code == 200
        assert replica.post("/update_weight_version", {"new_version": f"weights-{which}"}).status_code == 200

    def bump(self, weights: str = "a", wipe: bool = True, salted: bool = False) -> int:
        """A whole barrier on both replicas, from whatever state they are in. The new epoch.

        ``salted`` puts the epoch into the block hashes; without it they stay in the one they are in.
        """
        more = {"salt": f"policy/{self.epoch + 1}"} if salted else {}
        epoch = self.next_epoch()
        for replica in self.replicas:
            replica.succeed("quiesce", epoch, mode="abort")
        for replica in self.replicas:
            replica.succeed("drain", epoch)
        for replica in self.replicas:
            if replica.status()["weightsVersion"] != f"weights-{weights}":
                self.load_weights(replica, weights)
            replica.succeed("reset", epoch)
        if wipe:
            self.wipe()
        for replica in self.replicas:
            replica.succeed("admit", epoch, version=f"v{epoch}", **more)
        for replica in self.replicas:
            replica.succeed("resume", epoch)
        return epoch

    def saved(self, replica: Replica, prompt: str) -> None:
        """Run a prompt and wait until its blocks are in the store."""
        before = len(self.master.keys())
        assert replica.complete(prompt).status == 200
        wait_for("puts", lambda: len(self.master.keys()) > before, PATIENCE)
        wait_for("puts to end", self.settled, PATIENCE)

    def settled(self) -> bool:
        """Whether no key comes or goes for a moment."""
        before = len(self.master.keys())
        time.sleep(0.5)
        return len(self.master.keys()) == before

    def background(self, work: Callable[..., Answer], *args: Any) -> Future[Answer]:
        """Run beside the test."""
        return self.pool.submit(work, *args)


def vllm_plugin(home: Path, module: Path) -> str:
    """Make a module with a ``register`` a vLLM plugin of the engines that have ``home`` on PYTHONPATH. Its name."""
    name = module.stem
    info = home / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(module, home)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return name


class LateSaves:
    """Holds back one rank's transfers in engines that have :attr:`environment`."""

    def __init__(self, folder: Path) -> None:
        home = folder / "plugin"
        self.plugin = vllm_plugin(home, Path(__file__).with_name("late_saves_of_one_rank.py"))
        self._file = folder / "hold.json"
        self.environment = {"PYTHONPATH": str(home), "TEST_LATE_SAVES_FILE": str(self._file)}

    def hold(self, rank: int, what: str = "save") -> None:
        """From now on each save (or ``load``) of this tensor-parallel rank waits."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"rank": rank, "hold": what}))
        new.replace(self._file)

    def release(self) -> None:
        """What waits goes on."""
        self._file.unlink(missing_ok=True)


_STORE_SCRIPT = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", {segment}, 16 << 20, "tcp", "", "127.0.0.1:{port}") == 0
{body}
sys.stdout.flush()
os._exit(0)
"""


def store_command(body: str, segment: int = 0, port: int = MASTER_PORT) -> list[str]:
    """Command that runs a few lines with a store client of its own."""
    return [sys.executable, "-c", _STORE_SCRIPT.format(segment=segment, port=port, body=body)]


def run_store_script(body: str, port: int = MASTER_PORT) -> str:
    """Output of a few lines with a store client of its own."""
    env = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    command = store_command(body, port=port)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1]
