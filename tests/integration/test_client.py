"""The trainer's package and `kubectl moontide` against a real API server, with a status that the test writes.

No operator runs yet: the files of this folder run in alphabetical order, and it would write the status, too.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moontide.trainer import AccessError, ApiError, PolicyNotFound, PreparationLost, PrepareFailed, policy_update
from moontide.trainer.access import find
from moontide.trainer.cli import DONE, FAILED, LATE, main
from moontide.trainer.kube import Api
from moontide.trainer.steps import Target, change, read

ROOT = Path(__file__).resolve().parents[2]
RBAC = ROOT / "examples" / "trainers" / "rbac.yaml"
Account = Callable[[str], Path]
TIME = "2026-11-28T08:00:00.000000Z"


class Hand:
    """A policy, and whoever writes its status in the operator's place."""

    def __init__(self, kubectl: Any, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.epoch = 1
        metadata = {"name": "policy", "namespace": namespace}
        kubectl.apply(
            {
                "apiVersion": "moontide.dev/v1alpha1",
                "kind": "PolicyVersion",
                "metadata": metadata,
                "spec": {"version": 42},
            }
        )
        kubectl.apply(secret(namespace, "tiny-admin"), secret(namespace, "other"))
        self.current("42")

    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.must_get("polv", "policy", self.namespace)
        return found

    def edit(self, spec: dict[str, Any]) -> None:
        patch = ("--type=merge", "-p", json.dumps({"spec": spec}))
        self.kubectl("patch", "polv", "policy", "-n", self.namespace, *patch)

    def write(
        self, kind: str, reason: str, *, prepared: bool = False, generation: int | None = None, **more: Any
    ) -> None:
        seen = self.get()["metadata"]["generation"] if generation is None else generation
        conditions = [condition("Current", kind == "Current", reason, seen)]
        conditions += [condition("Prepared", prepared, reason, seen)] if more.get("preparation") else []
        status = {"observedGeneration": seen, "epoch": self.epoch, "conditions": conditions, **more}
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        self.kubectl("patch", "polv", "policy", "-n", self.namespace, *patch)

    def current(self, version: str) -> None:
        counts = {"total": 2, "current": 2, "closed": 0, "summary": "2/2"}
        self.write("Current", "Current", version=version, replicas=counts, preparation=None)

    def prepared(
        self, version: str, *, generation: int | None = None, outcome: str = "", token_secret: str = "tiny-admin"
    ) -> None:
        fleets = [{"name": "tiny", "tokenSecret": token_secret, "addresses": ["10.0.0.1:8001", "10.0.0.2:8001"]}]
        preparation = {"version": version, "epoch": self.epoch, "startedAt": TIME, "preparedAt": TIME, "fleets": fleets}
        ready, reason = not outcome, outcome or "Prepared"
        preparation["outcome"] = outcome
        self.write("", reason, prepared=ready, generation=generation, preparation=preparation)

    def later(self, *steps: Callable[[], object]) -> threading.Thread:
        """Carry out each step once the spec has changed since the step before."""

        def run() -> None:
            generation = before
            for step in steps:
                ends = time.monotonic() + 60
                while (now := self.get()["metadata"]["generation"]) == generation and time.monotonic() < ends:
                    time.sleep(0.05)
                generation = now
                step()

        before = self.get()["metadata"]["generation"]
        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def main(self, *arguments: str) -> int:
        return main([*arguments, "-n", self.namespace, "--kubeconfig", str(self.kubectl.kubeconfig)])


def condition(kind: str, holds: bool, reason: str, generation: int) -> dict[str, Any]:
    status = {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": "by hand"}
    return {**status, "lastTransitionTime": "2026-11-28T08:00:00Z", "observedGeneration": generation}


def secret(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "t0ken"}}


@pytest.fixture(name="hand")
def _hand(kubectl: Any, namespace: str) -> Hand:
    return Hand(kubectl, namespace)


@pytest.fixture(name="options")
def _options(hand: Hand) -> dict[str, Any]:
    return {"namespace": hand.namespace, "kubeconfig": hand.kubectl.kubeconfig, "prepare_timeout": 60, "timeout": 60}


@pytest.fixture(name="account")
def _account(kubectl: Any, namespace: str, tmp_path: Path) -> Account:
    """Makes a kubeconfig of a service account of the namespace."""

    def make(name: str) -> Path:
        config = yaml.safe_load(kubectl.kubeconfig.read_text())
        for user in config["users"]:
            user["user"] = {"token": kubectl("create", "token", name, "-n", namespace).strip()}
        path = tmp_path / name
        path.write_text(yaml.safe_dump(config))
        return path

    return make


@pytest.fixture(name="trainer")
def _trainer(kubectl: Any, namespace: str, account: Account) -> Path:
    """A kubeconfig of a service account with the rights of examples/trainers/rbac.yaml."""
    kubectl("apply", "-f", "-", stdin=RBAC.read_text().replace("moontide-demo", namespace))
    return account("trainer")


@pytest.fixture(name="threads", autouse=True)
def _threads() -> Iterator[list[threading.Thread]]:
    """Ended before the test is."""
    started: list[threading.Thread] = []
    yield started
    for each in started:
        each.join(90)


def test_prepare_push_commit(
    hand: Hand, options: dict[str, Any], trainer: Path, threads: list[threading.Thread]
) -> None:
    hand.epoch = 2
    threads.append(hand.later(lambda: hand.prepared("43"), lambda: hand.current("43")))
    # With the rights of the example, and no more.
    with policy_update("policy", 43, **{**options, "kubeconfig": trainer}) as update:
        spec = hand.get()["spec"]
        assert (spec["version"], spec["preparing"]) == (42, 43)
        assert update.engines == (("tiny", "10.0.0.1:8001", "t0ken"), ("tiny", "10.0.0.2:8001", "t0ken"))
        assert update.epoch == 2
        hand.epoch = 3
    spec = hand.get()["spec"]
    assert spec["version"] == 43
    assert "preparing" not in spec
    assert (update.epoch, update.replicas) == (3, "2/2")
    with policy_update("policy", "43", **options) as update:
        assert update.already_current


def test_a_status_of_an_older_spec_does_not_count(
    hand: Hand, options: dict[str, Any], threads: list[threading.Thread]
) -> None:
    at: list[float] = []

    def stale_first() -> None:
        hand.prepared("43", generation=1)
        time.sleep(1.5)
        at.append(time.monotonic())
        hand.prepared("43")

    threads.append(hand.later(stale_first))
    with policy_update("policy", 43, wait=False, **options):
        assert at
        assert time.monotonic() >= at[0]


def test_an_exception_aborts(hand: Hand, options: dict[str, Any], threads: list[threading.Thread]) -> None:
    threads.append(hand.later(lambda: hand.prepared("43")))
    with pytest.raises(ZeroDivisionError), policy_update("policy", 43, **options):
        _ = 1 / 0
    spec = hand.get()["spec"]
    assert spec["version"] == 42
    assert "preparing" not in spec


def test_an_expired_preparation_is_not_committed(
    hand: Hand, options: dict[str, Any], threads: list[threading.Thread]
) -> None:
    threads.append(hand.later(lambda: hand.prepared("43")))

    def late() -> None:
        with policy_update("policy", 43, **options):
            hand.prepared("43", outcome="Expired")

    with pytest.raises(PreparationLost, match=r"not committed within 600 s"):
        late()
    assert hand.get()["spec"]["version"] == 42


def test_a_commit_does_not_write_over_what_changed_meanwhile(hand: Hand, options: dict[str, Any]) -> None:
    target = Target(hand.namespace, "policy")
    until = time.monotonic() + 30
    with Api(find(options["kubeconfig"])) as api:
        seen = api.run(read(target, until))
        hand.prepared("43")
        assert api.run(change(target, {"version": 43}, until, seen=seen)) is None
        assert hand.get()["spec"]["version"] == 42
        seen = api.run(read(target, until))
        assert api.run(change(target, {"version": 43}, until, seen=seen)) is not None
    assert hand.get()["spec"]["version"] == 43


def test_what_the_schema_refuses_is_said(hand: Hand, options: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="refuses to patch PolicyVersion") as raised:
        with policy_update("policy", 10**30, **options):
            raise AssertionError
    assert raised.value.status in (400, 422)
    assert "preparing" not in hand.get()["spec"]


def test_missing_rights_are_said(hand: Hand, options: dict[str, Any], account: Account) -> None:
    with pytest.raises(ApiError, match=r"cannot get resource .* allow the trainer to get it") as raised:
        with policy_update("policy", 43, **{**options, "kubeconfig": account("default")}):
            raise AssertionError
    assert raised.value.status == 403


def test_the_token_of_another_fleet_may_not_be_read(
    hand: Hand, options: dict[str, Any], trainer: Path, threads: list[threading.Thread]
) -> None:
    threads.append(hand.later(lambda: hand.prepared("43", token_secret="other")))
    with pytest.raises(ApiError, match="allow the trainer to get Secret other"):
        with policy_update("policy", 43, **{**options, "kubeconfig": trainer}):
            raise AssertionError
    assert "preparing" not in hand.get()["spec"]


def test_a_secret_that_is_not_there(hand: Hand, options: dict[str, Any], threads: list[threading.Thread]) -> None:
    hand.kubectl("delete", "secret", "tiny-admin", "-n", hand.namespace)
    threads.append(hand.later(lambda: hand.prepared("43")))
    with pytest.raises(ApiError, match="cannot be read from Secret"), policy_update("policy", 43, **options):
        raise AssertionError
    assert "preparing" not in hand.get()["spec"]


def test_not_found(hand: Hand, options: dict[str, Any]) -> None:
    with pytest.raises(PolicyNotFound, match="there is no PolicyVersion"), policy_update("other", 43, **options):
        raise AssertionError


def test_another_preparation_is_left_alone(hand: Hand, options: dict[str, Any]) -> None:
    hand.edit({"preparing": "step-7"})
    with pytest.raises(PrepareFailed, match="version step-7"), policy_update("policy", 43, **options):
        raise AssertionError
    assert hand.get()["spec"]["preparing"] == "step-7"


def test_a_pods_service_account(hand: Hand, trainer: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(trainer.read_text())
    server = config["clusters"][0]["cluster"]["server"]
    host, port = server.removeprefix("https://").rsplit(":", 1)
    folder = tmp_path / "sa"
    folder.mkdir()
    (folder / "token").write_text(config["users"][0]["user"]["token"])
    (folder / "namespace").write_text(hand.namespace)
    cluster = config["clusters"][0]["cluster"]
    data = cluster.get("certificate-authority-data")
    authority = base64.b64decode(data) if data else Path(cluster["certificate-authority"]).read_bytes()
    (folder / "ca.crt").write_bytes(authority)
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "HOME": str(tmp_path)}
    access = find(environ=environ, service_account=folder)
    assert main(["status", "policy"], access=access) == DONE
    (folder / "token").write_text("nonsense")
    assert main(["status", "policy"], access=access) == FAILED


def test_a_server_that_is_not_to_be_trusted(hand: Hand, options: dict[str, Any], tmp_path: Path) -> None:
    config = yaml.safe_load(hand.kubectl.kubeconfig.read_text())
    for each in config["clusters"]:
        each["cluster"] = {"server": each["cluster"]["server"]}
    path = tmp_path / "without-authority"
    path.write_text(yaml.safe_dump(config))
    began = time.monotonic()
    with pytest.raises(AccessError, match="is not to be trusted"):
        with policy_update("policy", 43, **{**options, "kubeconfig": path}):
            raise AssertionError
    assert time.monotonic() - began < 30
    config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    path.write_text(yaml.safe_dump(config))
    assert main(["status", "policy", "-n", hand.namespace, "--kubeconfig", str(path)]) == DONE


def test_the_commands(hand: Hand, capsys: pytest.CaptureFixture[str], threads: list[threading.Thread]) -> None:
    assert hand.main("prepare", "policy", "43") == DONE
    assert hand.main("wait", "policy", "--for=prepared", "--timeout=5") == LATE
    assert hand.main("commit", "policy") == FAILED
    hand.epoch = 2
    hand.prepared("43")
    assert hand.main("prepare", "policy", "43", "--wait") == DONE
    assert hand.get()["spec"]["preparing"] == 43
    hand.epoch = 3
    threads.append(hand.later(lambda: hand.current("43")))
    assert hand.main("commit", "policy", "--wait", "--timeout=1m") == DONE
    assert "version 43 is current in epoch 3, 2/2 replicas" in capsys.readouterr().out
    threads.append(hand.later(lambda: hand.current("43")))
    assert hand.main("reset", "policy", "--wait") == DONE
    assert hand.get()["spec"]["resetNonce"]
    assert hand.main("bump", "policy", "step-44") == DONE
    assert hand.main("wait", "policy", "--timeout=5s") == LATE
    assert "has not looked at generation" in capsys.readouterr().err
    assert hand.main("prepare", "policy", "45") == DONE
    assert hand.main("abort", "policy") == DONE
    spec = hand.get()["spec"]
    assert spec["version"] == "step-44"
    assert "preparing" not in spec


def test_kubectl_finds_the_plugin(hand: Hand) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(hand.kubectl.binary), "moontide", "status", "policy", "-n", hand.namespace]
    environ["KUBECONFIG"] = str(hand.kubectl.kubeconfig)
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    heading, row = done.stdout.splitlines()[:2]
    assert heading.split()[:4] == ["POLICY", "VERSION", "EPOCH", "STATE"]
    assert row.split()[:4] == [f"{hand.namespace}/policy", "42", "1", "Current"]
    assert row.split()[4:6] == ["2/2", "-"]
    assert row.endswith("by hand")
