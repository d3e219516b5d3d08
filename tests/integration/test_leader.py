"""A leader and a standby against a real API server: takeovers, and a leader that was frozen past its Lease.

Two operators share a namespace and its Lease; their engine is the real gate and admin plane over an idle engine. The
files of this folder run in alphabetical order: the session's own operator, which serves all namespaces, starts later.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

API = "moontide.dev/v1alpha1"
SECONDS = 30
"""A leader that is not scheduled for half of it keeps it."""
LEASE = "moontide-operator"
EXIT_LOST = 3
ADMIN_PORT = 8001
DOUBLE = Path(__file__).parent / "engine_double.py"

FREEZING = """
import asyncio.selector_events, os, pathlib, runpy, signal
armed = pathlib.Path({armed!r})
transport = asyncio.selector_events._SelectorSocketTransport
write = transport.write
def freezing(self, data):
    # Of a command all was sent but its last byte, which ends a JSON object: the engine waits for it.
    if bytes(data[:1]) == b"}}" and armed.exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    return write(self, data)
transport.write = freezing
runpy.run_module("moontide", run_name="__main__")
"""
"""The operator, which stops itself (SIGSTOP) before the last byte of a command once ``armed`` exists."""


class Cast:
    """The operators of one namespace, and their engine."""

    def __init__(
        self, kubectl: Any, wait_for: Callable[..., Any], namespace: str, folder: Path, make: Callable[..., Any]
    ) -> None:
        self.kubectl = kubectl
        self.wait_for = wait_for
        self.namespace = namespace
        self.folder = folder
        self._make = make
        self._double: subprocess.Popen[bytes] | None = None

    def operator(self, name: str, code: str = "") -> Any:
        """Start an operator; returns when it is ready."""
        running = self._make(name, {"MOONTIDE_POD_NAME": name, "MOONTIDE_LEASE_SECONDS": str(SECONDS)}, code)
        running.start()
        return running

    def leads(self, operator: Any) -> bool:
        url = f"http://127.0.0.1:{operator.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                said = answer.read().decode()
        except TimeoutError:
            return False
        found = re.search(r"^moontide_leader (\S+)$", said, re.MULTILINE)
        assert found is not None
        return float(found[1]) == 1

    def wait_leads(self, operator: Any, seconds: float = 4 * SECONDS) -> float:
        """Wait until it leads. Returns how long that took."""
        began = time.monotonic()
        self.wait_for("it leads", lambda: self.leads(operator), seconds)
        return time.monotonic() - began

    def lease(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.must_get("lease", LEASE, self.namespace)
        return found

    def fleet(self, **spec: Any) -> None:
        """Apply a fleet of one that follows no pool."""
        model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
        metadata = {"name": "chat", "namespace": self.namespace}
        body = {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata}
        self.kubectl.apply({**body, "spec": {"model": model, **spec}})

    def engine(self) -> None:
        """A fleet of one under a policy, whose pod answers; returns when it serves in epoch 1."""
        metadata = {"name": "policy", "namespace": self.namespace}
        policy = {"apiVersion": API, "kind": "PolicyVersion", "metadata": metadata}
        self.kubectl.apply({**policy, "spec": {"version": 7, "weights": "Unchecked"}})
        self.fleet(policyRef={"name": "policy"})
        look = self.kubectl
        secret = self.wait_for("its token", lambda: look.get("secret", "chat-admin", self.namespace))
        token = self.folder / "token"
        token.write_bytes(base64.b64decode(secret["data"]["token"]))
        address = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        command = [sys.executable, str(DOUBLE), address, str(ADMIN_PORT), str(token)]
        with (self.folder / "engine.jsonl").open("wb") as record, (self.folder / "engine.log").open("wb") as log:
            self._double = subprocess.Popen(command, stdout=record, stderr=log)
        pods = ("get", "pods", "-n", self.namespace, "-o", "name")
        pod = self.wait_for("its pod", lambda: look(*pods).split())[0]
        # No kubelet runs here, so the test says what it would say.
        running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
        engine = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": running}
        status = {"phase": "Running", "podIP": address, "containerStatuses": [{**engine, "containerID": "x://1"}]}
        look("patch", pod, "-n", self.namespace, "--subresource=status", "-p", json.dumps({"status": status}))
        self.wait_for("it serves", lambda: [each["step"] for each in self.commands()][-1:] == ["admit"])
        self.wait_current(1)

    def bump(self, version: int) -> None:
        patch = json.dumps({"spec": {"version": version}})
        self.kubectl("patch", "polv", "policy", "-n", self.namespace, "--type=merge", "-p", patch)

    def policy(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.must_get("polv", "policy", self.namespace)
        return found

    def wait_current(self, epoch: int) -> None:
        def current() -> bool:
            status = self.policy().get("status") or {}
            said = {each["type"]: each["status"] for each in status.get("conditions") or ()}
            return status.get("epoch") == epoch and said.get("Current") == "True"

        self.wait_for(f"epoch {epoch} is current", current, 60)

    def commands(self) -> list[dict[str, Any]]:
        """What reached the gate so far."""
        return [json.loads(line) for line in (self.folder / "engine.jsonl").read_text().splitlines()]

    def close(self) -> None:
        if self._double is not None:
            self._double.kill()
            self._double.wait(60)


@pytest.fixture(name="cast")
def _cast(
    kubectl: Any, wait_for: Any, namespace: str, tmp_path: Path, operators_of: Callable[[str], Any]
) -> Iterator[Cast]:
    made = Cast(kubectl, wait_for, namespace, tmp_path, operators_of(namespace))
    yield made
    made.close()


def state(pid: int) -> str:
    """The kernel's letter for what the process does; T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_sigterm_hands_over_at_once(cast: Cast, wait_for: Any) -> None:
    first = cast.operator("first")
    waited = cast.wait_leads(first)
    second = cast.operator("second")
    assert first.http(first.liveness_port, "/healthz") == second.http(second.liveness_port, "/healthz") == 200
    assert not cast.leads(second)
    cast.fleet()
    wait_for("the leader acts", lambda: cast.kubectl.get("deployment", "chat", cast.namespace))
    before = cast.lease()["spec"]
    assert before["holderIdentity"].startswith("first_")
    assert before["leaseTransitions"] == 1
    began = time.monotonic()
    first.kill(signal.SIGTERM)
    cast.wait_leads(second, SECONDS)
    took = time.monotonic() - began
    assert first.stop() == 0
    after = cast.lease()["spec"]
    assert after["holderIdentity"].startswith("second_")
    assert after["leaseTransitions"] == 2
    cast.kubectl("scale", "ifd", "chat", "-n", cast.namespace, "--replicas=3")
    wait_for(
        "the standby acts",
        lambda: cast.kubectl.must_get("deployment", "chat", cast.namespace)["spec"]["replicas"] == 3,
    )
    assert second.http(second.metrics_port, "/readyz") == 200
    print(f"first leader {waited:.1f} s after it was ready; SIGTERM to the next leader {took:.1f} s")
    assert second.stop() == 0
    assert cast.lease()["spec"].get("holderIdentity", "") == ""


