"""A real API server, and the operator as a process that has the rights its chart gives it and no more."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hack import chart
from hack.cluster.errors import ClusterError
from hack.cluster.reads import Reads
from tests.integration.stage import CRDS, Stage, proxied

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "moontide-system"
SERVICE_ACCOUNT = "moontide-operator"
RESYNC_SECONDS = 4
LEASE_SECONDS = 60
"""A machine that is busy for seconds is no subject, but where a test says so."""
PATIENCE = 60
"""Seconds for what comes at once where a processor is free."""


class Kubectl:
    """kubectl against one cluster. A command that fails raises AssertionError with what it said."""

    def __init__(self, binary: Path, kubeconfig: Path) -> None:
        self.binary = binary
        self.kubeconfig = kubeconfig
        self._reads = Reads([str(binary), f"--kubeconfig={kubeconfig}"])

    def run(self, *arguments: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.binary), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        return self.run(*arguments, stdin=stdin).stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects; the API server's refusal raises."""
        self("apply", "-f", "-", stdin="\n---\n".join(json.dumps(each) for each in objects))

    def make_namespace(self, name: str) -> None:
        """Create a namespace, with the claim whose weights the fleets of these tests name."""
        amount = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
        claim = {"metadata": {"name": "weights", "namespace": name}, "spec": amount}
        self.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim},
        )

    def refusal(self, body: dict[str, Any]) -> str:
        """What the API server says when it refuses to create ``body``; fails when it takes it."""
        said = self._reads.refusal(body)
        assert said, f"the API server takes {body}"
        return said

    def wait_served(self, *crds: str) -> None:
        """Wait until the kinds of these CRDs are served, and listed: whoever names a kind looks for it there."""
        self("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{each}" for each in crds))
        listed = ("api-resources", "-o", "name")
        wait_for("the kinds", lambda: set(crds) <= set(self.run(*listed, check=False).stdout.split()))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """The object, or None when there is none."""
        try:
            return self._reads.get(kind, name, namespace)
        except ClusterError as error:
            raise AssertionError(str(error)) from error

    def must_get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        """The object; fails when there is none."""
        found = self.get(kind, name, namespace)
        assert found is not None, f"no {kind} {namespace}/{name}"
        return found


