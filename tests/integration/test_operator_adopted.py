"""Engines that others launched, adopted by URL: a real API server and operator, and real gates over idle engines."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.trainer import policy_update

DOUBLE = Path(__file__).parent / "engine_double.py"
API = "moontide.dev/v1alpha1"


class Launcher:
    """Somebody who launches engines, and lists them in an InferenceDeployment."""

    def __init__(self, kubectl: Any, wait_for: Callable[..., Any], namespace: str, folder: Path) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.folder = folder
        self.wait_for = wait_for
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._policy(7)
        self.list()
        secret = wait_for("a token", lambda: kubectl.get("secret", "chat-admin", namespace))
        self.token = base64.b64decode(secret["data"]["token"]).decode()
        (folder / "token").write_text(self.token)
        self.uid = kubectl.must_get("ifd", "chat", namespace)["metadata"]["uid"]

    def _policy(self, version: int, **spec: Any) -> None:
        metadata = {"name": "policy", "namespace": self.namespace}
        body = {"apiVersion": API, "kind": "PolicyVersion", "metadata": metadata}
        self.kubectl.apply({**body, "spec": {"version": version, "weights": "Unchecked", **spec}})

    bump = _policy

    def list(self, *urls: str, gone: tuple[str, ...] = ()) -> None:
        """Say which engines there are."""
        spec = {"policyRef": {"name": "policy"}, "endpoints": {"urls": list(urls), "gone": list(gone)}}
        metadata = {"name": "chat", "namespace": self.namespace}
        self.kubectl.apply({"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": spec})

    def url(self) -> str:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def launch(self, url: str, boot: str, key_namespace: str | None = None) -> None:
        environ = {**os.environ, "DOUBLE_BOOT_ID": boot, "MOONTIDE_KEY_NAMESPACE": key_namespace or self.uid}
        host, _, port = url.removeprefix("http://").partition(":")
        with (self.folder / f"{boot}.log").open("wb") as log:
            command = [sys.executable, str(DOUBLE), host, port, str(self.folder / "token")]
            self.processes[url] = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def kill(self, url: str) -> None:
        process = self.processes.pop(url)
        process.kill()
        process.wait()

    def says(self, url: str) -> dict[str, Any]:
        try:
            headers = {"authorization": f"Bearer {self.token}"}
            found: dict[str, Any] = httpx.get(
                f"{url}/moontide/v1/status", headers=headers, trust_env=False, timeout=60
            ).json()
        except httpx.HTTPError:
            return {"state": "", "epoch": -1, "reason": ""}
        return found

    def serves(self, url: str, epoch: int) -> bool:
        found = self.says(url)
        return (found["state"], found["epoch"]) == ("open", epoch)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.kubectl.must_get("ifd", "chat", self.namespace).get("status") or {})

    @property
    def marks(self) -> dict[str, str]:
        return dict(self.status.get("adopted") or {})

    def condition(self, type: str) -> tuple[str, str, str]:
        found = self.status.get("conditions") or ()
        return next(((c["status"], c["reason"], c["message"]) for c in found if c["type"] == type), ("", "", ""))


@pytest.fixture(name="launcher")
def _launcher(
    kubectl: Any, operator: Any, namespace: str, wait_for: Callable[..., Any], tmp_path: Path
) -> Iterator[Launcher]:
    made = Launcher(kubectl, wait_for, namespace, tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_engines_are_adopted_updated_and_let_go(launcher: Launcher, kubectl: Any, wait_for: Any) -> None:
    wait_for("it says what is missing", lambda: launcher.condition("Progressing")[1] == "NoEndpoints")
    first, second = launcher.url(), launcher.url()
    launcher.launch(first, "a1")
    launcher.launch(second, "b1")
    launcher.list(first, second)
    wait_for("both serve", lambda: launcher.serves(first, 1) and launcher.serves(second, 1))
    wait_for("both count", lambda: launcher.status.get("current") == "2/2")
    assert launcher.marks == {"a1": first, "b1": second}
    assert [kubectl.get(kind, "chat", launcher.namespace) for kind in ("deployment", "service")] == [None, None]

    options = {"namespace": launcher.namespace, "kubeconfig": kubectl.kubeconfig}
    with policy_update("policy", 8, prepare_timeout=60, timeout=60, **options) as update:
        assert {engine.url for engine in update.engines} == {first, second}
        assert {launcher.says(engine.url)["state"] for engine in update.engines} == {"paused"}
    assert update.replicas == "2/2"
    assert launcher.serves(first, update.epoch)
    assert launcher.serves(second, update.epoch)

    launcher.list(first)
    wait_for("the other is closed", lambda: launcher.says(second)["reason"] == "RemovedFromEndpoints")
    wait_for("and forgotten", lambda: launcher.marks == {"a1": first})
    assert launcher.serves(first, update.epoch)
    wait_for("it does not count", lambda: launcher.status.get("current") == "1/1")


def test_a_silent_engine_holds_a_change_up_until_it_is_known_to_be_gone(launcher: Launcher, wait_for: Any) -> None:
    first, second = launcher.url(), launcher.url()
    launcher.launch(first, "a1")
    launcher.launch(second, "b1")
    launcher.list(first, second)
    wait_for("both serve", lambda: launcher.serves(first, 1) and launcher.serves(second, 1))
    os.kill(launcher.processes[second].pid, signal.SIGSTOP)
    launcher.list(first)
    wait_for("it asks somebody to decide", lambda: f"{second} (boot id b1)" in launcher.condition("Progressing")[2])
    launcher.bump(8, replicaTimeoutSeconds=100)
    wait_for("it waits", lambda: launcher.says(first)["state"] == "paused")
    launcher.kill(second)
    launcher.list(first, gone=("b1",))
    wait_for("it goes on", lambda: launcher.serves(first, 2))
    wait_for("forgotten", lambda: launcher.marks == {"a1": first})

    # An engine that restarts behind its URL is another one.
    launcher.kill(first)
    launcher.launch(first, "a2")
    wait_for("the new one serves", lambda: launcher.serves(first, 2))
    wait_for("it has taken the place", lambda: launcher.marks == {"a2": first})


def test_an_engine_of_another_fleet_is_left_alone(launcher: Launcher, wait_for: Any) -> None:
    url = launcher.url()
    launcher.launch(url, "a1", key_namespace="another")
    launcher.list(url)

    def refused() -> Any:
        return next((each for each in launcher.status.get("closed", []) if each["reason"] == "WrongKeyNamespace"), None)

    assert launcher.uid in wait_for("a reason", refused)["message"]
    assert launcher.says(url)["state"] == "closed"
    assert launcher.marks == {}


def test_marks_of_several_writers_are_all_kept(launcher: Launcher, kubectl: Any, operator: Any, wait_for: Any) -> None:
    """The status of the fleet is written all the time; marks are merged in, one key each."""
    operator.stop()
    try:
        for key in ("x", "y"):
            patch = json.dumps({"status": {"adopted": {key: "http://127.0.0.1:1"}}})
            where = ("ifd", "chat", "-n", launcher.namespace, "--subresource=status", "--type=merge")
            kubectl("patch", *where, "--field-manager=moontide", "-p", patch)
    finally:
        operator.start()
    wait_for("a look after the start", lambda: launcher.condition("Progressing")[1] == "Closing")
    assert launcher.marks == {"x": "http://127.0.0.1:1", "y": "http://127.0.0.1:1"}
    launcher.list(gone=("x",))
    wait_for("one is gone", lambda: launcher.marks == {"y": "http://127.0.0.1:1"})


def test_the_admin_token_is_rotated_when_asked_and_not_before_the_engine_takes_the_new_one(
    launcher: Launcher, kubectl: Any, wait_for: Any
) -> None:
    url = launcher.url()
    launcher.launch(url, "a1")
    launcher.list(url)
    wait_for("it serves", lambda: launcher.serves(url, 1))
    kubectl("annotate", "ifd", "chat", "-n", launcher.namespace, "moontide.dev/rotate-token=november")

    def tokens() -> list[str]:
        secret = kubectl.must_get("secret", "chat-admin", launcher.namespace)
        return base64.b64decode(secret["data"]["token"]).decode().split()

    def state(key: str) -> Any:
        return (launcher.status.get("adminToken") or {}).get(key)

    old, new = wait_for("both", lambda: found if len(found := tokens()) == 2 else None)
    assert old == launcher.token
    # Nobody has brought the engine the new one: it keeps taking commands with the old one.
    wait_for("it says who waits", lambda: "(Http401)" in (state("message") or ""))
    launcher.bump(8)
    wait_for("a change", lambda: launcher.serves(url, 2))
    assert state("phase") == "Introducing"

    (launcher.folder / "token").write_text(f"{new}\n{old}\n")
    wait_for("the new one alone", lambda: tokens() == [new])
    wait_for("it says who still takes the old one", lambda: "(takes it)" in (state("message") or ""))
    (launcher.folder / "token").write_text(new)
    wait_for("done", lambda: state("phase") == "Current")
    assert state("rotation").startswith("november@")
    launcher.token = new
    assert launcher.serves(url, 2)
    launcher.bump(9)
    wait_for("a change with the new one", lambda: launcher.serves(url, 3))

    def told() -> set[str]:
        events = json.loads(kubectl("get", "events", "-n", launcher.namespace, "-o", "json"))["items"]
        return {each["reason"] for each in events}

    wait_for("Events", lambda: {"TokenRotating", "TokenRotated"} <= told())
