"""One policy, fleets in other namespaces: real API server and operator; engines are the real gate over an idle one."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.trainer import policy_update

ADMIN_PORT = 8001
DOUBLE = Path(__file__).parent / "engine_double.py"
API = "moontide.dev/v1alpha1"
PATIENCE = 60
"""Seconds for an answer that comes at once where a processor is free."""


class Team:
    """A namespace with a fleet of one, whose engine answers."""

    def __init__(self, kubectl: Any, wait_for: Callable[..., Any], namespace: str, folder: Path) -> None:
        self.kubectl = kubectl
        self.wait_for = wait_for
        self.namespace = namespace
        self.folder = folder
        self.address = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
        self.engine: subprocess.Popen[bytes] | None = None

    def follow(self, policy: str, namespace: str | None) -> None:
        ref = {"name": policy, **({"namespace": namespace} if namespace else {})}
        model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
        metadata = {"name": "chat", "namespace": self.namespace}
        body = {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata}
        self.kubectl.apply({**body, "spec": {"model": model, "policyRef": ref}})

    def start(self) -> None:
        """No kubelet runs here, so the test starts the engine and says what the kubelet would say."""
        look = self.kubectl
        secret = self.wait_for("its token", lambda: look.get("secret", "chat-admin", self.namespace))
        token = self.folder / f"token-{self.namespace}"
        token.write_bytes(base64.b64decode(secret["data"]["token"]))
        with (self.folder / f"{self.namespace}.log").open("wb") as log:
            command = [sys.executable, str(DOUBLE), self.address, str(ADMIN_PORT), str(token)]
            self.engine = subprocess.Popen(command, stdout=log, stderr=log)
        pods = ("get", "pods", "-n", self.namespace, "-o", "name")
        pod = self.wait_for("its pod", lambda: look(*pods).split())[0]
        running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
        engine = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": running}
        status = {"phase": "Running", "podIP": self.address, "containerStatuses": [{**engine, "containerID": "x://1"}]}
        look("patch", pod, "-n", self.namespace, "--subresource=status", "-p", json.dumps({"status": status}))
        self.wait_for("its engine answers", lambda: self.says()[1] >= 0)

    def says(self) -> tuple[str, int]:
        """State and epoch of its engine."""
        token = (self.folder / f"token-{self.namespace}").read_text()
        url = f"http://{self.address}:{ADMIN_PORT}/moontide/v1/status"
        try:
            headers = {"authorization": f"Bearer {token}"}
            answer = httpx.get(url, headers=headers, trust_env=False, timeout=PATIENCE).json()
        except httpx.HTTPError:
            return "", -1
        return answer["state"], answer["epoch"]

    def condition(self) -> tuple[str, str, str]:
        found = (self.kubectl.must_get("ifd", "chat", self.namespace).get("status") or {}).get("conditions") or ()
        return next(
            ((c["status"], c["reason"], c["message"]) for c in found if c["type"] == "PolicyCurrent"), ("", "", "")
        )


@pytest.fixture(name="teams")
def _teams(
    kubectl: Any, operator: Any, namespace: str, wait_for: Callable[..., Any], tmp_path: Path
) -> Iterator[tuple[Team, Team]]:
    """The policy's namespace and another one."""
    other = f"t-{uuid.uuid4().hex[:10]}"
    kubectl.make_namespace(other)
    teams = Team(kubectl, wait_for, namespace, tmp_path), Team(kubectl, wait_for, other, tmp_path)
    yield teams
    for team in teams:
        if team.engine is not None:
            team.engine.kill()
            team.engine.wait()
    kubectl("delete", "namespace", other, "--wait=false")


def _policy(team: Team, **spec: Any) -> None:
    metadata = {"name": "policy", "namespace": team.namespace}
    body = {"apiVersion": API, "kind": "PolicyVersion", "metadata": metadata}
    team.kubectl.apply({**body, "spec": {"version": 7, "weights": "Unchecked", **spec}})


def _status(team: Team) -> dict[str, Any]:
    return dict(team.kubectl.must_get("polv", "policy", team.namespace).get("status") or {})


@pytest.mark.parametrize("more", [[], ["*"], [f"other-{number}" for number in range(10)]], ids=["one", "all", "many"])
def test_fleets_of_another_namespace_follow_as_far_as_they_are_allowed(
    teams: tuple[Team, Team], wait_for: Any, more: list[str]
) -> None:
    home, far = teams
    allowed = more if "*" in more else [far.namespace, *more]
    _policy(home)
    home.follow("policy", None)
    far.follow("policy", home.namespace)
    for team in teams:
        team.start()
    wait_for("its own fleet serves", lambda: home.says() == ("open", 1))
    wait_for("a refusal", lambda: far.condition()[1] == "PolicyNotAllowed")
    assert f"add {far.namespace} to its spec.allowedNamespaces" in far.condition()[2]
    assert far.says() == ("closed", 0)
    # What tells people of a look is written beside what is done.
    wait_for("one counts", lambda: _status(home)["replicas"]["total"] == 1)

    # Nobody touches the other fleet: the policy's change wakes it.
    _policy(home, allowedNamespaces=allowed)
    wait_for("the other serves", lambda: far.says() == ("open", 1))
    wait_for("it says so", lambda: far.condition()[1] == "Current")
    wait_for("both count", lambda: _status(home)["replicas"]["summary"] == "2/2")
    assert {each["name"] for each in _status(home)["members"]} == {"chat", f"{far.namespace}/chat"}

    options = {"namespace": home.namespace, "kubeconfig": home.kubectl.kubeconfig}
    with policy_update("policy", 8, prepare_timeout=60, timeout=60, **options) as update:
        assert {engine.fleet for engine in update.engines} == {"chat", f"{far.namespace}/chat"}
        for engine in update.engines:
            url = f"{engine.url}/moontide/v1/status"
            found = httpx.get(url, headers=engine.headers, trust_env=False, timeout=PATIENCE)
            assert found.json()["state"] == "paused"
    assert update.replicas == "2/2"
    assert {team.says() for team in teams} == {("open", update.epoch)}

    before = far.says()
    _policy(home, version=9)
    wait_for("its own fleet goes on", lambda: home.says()[1] > update.epoch and home.says()[0] == "open")
    wait_for("a refusal", lambda: far.condition()[1] == "PolicyNotAllowed")
    assert far.says() == before
    assert _status(home)["replicas"]["total"] == 1


@pytest.mark.usefixtures("released_lease")
def test_an_operator_of_one_namespace_follows_no_policy_elsewhere(
    kubectl: Any, operator: Any, operators_of: Callable[..., Any], namespace: str, wait_for: Any, tmp_path: Path
) -> None:
    operator.stop()
    try:
        team = Team(kubectl, wait_for, namespace, tmp_path)
        team.follow("policy", "elsewhere")
        running = operators_of(namespace)("alone", {})
        running.start()
        wait_for("a refusal", lambda: team.condition()[1] == "PolicyOutOfReach")
        assert f"serves namespace {namespace} only" in team.condition()[2]
        assert "forbidden" not in running.log().lower()
        running.stop()
    finally:
        operator.start()
