"""A real API server of a bench's own, with a log of who asked it for what, and what a process costs meanwhile."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hack.cluster.settings import load
from tests.integration.conftest import Kubectl

ROOT = Path(__file__).resolve().parents[1]
Object = dict[str, Any]
POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts"]
  - level: None
"""
"""Requests of service accounts are logged when they are answered; those of the bench, which is the admin, are not."""
_THREADS = 8


class Client:
    """The API server with the administrator's rights; a connection a thread, kept open."""

    def __init__(self, name: str) -> None:
        settings = load(name)
        assert settings is not None
        pki, self._local = settings.pki_dir, threading.local()
        self.port = settings.ports.apiserver
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._pool = ThreadPoolExecutor(_THREADS)

    def __call__(self, method: str, path: str, body: object = None) -> Any:
        """The answer's body. RuntimeError with what it said when it is no success."""
        try:
            status, text = self._ask(method, path, body)
        except (OSError, http.client.HTTPException):
            # The API server ends connections that were idle.
            self._local.connection = None
            status, text = self._ask(method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {text.decode()[:1000]}")
        return json.loads(text)

    def _ask(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self._tls)
            self._local.connection = connection
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), {"content-type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def each(self, method: str, requests: Iterable[tuple[str, object]]) -> list[Any]:
        """One request for each path and body, eight at a time."""
        return list(self._pool.map(lambda one: self(method, *one), requests))


class Audit:
    """Reads the log of requests as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[Object]:
        """The events since the last call. A watch is one, when it begins."""
        with self._path.open("rb") as log:
            log.seek(self._at)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        return [each for each in events if (each["verb"] == "watch") == (each["stage"] == "ResponseStarted")]

    def count(self, user: str) -> collections.Counter[tuple[str, str, int]]:
        """Requests of one user since the last call, by verb, resource and status."""
        return collections.Counter(_what(each) for each in self.read() if each["user"]["username"] == user)


def _what(event: Object) -> tuple[str, str, int]:
    where = event.get("objectRef") or {}
    resource = "/".join(filter(None, (where.get("resource", event["requestURI"]), where.get("subresource", ""))))
    return event["verb"], resource, int((event.get("responseStatus") or {}).get("code", 0))


class Plane:
    """One API server with its etcd and nothing else."""

    def __init__(self, name: str, kubectl: Kubectl, tools: Path) -> None:
        self.name = name
        self.kubectl = kubectl
        self.tools = tools
        self.api = Client(name)
        settings = load(name)
        assert settings is not None
        self.audit = Audit(settings.audit_log)

    def pid(self, component: str) -> int:
        """Process of ``kube-apiserver`` or ``etcd``."""
        command = [sys.executable, "-m", "hack.cluster", "status", "--json", "--name", self.name]
        rows = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout)
        return next(int(each["pid"]) for each in rows if each["name"] == component)


@contextlib.contextmanager
def plane(name: str, folder: Path) -> Iterator[Plane]:
    """An API server; ended, with all that it kept, at the end."""
    base = [sys.executable, "-m", "hack.cluster"]
    (folder / "audit-policy.yaml").write_text(POLICY)
    up = [*base, "up", "--name", name, "--control-plane-only", "--quiet"]
    try:
        done = subprocess.run(
            [*up, "--audit-policy", str(folder / "audit-policy.yaml")], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"no API server: {done.stderr}")
        found = subprocess.run([*base, "bin-dir"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        tools = Path(found.stdout.strip().splitlines()[-1])
        yield Plane(name, Kubectl(tools / "kubectl", Path(done.stdout.strip().splitlines()[-1])), tools)
    finally:
        subprocess.run([*base, "down", "--name", name, "--quiet"], cwd=ROOT, check=True, timeout=120)


def cpu_seconds(pid: int) -> float:
    """Of user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int, peak: bool = False) -> float:
    """Of memory of a process, now or at most so far."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} says nothing of its memory")


class Connections:
    """Counts the TCP connections of a process to one port, as they come: looked at ten times a second."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self._port = f":{port:04X}"
        self._stop = threading.Event()
        self.seen: set[str] = set()
        self.most = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Count no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            with contextlib.suppress(OSError):
                now = self._now()
                self.seen |= now
                self.most = max(self.most, len(now))

    def _now(self) -> set[str]:
        mine = set()
        for name in os.listdir(f"/proc/{self._pid}/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(f"/proc/{self._pid}/fd/{name}"))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {row[1] for row in rows if row[2].endswith(self._port) and f"socket:[{row[9]}]" in mine}


def quantile(values: Sequence[float], part: float) -> float:
    """Of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
