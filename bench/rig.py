"""A fleet on one machine without a node: a real API server and etcd, two operators that elect a leader, a real Mooncake
master with its wiper, and real vLLM engines on the CPU that the operator adopts by URL. Each can be ended and frozen.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "component" / "engine"))

import enginekit as kit  # noqa: E402
import httpx  # noqa: E402

from hack.demo.cold import Cold, References  # noqa: E402
from hack.demo.fleet import MAX_TOKENS, Replica  # noqa: E402
from hack.demo.kube import is_current  # noqa: E402
from hack.demo.story import side_of  # noqa: E402
from hack.setup.steps import engine_python, models_dir  # noqa: E402
from moontide import naming  # noqa: E402
from tests.integration.conftest import (  # noqa: E402
    Kubectl,
    chart_rights,
    released_lease,
    service_account_kubeconfig,
)
from tests.integration.stage import RESOLVING, address  # noqa: E402

_OFFSET = int(os.environ.get("RIG_PORTS", "0"))
"""Of all ports, for two rigs on one machine: 0 or 100."""
MASTER, METRICS = 18390 + _OFFSET, 18391 + _OFFSET
FIRST = 241 + _OFFSET
"""Number of the first engine; its ports follow from it, and are none of the tests'."""
NAMESPACE = "soak"
LEASE_SECONDS = 12
MODEL = "tiny"
Object = dict[str, Any]


class Child:
    """A process that is started again when it ends, as a container is; in a process group of its own."""

    def __init__(
        self, name: str, command: Callable[[], Sequence[str]], env: Callable[[], Mapping[str, str]], log: Path
    ):
        self.name = name
        self._command = command
        self._env = env
        self._log = log
        self._process: kit.Process | None = None
        self.starts = 0

    def start(self) -> None:
        """Start it. Does not wait for anything."""
        self.starts += 1
        self._process = kit.spawn(self._command(), self._env(), self._log)

    @property
    def pid(self) -> int:
        """Of its main process."""
        assert self._process is not None
        return self._process.popen.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.popen.poll() is None

    def signal(self, number: int) -> None:
        """Signal the group; one that has ended hears nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end of its main process."""
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self._process.popen.wait()