@pytest.mark.usefixtures("released_lease")
def test_sigterm_on_standby_is_no_event(cast: Cast) -> None:
    first = cast.operator("first")
    cast.wait_leads(first)
    before = cast.lease()["spec"]["leaseTransitions"]
    assert cast.operator("second").stop() == 0
    assert cast.leads(first)
    assert cast.lease()["spec"]["leaseTransitions"] == before


@pytest.mark.usefixtures("released_lease")
def test_sigkill_is_followed_within_the_lease(cast: Cast, wait_for: Any) -> None:
    first = cast.operator("first")
    cast.wait_leads(first)
    second = cast.operator("second")
    began = time.monotonic()
    first.stop(signal.SIGKILL)
    cast.wait_leads(second)
    took = time.monotonic() - began
    print(f"SIGKILL to the next leader {took:.1f} s of a Lease of {SECONDS} s")
    assert took < 2 * SECONDS, "the Lease, and what a busy machine adds"
    cast.fleet()
    wait_for("the standby acts", lambda: cast.kubectl.get("deployment", "chat", cast.namespace))


@pytest.mark.usefixtures("released_lease")
@pytest.mark.parametrize("where", ["anywhere", "in the middle of a command"])
def test_a_leader_frozen_past_its_lease_changes_nothing(cast: Cast, wait_for: Any, where: str) -> None:
    armed = cast.folder / "armed"
    first = cast.operator("first", FREEZING.format(armed=str(armed)))
    cast.wait_leads(first)
    second = cast.operator("second")
    cast.engine()
    old = cast.commands()[-1]["term"]
    assert {each["term"] for each in cast.commands()} == {old}
    if where == "anywhere":
        first.kill(signal.SIGSTOP)
        cast.bump(8)
    else:
        armed.touch()
        cast.bump(8)
        wait_for("it froze itself", lambda: state(first.pid) == "T")
        assert [each for each in cast.commands() if each["epoch"] == 2] == []
        assert cast.policy()["status"]["epoch"] == 2
    cast.wait_leads(second, 4 * SECONDS)
    cast.wait_current(2)
    cast.bump(9)
    cast.wait_current(3)
    time.sleep(1)
    version, seen = cast.policy()["metadata"]["resourceVersion"], cast.commands()
    assert {each["term"] for each in seen if each["epoch"] > 1} == {old + 1}
    began = time.monotonic()
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(60) == EXIT_LOST
    print(f"ended {time.monotonic() - began:.2f} s after it was continued")
    time.sleep(1)
    late = cast.commands()[len(seen) :]
    if where == "anywhere":
        assert late == []
    else:
        assert late == [{"step": "quiesce", "term": old, "epoch": 2, "outcome": "Fenced"}]
    assert cast.policy()["metadata"]["resourceVersion"] == version
    assert cast.lease()["spec"]["holderIdentity"].startswith("second_")
    cast.bump(10)
    cast.wait_current(4)


@pytest.mark.usefixtures("released_lease")
def test_a_lease_deleted_under_the_leader(cast: Cast) -> None:
    first = cast.operator("first")
    cast.wait_leads(first)
    second = cast.operator("second")
    cast.engine()
    old = cast.commands()[-1]["term"]
    began = time.monotonic()
    cast.kubectl("delete", "lease", LEASE, "-n", cast.namespace)
    assert first.wait(SECONDS) == EXIT_LOST
    ended = time.monotonic() - began
    assert not cast.leads(second), "nobody may lead before the old leader's deadline"
    cast.wait_leads(second, 4 * SECONDS)
    assert cast.lease()["spec"]["leaseTransitions"] == 1
    cast.bump(8)
    cast.wait_current(2)
    new = cast.commands()[-1]
    assert (new["step"], new["outcome"]) == ("admit", "Done")
    assert new["term"] > old
    print(f"the leader ended {ended:.1f} s after its Lease was deleted; term {old} was followed by {new['term']}")
