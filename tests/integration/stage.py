"""Fleets of doubles in one namespace of a real API server: pods that answer, policies, and what happened to them."""

from __future__ import annotations

import base64
import http.client
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.component.certificates import Authority

API = "moontide.dev/v1alpha1"
ROOT = Path(__file__).resolve().parents[2]
PLURALS = {
    "KVCachePool": "kvcachepools",
    "PolicyVersion": "policyversions",
    "InferenceDeployment": "inferencedeployments",
}
CRDS = tuple(f"{plural}.moontide.dev" for plural in PLURALS.values())

RESOLVING = """
import runpy, socket
resolve = socket.getaddrinfo
def resolve_services(host, *arguments, **more):
    name = host.decode() if isinstance(host, bytes) else str(host)
    return resolve({services!r} if name.endswith(".svc") else host, *arguments, **more)
socket.getaddrinfo = resolve_services
runpy.run_module("moontide", run_name="__main__")
"""
"""The operator, with every Service at one address: no DNS runs here."""


class Api:
    """The API server through ``kubectl proxy``: milliseconds a request, where a kubectl takes a second."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, method: str, path: str, body: object = None, *, may_be_gone: bool = False) -> Any:
        """The answer's body; AssertionError with what it said when it is no success. None, where ``may_be_gone``, of
        what is not there any more."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": kind})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if may_be_gone and answer.status == 404:
            return None
        assert answer.status < 300, f"{method} {path}: {answer.status} {text.decode()}"
        return json.loads(text)