class _Reach:
    """Where the ports of an engine are."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports

    def url(self, pod: Object, port: int) -> str:
        """Base URL of a port."""
        return f"http://127.0.0.1:{self._ports[port]}"


class Rig:
    """All of it. Use :func:`rigged`."""

    def __init__(self, name: str, kubectl: Kubectl, tools: Path, folder: Path, engines: int) -> None:
        self.name = name
        self.kubectl = kubectl
        self.folder = folder
        self.target = 1
        """The version whose weights the trainer pushes to engines that are not open."""
        self._stop = threading.Event()
        self._services = address()
        kubectl("apply", "-f", str(ROOT / "crds"))
        kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(ROOT / "crds"))
        kubectl.make_namespace(NAMESPACE)
        kubectl.apply(released_lease(NAMESPACE))
        kubectl("apply", "-f", "-", stdin=chart_rights(tools, f"watchNamespace={NAMESPACE}", namespace=NAMESPACE))
        config = service_account_kubeconfig(kubectl, folder, NAMESPACE)
        self.operators = [self._operator(f"operator-{number}", config, number) for number in (1, 2)]
        for each in self.operators:
            each.start()
        self._objects()
        self.uid: str = kubectl.must_get("ifd", "chat", NAMESPACE)["metadata"]["uid"]
        self.token = self._token("chat-admin", folder / "token")
        self._token("kv-wiper", folder / "wiper-token")
        kit.store_config(folder, MASTER)
        (folder / "token").write_text(self.token)
        binary = str(engine_python().with_name("mooncake_master"))
        flags = (f"-rpc_port={MASTER}", f"-metrics_port={METRICS}", "-client_ttl=15")
        self.master = Child("master", lambda: [binary, *flags], dict, folder / "master.log")
        wiper = {
            "MOONTIDE_WIPER_HOST": self._services,
            "MOONTIDE_WIPER_TOKEN_FILE": str(folder / "wiper-token"),
            "MOONTIDE_MASTER_ADDRESS": f"127.0.0.1:{MASTER}",
            "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{METRICS}",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_RPC_TIMEOUT_MS": "2000",
        }
        command = [str(engine_python()), "-m", "moontide_engine.wiper"]
        self.wiper = Child("wiper", lambda: command, lambda: wiper, folder / "wiper.log")
        self.engines = [self._engine(FIRST + number) for number in range(engines)]
        self.replicas = [self._replica(FIRST + number) for number in range(engines)]
        self.children = [*self.operators, self.master, self.wiper, *self.engines]
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._trainer = threading.Thread(target=self._train, daemon=True)

    # Parts --------------------------------------------------------------------------------------------------------

    def _operator(self, name: str, config: Path, number: int) -> Child:
        environment = {
            "KUBECONFIG": str(config),
            "MOONTIDE_NAMESPACE": NAMESPACE,
            "MOONTIDE_WATCH_NAMESPACE": NAMESPACE,
            "MOONTIDE_LIVENESS_PORT": str(MASTER + 1 + 2 * number),
            "MOONTIDE_METRICS_PORT": str(MASTER + 2 + 2 * number),
            "MOONTIDE_RESYNC_SECONDS": "4",
            "MOONTIDE_ENGINE_IMAGE": "engine.test/moontide:1",
            "MOONTIDE_POD_NAME": name,
            "MOONTIDE_LEASE_SECONDS": str(LEASE_SECONDS),
        }
        code = RESOLVING.format(services=self._services)
        return Child(name, lambda: [sys.executable, "-c", code], lambda: environment, self.folder / f"{name}.log")

    def _objects(self) -> None:
        base = {"apiVersion": "moontide.dev/v1alpha1"}
        self.kubectl.apply(
            {**base, "kind": "KVCachePool", "metadata": {"name": "kv", "namespace": NAMESPACE}, "spec": {}},
            {
                **base,
                "kind": "PolicyVersion",
                "metadata": {"name": "policy", "namespace": NAMESPACE},
                "spec": {"version": 1, "replicaTimeoutSeconds": 5, "prepareDeadlineSeconds": 120},
            },
            {
                **base,
                "kind": "InferenceDeployment",
                "metadata": {"name": "chat", "namespace": NAMESPACE},
                "spec": {
                    "policyRef": {"name": "policy"},
                    "kvCache": {"poolRef": {"name": "kv"}},
                    "endpoints": {"urls": []},
                },
            },
        )

    def _token(self, secret: str, file: Path) -> str:
        found = wait(f"Secret {secret}", lambda: self.kubectl.get("secret", secret, NAMESPACE), 90)
        token = base64.b64decode(found["data"]["token"]).decode()
        file.write_text(token)
        return token

    def _engine(self, number: int) -> Child:
        def command() -> list[str]:
            made = kit.engine_command(models_dir() / side_of(self.target), number, self.uid)
            return [str(engine_python()), *made[1:], "--enable-prompt-tokens-details"]

        def environment() -> dict[str, str]:
            made = kit.engine_environment(self.folder, number)
            return made | {"MOONTIDE_KEY_NAMESPACE": self.uid, "MOONTIDE_WEIGHTS_VERSION": str(self.target)}

        return Child(f"engine-{number}", command, environment, self.folder / f"engine{number}.log")

    def _replica(self, number: int) -> Replica:
        ports = {naming.INFERENCE_PORT: 18100 + number, naming.ADMIN_PORT: 18110 + number}
        pod = {"metadata": {"name": f"engine-{number}", "uid": f"engine-{number}"}}
        return Replica(pod, _Reach(ports), self.token)  # type: ignore[arg-type]

    # Life ---------------------------------------------------------------------------------------------------------

    def open(self, seconds: float = 400.0) -> None:
        """Start the store and the engines, list them, and wait until all serve."""
        for each in (self.master, self.wiper, *self.engines):
            each.start()
        self._keeper.start()
        for replica in self.replicas:
            wait(f"{replica.name} answers", lambda each=replica: self.says(each), seconds)
        urls = json.dumps({"spec": {"endpoints": {"urls": [each.admin for each in self.replicas]}}})
        self.kubectl("patch", "ifd", "chat", "-n", NAMESPACE, "--type=merge", "-p", urls)
        self._trainer.start()
        self.until_serving(120)

    def close(self) -> None:
        """End everything but the API server."""
        self._stop.set()
        for each in (self._keeper, self._trainer):
            if each.is_alive():
                each.join(30)
        for child in self.children:
            child.kill()

    def _keep(self) -> None:
        """Be the kubelet: what has ended is started again."""
        while not self._stop.wait(0.5):
            for child in self.children:
                if not child.runs:
                    child.start()

    def _train(self) -> None:
        """Be the trainer: an engine that is not open and has other weights than the target's is given them."""
        while not self._stop.wait(1.0):
            for replica in self.replicas:
                said = self.says(replica)
                if said and said["state"] != "open" and said["weightsVersion"] != str(self.target):
                    with contextlib.suppress(httpx.HTTPError, OSError, RuntimeError):
                        self.push(replica)

    def push(self, replica: Replica) -> None:
        """Give it the target's weights."""
        replica.push_weights(str(models_dir() / side_of(self.target)), str(self.target), timeout=20)

    def says(self, replica: Replica) -> Object | None:
        """An engine's status; None if it does not answer."""
        try:
            return replica.look(timeout=2.0)
        except (httpx.HTTPError, OSError):
            return None

    def component(self, name: str, do: str, *more: str) -> None:
        """``start`` or ``stop`` the API server or etcd."""
        command = [sys.executable, "-m", "hack.cluster", do, name, "--name", self.name, "--quiet", *more]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)

    def pid_of(self, name: str) -> int:
        """Process of the API server or etcd."""
        command = [sys.executable, "-m", "hack.cluster", "status", "--json", "--name", self.name]
        rows = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout)
        return next(int(each["pid"]) for each in rows if each["name"] == name)

    # What is so ---------------------------------------------------------------------------------------------------

    def policy(self) -> Object:
        """The PolicyVersion; empty while the API server does not answer."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError, ValueError):
            return self.kubectl.get("polv", "policy", NAMESPACE) or {}
        return {}

    def patch(self, **spec: object) -> None:
        """Change the policy's spec, however often the API server refuses."""
        body = json.dumps({"spec": spec})

        def done() -> bool:
            where = ("polv", "policy", "-n", NAMESPACE, "--type=merge", "--request-timeout=10s")
            with contextlib.suppress(subprocess.SubprocessError):
                return self.kubectl.run("patch", *where, "-p", body, check=False).returncode == 0
            return False

        wait(f"the API server to take {body}", done, 180)

    def current(self, version: int, wiped: bool = True) -> Object | None:
        """The PolicyVersion, if it says that it serves this version, and if wanted that old keys are removed."""
        found = self.policy()
        status = found.get("status") or {}
        seen = status.get("observedGeneration") == (found.get("metadata") or {}).get("generation")
        done = not wiped or (status.get("lastUpdate") or {}).get("wipedAt")
        return found if found and seen and done and is_current(found, str(version)) else None

    def until_serving(self, seconds: float, wiped: bool = True) -> None:
        """Wait until the target is current, every engine is open in its epoch and, if wanted, old keys are removed."""

        def all_serve() -> bool:
            found = self.current(self.target, wiped) if self.target > 1 else self.policy()
            epoch = ((found or {}).get("status") or {}).get("epoch")
            said = [self.says(each) for each in self.replicas]
            return bool(epoch) and all(each and (each["state"], each["epoch"]) == ("open", epoch) for each in said)

        wait(f"all engines to serve version {self.target}", all_serve, seconds)

    def keys(self) -> int:
        """Keys of the fleet in the store, by the master's own listing."""
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/get_all_keys", timeout=30) as answer:
            return sum(line.startswith(f"{self.uid}@".encode()) for line in answer)

    def leader(self) -> Child:
        """The operator that leads. NotInTime while there is none."""

        def leads(number: int) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{MASTER + 2 + 2 * number}/metrics", timeout=3) as answer:
                    return b"\nmoontide_leader 1.0" in answer.read()
            except OSError:
                return False

        def look() -> Child | None:
            return next((self.operators[number - 1] for number in (1, 2) if leads(number)), None)

        found: Child = wait("a leader", look, 90)
        return found


