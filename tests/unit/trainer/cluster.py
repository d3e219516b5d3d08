"""An API server with one PolicyVersion, over real HTTP, and the real planner as its operator, with faults."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from moontide.api.v1alpha1 import PolicyVersionSpec
from moontide.planning.model import Observed
from tests.unit.planning.world import World

PATH = "/apis/moontide.dev/v1alpha1/namespaces/rl/policyversions/policy"
SECRETS = "/api/v1/namespaces/rl/secrets/"


class TokenWorld(World):
    """Fleets that say where their token is."""

    def observe(self, recent: bool = False) -> Observed:
        seen = super().observe(recent)
        return replace(seen, fleets=tuple(replace(each, token_secret=f"{each.name}-admin") for each in seen.fleets))


@dataclass(frozen=True)
class Fault:
    """What the next request of a method gets. ``status`` 0: the connection is cut; ``late``: after it was done."""

    method: str
    status: int
    late: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    path: str = ""


class Cluster:
    """The server. ``on_get`` runs before each look at the policy; by default that is one turn of the operator."""

    def __init__(self, *, fences: bool = True, **spec: object) -> None:
        body = {"version": 1, **spec}
        self.world = TokenWorld(PolicyVersionSpec.model_validate(body), fences=fences)
        self.world.add_fleet("tiny", 2)
        self.world.run()
        self.body: dict[str, Any] = {
            "metadata": {"name": "policy", "namespace": "rl", "generation": 1},
            "spec": self.world.spec.to_wire() | body,
        }
        self.revision = 10
        self.secrets = {"tiny-admin": {"token": base64.b64encode(b"first\nsecond\n").decode()}}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.patches: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.on_get: Callable[[], None] = self.turn
        self.lock = threading.Lock()
        self._save()

    def _save(self) -> None:
        status = self.world.status.to_wire()
        if self.body.get("status") != status:
            self.body["status"] = status
            self._revise()

    def _revise(self) -> None:
        self.revision += 1
        self.body["metadata"]["resourceVersion"] = str(self.revision)

    def turn(self) -> None:
        """One turn of the operator, a tenth of a second long."""
        self.world.spec = PolicyVersionSpec.model_validate(self.body["spec"])
        self.world.generation = self.body["metadata"]["generation"]
        self.world.turn()
        self.world.pass_time(0.1)
        self._save()

    def lag(self, looks: int) -> None:
        """The operator is slow: so many looks at the policy find what was there before."""
        left = iter(range(looks))
        self.on_get = lambda: None if next(left, None) is not None else self.turn()

    def settle(self) -> None:
        """Turns until nothing is left to do."""
        for _ in range(20):
            self.turn()

    def edit(self, **spec: object) -> None:
        """Somebody else changes the spec."""
        wanted = {key: value for key, value in {**self.body["spec"], **spec}.items() if value is not None}
        if wanted != self.body["spec"]:
            self.body["spec"] = wanted
            self.body["metadata"]["generation"] += 1
            self._revise()

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.body["spec"])

    def answer(self, method: str, path: str, sent: bytes) -> tuple[int, dict[str, Any]]:
        if path.startswith(SECRETS):
            found = self.secrets.get(path.removeprefix(SECRETS))
            return (404, {"message": "not found"}) if found is None else (200, {"data": found})
        if path != PATH:
            name = path.rsplit("/", 1)[-1]
            return 404, {"message": f'policyversions "{name}" not found', "details": {"name": name}}
        if method == "PATCH":
            patch = json.loads(sent)
            self.patches.append(patch["spec"])
            expected = patch.get("metadata", {}).get("resourceVersion")
            if expected not in (None, self.body["metadata"]["resourceVersion"]):
                return 409, {"message": "the object has been modified"}
            self.edit(**patch["spec"])
        else:
            self.on_get()
        return 200, self.body

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        method, path = handler.command, handler.path
        sent = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        with self.lock:
            self.requests.append((method, path))
            self.tokens.add(handler.headers.get("authorization"))
            fault = next((f for f in self.faults if f.method == method and path.startswith(f.path)), None)
            if fault is not None:
                self.faults.remove(fault)
            status, body = (0, {}) if fault is not None and not fault.late else self.answer(method, path, sent)
            text = json.dumps(body if fault is None else fault.body).encode()
        if fault is not None and fault.status == 0:
            handler.close_connection = True
            return
        handler.send_response(status if fault is None else fault.status)
        for key, value in ({} if fault is None else fault.headers).items():
            handler.send_header(key, value)
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)


class Server:
    """A cluster's HTTP server, and a kubeconfig for it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_GET(self) -> None:
                cluster.handle(self)

            def do_PATCH(self) -> None:
                cluster.handle(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.kubeconfig = folder / "config"
        self.kubeconfig.write_text(json.dumps(kubeconfig(self.url)))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def kubeconfig(server: str, **user: object) -> dict[str, Any]:
    """A kubeconfig with one of everything."""
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
    }