@contextmanager
def proxied(kubectl: Any) -> Iterator[Api]:
    """The API server, with the rights of ``kubectl``."""
    command = [str(kubectl.binary), f"--kubeconfig={kubectl.kubeconfig}", "proxy", "--port=0"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert proxy.stdout is not None
    try:
        yield Api(int(proxy.stdout.readline().rpartition(":")[2]))
    finally:
        proxy.kill()
        proxy.wait(60)
        proxy.stdout.close()


def address() -> str:
    """An address of the loopback net that nobody else is likely to use."""
    return f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"


class Stage:
    """The fleets of one namespace. The test is their kubelet; an operator must be there."""

    def __init__(self, api: Api, namespace: str, folder: Path, wait_for: Callable[..., Any]) -> None:
        self.api = api
        self.namespace = namespace
        self.folder = folder
        self.wait_for = wait_for
        self.services = address()
        """The address of every Service of the namespace."""
        self._tokens: dict[str, Path] = {}
        self._certificates: dict[str, Path] = {}
        self._journal = folder / "journal"
        self._journal.touch()
        command = [sys.executable, "-m", "tests.integration.fleet_double", str(self._journal)]
        with (folder / "doubles.log").open("wb") as log:
            self._doubles = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
            )

    def close(self) -> None:
        """End the doubles."""
        self._doubles.kill()
        self._doubles.communicate(timeout=60)

    def double(self, do: str, **order: object) -> Any:
        """Have the doubles do something; see ``fleet_double.Doubles``."""
        assert self._doubles.stdin is not None
        assert self._doubles.stdout is not None
        print(json.dumps({"do": do, **order}), file=self._doubles.stdin, flush=True)
        line = self._doubles.stdout.readline()
        assert line, (self.folder / "doubles.log").read_text()[-4000:]
        return json.loads(line)

    def journal(self) -> list[dict[str, Any]]:
        """What happened to the doubles, in order."""
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    # Objects ------------------------------------------------------------------------------------------------------

    def path(self, kind: str, name: str = "") -> str:
        return f"/apis/{API}/namespaces/{self.namespace}/{PLURALS[kind]}{name and '/'}{name}"

    def create(self, kind: str, name: str, spec: dict[str, Any]) -> Any:
        body = {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}
        return self.api("POST", self.path(kind), body)

    def pool(self, name: str = "kv", **spec: Any) -> None:
        """A pool, and its wiper."""
        self.create("KVCachePool", name, spec)
        secret = ((spec.get("master") or {}).get("wiperTlsSecretRef") or {}).get("name")
        folder = str(self._certificates[secret]) if secret else ""
        self.double("wiper", host=self.services, token=str(self._token(f"{name}-wiper")), folder=folder)

    def certificate(self, secret: str, authority: Authority, host: str) -> None:
        """A Secret of type kubernetes.io/tls, which pods that name it are given."""
        folder = self._certificates[secret] = self.folder / secret
        folder.mkdir()
        authority.issue(folder, host)
        data = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ("tls.crt", "tls.key")}
        body = {"metadata": {"name": secret}, "type": "kubernetes.io/tls", "data": data}
        self.api("POST", f"/api/v1/namespaces/{self.namespace}/secrets", body)

    def fleet(self, name: str, fences: bool, version: str = "1", replicas: int = 2, **policy: Any) -> None:
        """A fleet that follows a policy of the same name; returns when all its pods answer."""
        self.create("PolicyVersion", name, {"version": version, **policy})
        model = {"source": "pvc://weights/a", "servedName": "tiny", "version": version}
        spec = {
            "model": model,
            "replicas": replicas,
            "kvCache": {"poolRef": {"name": "kv"}},
            "policyRef": {"name": name},
        }
        uid = self.create("InferenceDeployment", name, spec)["metadata"]["uid"]
        self._tokens[name] = self._token(f"{name}-admin")
        self.wait_for("pods", lambda: len(self.start_pods(name, uid, fences, version)) == replicas, 180)

    def remove(self, name: str) -> None:
        """Delete the fleet and its policy."""
        for kind in ("InferenceDeployment", "PolicyVersion"):
            self.api("DELETE", self.path(kind, name))
        for engine in self.double("states"):
            if engine.startswith(f"{name}-"):
                self.double("kill", name=engine)

    def _token(self, secret: str) -> Path:
        path = f"/api/v1/namespaces/{self.namespace}/secrets"

        def look() -> str | None:
            found = [each for each in self.api("GET", path)["items"] if each["metadata"]["name"] == secret]
            return found[0]["data"]["token"] if found else None

        file = self.folder / f"{secret}.token"
        file.write_bytes(base64.b64decode(self.wait_for(f"Secret {secret}", look, 180)))
        return file

    def pods(self, fleet: str) -> list[dict[str, Any]]:
        selector = f"labelSelector=moontide.dev/deployment%3D{fleet}"
        found: list[dict[str, Any]] = self.api("GET", f"/api/v1/namespaces/{self.namespace}/pods?{selector}")["items"]
        return found

    def start_pods(self, fleet: str, uid: str, fences: bool, weights: str) -> set[str]:
        """Be the kubelet: start an engine for each pod that has none. Returns the names of the pods."""
        pods = [pod for pod in self.pods(fleet) if "deletionTimestamp" not in pod["metadata"]]
        for pod in pods:
            name = pod["metadata"]["name"]
            if pod["status"].get("podIP"):
                continue
            host, token = address(), str(self._tokens[fleet])
            mounted = next((each for each in pod["spec"]["volumes"] if each["name"] == "admin-tls"), None)
            folder = str(self._certificates[mounted["secret"]["secretName"]]) if mounted is not None else ""
            more = {"namespace": uid, "fences": fences, "weights": weights, "folder": folder}
            self.double("engine", name=name, host=host, token=token, **more)
            running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
            engine = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
            engine |= {"state": running, "containerID": f"x://{name}"}
            status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "containerStatuses": [engine]}
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
            self.api("PATCH", path, {"status": status}, may_be_gone=True)
        return {pod["metadata"]["name"] for pod in pods}

    def call_ready(self, names: set[str]) -> None:
        """Be the kubelet: say of these pods that they are ready, as far as they are still there."""
        for name in names:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
            self.api("PATCH", path, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, may_be_gone=True)

    # Policies -----------------------------------------------------------------------------------------------------

    def policy(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api("GET", self.path("PolicyVersion", name))
        return found

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.policy(name).get("status") or {}
        return found

    def ask(self, name: str, **spec: object) -> int:
        """Change the policy's spec. Returns its generation."""
        body = {"spec": spec}
        generation: int = self.api("PATCH", self.path("PolicyVersion", name), body)["metadata"]["generation"]
        return generation

    def current(self, name: str) -> tuple[str, int] | None:
        """Version and epoch, if the policy's spec as it is now is said to be current."""
        body = self.policy(name)
        status = body.get("status") or {}
        said = {each["type"]: each for each in status.get("conditions") or ()}
        current = said.get("Current") or {}
        if current.get("status") != "True" or status.get("observedGeneration") != body["metadata"]["generation"]:
            return None
        if current.get("observedGeneration") != body["metadata"]["generation"]:
            return None
        return status["version"], status["epoch"]

    def wait_current(self, name: str, version: object, seconds: float = 120.0) -> int:
        """Wait until it is current at ``version``, and old keys are removed. Returns the epoch."""

        def look() -> int:
            found, update = self.current(name), self.status(name).get("lastUpdate") or {}
            done = found is not None and found[0] == str(version) and "resumedAt" in update and "wipedAt" in update
            return found[1] if found is not None and done else 0

        epoch: int = self.wait_for(f"{name} is current at {version}", look, seconds)
        return epoch


class Judge:
    """Reads the doubles' journal as it grows, and knows what must never be in it."""

    def __init__(self, plain: bool, strategy: str) -> None:
        self.plain = plain
        self.strategy = strategy
        self.open: dict[str, int] = {}
        """The epoch in which an engine is open."""
        self.term = 0
        self.commanded = 0
        """The highest epoch that any engine has heard of."""
        self._clean: dict[str, bool] = {}
        self._wipes: list[int] = []
        """Keys that each wipe removed, since an engine was last open."""

    def read(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if "step" in event:
                self._command(event)
            elif "state" in event:
                self._gate(event["engine"], event)
            elif event.get("removal") == "wipe":
                self._wipes.append(event["removed"])
            assert "stale" not in event, f"read KV of another epoch: {event}"

    def _command(self, event: dict[str, Any]) -> None:
        assert event["term"] >= self.term, f"a command of a leader that is over: {event}"
        self.term, self.commanded = event["term"], max(self.commanded, event["epoch"])
        if event["step"] == "reset" and event["outcome"] == "Done":
            self._clean[event["engine"]] = True

    def _gate(self, engine: str, event: dict[str, Any]) -> None:
        if event["state"] != "open":
            if self.open.pop(engine, None) is not None:
                self._wipes.clear()
            return
        epoch = event["epoch"]
        if self.strategy == "Barrier":
            others = {name: other for name, other in self.open.items() if name != engine}
            assert set(others.values()) <= {epoch}, f"{engine} opens in {epoch} while others are open in {others}"
        if self.plain:
            assert event["salt"] == ""
            assert self._wipes[-1:] == [0], f"{engine} opens in {epoch} before a verified wipe: {self._wipes}"
            assert len(self._wipes) >= 2
            assert self._clean.get(engine, True), f"{engine} opens in {epoch} without a reset"
        else:
            assert event["salt"].endswith(f"/{epoch}"), f"{engine} opens in {epoch} with salt {event['salt']}"
        self._clean[engine] = False
        self.open[engine] = epoch