def wait(what: str, look: Callable[[], Any], seconds: float) -> Any:
    """The first truthy result; TimeoutError after ``seconds``."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)
    return found


def resident(pid: int) -> float:
    """MiB of one process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def rigged(folder: Path, engines: int = 3) -> Iterator[Rig]:
    """A rig whose API server ends with it."""
    name = f"rig-{os.getpid()}"
    base = [sys.executable, "-m", "hack.cluster"]
    tools = Path(
        subprocess.run([*base, "bin-dir"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
    )
    up = [*base, "up", "--name", name, "--control-plane-only", "--controller-manager", "--quiet"]
    rig: Rig | None = None
    try:
        done = subprocess.run(up, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        rig = Rig(name, Kubectl(tools / "kubectl", Path(done.stdout.split()[-1])), tools, folder, engines)
        rig.open()
        yield rig
    finally:
        if rig is not None:
            rig.close()
        subprocess.run([*base, "down", "--name", name, "--quiet"], cwd=ROOT, check=True, timeout=180)


def cold(folder: Path, prompts: Sequence[str]) -> References:
    """Answers of engines without cache, store and plugin, for both sets of weights."""
    request = folder / "request.json"
    settings = {"max_model_len": 2048, "block_size": 32, "dtype": "float32", "enforce_eager": True}
    models = {side_of(version): str(models_dir() / side_of(version)) for version in (1, 2)}
    request.write_text(
        json.dumps({"models": models, "prompts": list(prompts), "tokens": MAX_TOKENS, "settings": settings})
    )
    script = (ROOT / "hack" / "demo" / "cold_engine.py").read_text().replace("/cold/request.json", str(request))
    file = folder / "cold_engine.py"
    file.write_text(script)
    environment = kit.engine_environment(folder, FIRST) | {"VLLM_PLUGINS": "", "MOONTIDE_ENABLED": "0"}
    done = subprocess.run(
        [str(engine_python()), str(file)], env=kit.whole(environment), capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, list[Cold]] = {name: [] for name in models}
    for line in done.stdout.splitlines():
        if line.startswith("COLD {"):
            row = json.loads(line.removeprefix("COLD "))
            found[row["model"]].append(Cold(tuple(row["tokens"]), tuple(row["logprobs"])))
    return {name: tuple(each) for name, each in found.items()}