def wait_for(what: str, look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first truthy result of ``look``; fails after ``seconds``, with the last thing it saw."""
    ends = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < ends, f"not within {seconds:.0f} s: {what} (last: {seen!r})"
        time.sleep(0.15)


def condition(body: dict[str, Any] | None, type: str) -> tuple[str, str]:
    """Status and reason of a condition; empty strings while it is absent."""
    for each in ((body or {}).get("status") or {}).get("conditions") or ():
        if each["type"] == type:
            return each["status"], each["reason"]
    return "", ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that need the session's operator come after those that need none: it serves every namespace, and two
    operators with different root keys would fight over the Secrets of one. What changes the cluster itself is last, by
    name: the last of it takes the CRDs away from under the session's operator."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    served = {item.path for item in ours if "operator" in getattr(item, "fixturenames", ())}
    places = [index for index, item in enumerate(items) if item.path.is_relative_to(here)]
    ours.sort(key=lambda item: (item.path.stem if item.path.stem.startswith("test_zz") else "", item.path in served))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session", name="tools")
def _tools() -> Path:
    """The folder of kubectl, helm and the control plane's programs."""
    command = [sys.executable, "-m", "hack.cluster", "bin-dir"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session", name="cluster_name")
def _cluster_name() -> str:
    return f"it-{os.getpid()}"


@pytest.fixture(scope="session", name="bare")
def _bare(tools: Path, cluster_name: str) -> Iterator[Kubectl]:
    """A control plane with controllers and no node, where nothing of Moontide is yet."""
    base = [sys.executable, "-m", "hack.cluster"]
    up = [*base, "up", "--name", cluster_name, "--control-plane-only", "--controller-manager", "--quiet"]
    try:
        done = subprocess.run(up, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"no API server, so nothing can be tested: {done.stderr}"
        yield Kubectl(tools / "kubectl", Path(done.stdout.strip().splitlines()[-1]))
    finally:
        subprocess.run([*base, "down", "--name", cluster_name, "--quiet"], cwd=ROOT, check=True, timeout=120)


@pytest.fixture(scope="session", name="kubectl")
def _kubectl(bare: Kubectl) -> Kubectl:
    """The cluster with the CRDs as `kubectl apply -f crds/` leaves them."""
    bare("apply", "-f", str(ROOT / "crds"))
    bare.wait_served(*CRDS)
    bare("create", "namespace", SYSTEM)
    return bare


@pytest.fixture(name="namespace")
def _namespace(kubectl: Kubectl) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    kubectl.make_namespace(name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Operator:
    """The operator as a process, with a service account's token."""

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        watch_namespace: str = "",
        own_namespace: str = SYSTEM,
        environ: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        """``code`` runs in place of ``python -m moontide``."""
        self._kubeconfig = kubeconfig
        self._log = log
        self._watch_namespace = watch_namespace
        self._own_namespace = own_namespace
        self._environ = dict(environ or {})
        self._command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "moontide"]
        self._process: subprocess.Popen[bytes] | None = None
        self.liveness_port = _free_port()
        self.metrics_port = _free_port()

    def start(self) -> None:
        """Start it, and wait until it says that it is ready: it leads, or is on standby."""
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        environ = {
            **keep,
            "KUBECONFIG": str(self._kubeconfig),
            "MOONTIDE_NAMESPACE": self._own_namespace,
            "MOONTIDE_WATCH_NAMESPACE": self._watch_namespace,
            "MOONTIDE_LIVENESS_PORT": str(self.liveness_port),
            "MOONTIDE_METRICS_PORT": str(self.metrics_port),
            "MOONTIDE_RESYNC_SECONDS": str(RESYNC_SECONDS),
            "MOONTIDE_LEASE_SECONDS": str(LEASE_SECONDS),
            "MOONTIDE_TOKEN_OVERLAP_SECONDS": "1",
            "MOONTIDE_ENGINE_IMAGE": "engine.test/moontide:1",
            **self._environ,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=environ, stdout=log, stderr=log, cwd=self._log.parent)
        wait_for("the operator is ready", lambda: self.http(self.metrics_port, "/readyz") == 200, 120)

    def http(self, port: int, path: str) -> int:
        """The status that the operator answers with; 0 while it does not answer."""
        assert self._process is not None
        assert self._process.poll() is None, f"the operator has ended:\n{self.log()[-4000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self, which: signal.Signals) -> None:
        """Send it a signal, and do not wait."""
        os.kill(self.pid, which)

    def wait(self, seconds: float) -> int:
        """Wait until it ends by itself. Returns its exit status."""
        assert self._process is not None
        status = self._process.wait(seconds)
        self._process = None
        return status

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(how)
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(PATIENCE)
            raise

    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()


def released_lease(namespace: str) -> dict[str, Any]:
    """The Lease of an operator that gave it up: the next one need not wait."""
    metadata = {"name": "moontide-operator", "namespace": namespace}
    spec = {"leaseDurationSeconds": 15, "leaseTransitions": 1}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def service_account_kubeconfig(kubectl: Kubectl, folder: Path, namespace: str = SYSTEM) -> Path:
    """A kubeconfig of the operator's service account."""
    token = kubectl("create", "token", SERVICE_ACCOUNT, "-n", namespace, "--duration=2h").strip()
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def chart_rights(tools: Path, *values: str, namespace: str = SYSTEM) -> str:
    """The chart's RBAC manifests."""
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide"), "-n", namespace]
    sets = [part for value in values for part in ("--set", value)]
    done = subprocess.run([*command, "-s", "templates/rbac.yaml", *sets], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session", name="operator")
def _operator(kubectl: Kubectl, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator, serving every namespace, with the chart's ClusterRole and the policy that narrows it."""
    folder = tmp_path_factory.mktemp("operator")
    kubectl("apply", "-f", "-", stdin=chart_rights(tools))
    kubectl.apply(*(each for each in chart.manifests({}) if each["metadata"]["name"].endswith("-reach")))
    kubectl.apply(released_lease(SYSTEM))
    # A machine that is busy for seconds is no subject here; and as a pod's container it need not wait after a kill.
    environ = {"MOONTIDE_LEASE_SECONDS": "120", "MOONTIDE_POD_NAME": "session", "MOONTIDE_POD_UID": "session"}
    running = Operator(service_account_kubeconfig(kubectl, folder), folder / "operator.log", environ=environ)
    running.start()
    yield running
    assert running.stop() == 0, running.log()[-4000:]
    lines = [json.loads(line) for line in running.log().splitlines()]
    assert [line for line in lines if "error" in line] == []


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(name="condition")
def _condition() -> Callable[..., tuple[str, str]]:
    return condition


@pytest.fixture(name="namespaced_operator")
def _namespaced_operator(kubectl: Kubectl, tools: Path, tmp_path: Path) -> Iterator[Callable[[str], Operator]]:
    """Starts an operator for one namespace, with the rights of the chart's Role."""
    started: list[Operator] = []

    def start(namespace: str) -> Operator:
        kubectl("apply", "-f", "-", stdin=chart_rights(tools, f"watchNamespace={namespace}"))
        running = Operator(service_account_kubeconfig(kubectl, tmp_path), tmp_path / "operator.log", namespace)
        started.append(running)
        running.start()
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture(scope="session", name="kit")
def _kit() -> SimpleNamespace:
    """What a module needs that has operators of its own for all of its tests."""
    return SimpleNamespace(
        Operator=Operator,
        free_port=_free_port,
        kubeconfig=service_account_kubeconfig,
        released_lease=released_lease,
        wait_for=wait_for,
    )


@pytest.fixture(name="released_lease")
def _released_lease(kubectl: Kubectl, namespace: str) -> None:
    """In the test's namespace, a Lease that was given up."""
    kubectl.apply(released_lease(namespace))


@pytest.fixture(name="operators_of")
def _operators_of(kubectl: Kubectl, tools: Path, tmp_path: Path) -> Iterator[Callable[[str], Callable[..., Operator]]]:
    """Makes operators that live in, and serve, one namespace, with the rights of the chart's Roles. Not started."""
    made: list[Operator] = []

    def of(namespace: str) -> Callable[..., Operator]:
        rights = chart_rights(tools, f"watchNamespace={namespace}", namespace=namespace)
        kubectl("apply", "-f", "-", stdin=rights)
        kubeconfig = service_account_kubeconfig(kubectl, tmp_path, namespace)

        def make(name: str, environ: Mapping[str, str], code: str = "") -> Operator:
            made.append(Operator(kubeconfig, tmp_path / f"{name}.log", namespace, namespace, environ, code))
            return made[-1]

        return make

    yield of
    for running in made:
        running.stop(signal.SIGKILL)


@pytest.fixture(scope="session", name="make_stage")
def _make_stage(
    kubectl: Kubectl, tools: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], AbstractContextManager[tuple[Stage, Callable[..., Operator]]]]]:
    """Makes stages, each in a namespace of its own, with a function that makes the operators that live there."""
    with proxied(kubectl) as api:

        @contextmanager
        def make_stage() -> Iterator[tuple[Stage, Callable[..., Operator]]]:
            folder = tmp_path_factory.mktemp("stage")
            namespace = f"t-{uuid.uuid4().hex[:10]}"
            kubectl.make_namespace(namespace)
            kubectl.apply(released_lease(namespace))
            rights = chart_rights(tools, f"watchNamespace={namespace}", namespace=namespace)
            kubectl("apply", "-f", "-", stdin=rights)
            kubeconfig = service_account_kubeconfig(kubectl, folder, namespace)
            made: list[Operator] = []

            def make(name: str, environ: Mapping[str, str], code: str = "") -> Operator:
                made.append(Operator(kubeconfig, folder / f"{name}.log", namespace, namespace, environ, code))
                return made[-1]

            stage = Stage(api, namespace, folder, wait_for)
            try:
                yield stage, make
            finally:
                stage.close()
                for running in made:
                    running.stop(signal.SIGKILL)
                kubectl("delete", "namespace", namespace, "--wait=false")

        yield make_stage
