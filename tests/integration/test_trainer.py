"""A trainer's update against a real API server and operator; the engine is the real gate over an idle engine."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moontide.trainer import Update, policy_update, policy_update_async
from moontide.trainer.cli import DONE, main

ADMIN_PORT = 8001
DOUBLE = Path(__file__).parent / "engine_double.py"
API = "moontide.dev/v1alpha1"


def look(update: Update) -> dict[str, Any]:
    """What the only engine says to whom the update gives address and token."""
    (engine,) = update.engines
    answer = httpx.get(f"{engine.url}/moontide/v1/status", headers=engine.headers, trust_env=False, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(name="options")
def _fleet(
    kubectl: Any, operator: Any, namespace: str, wait_for: Callable[..., Any], condition: Any, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """A fleet of one that serves version 7, and how a trainer gets at it."""
    meta = {"namespace": namespace}
    policy = {"apiVersion": API, "kind": "PolicyVersion", "metadata": {**meta, "name": "policy"}}
    fleet = {"apiVersion": API, "kind": "InferenceDeployment", "metadata": {**meta, "name": "chat"}}
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    kubectl.apply(
        {**policy, "spec": {"version": 7, "weights": "Unchecked"}},
        {**fleet, "spec": {"model": model, "policyRef": {"name": "policy"}}},
    )
    secret = wait_for("its token", lambda: kubectl.get("secret", "chat-admin", namespace))
    token = tmp_path / "token"
    token.write_bytes(base64.b64decode(secret["data"]["token"]))
    address = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
    with (tmp_path / "engine.log").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, str(DOUBLE), address, str(ADMIN_PORT), str(token)], stdout=log, stderr=log
        )
    pods = ("get", "pods", "-n", namespace, "-o", "name")
    pod = wait_for("its pod", lambda: kubectl(*pods).split())[0]
    # No kubelet runs here, so the test says what it would say.
    running = {"running": {"startedAt": "2026-11-28T08:00:00Z"}}
    container = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": running}
    status = {"phase": "Running", "podIP": address, "containerStatuses": [{**container, "containerID": "x://1"}]}
    kubectl("patch", pod, "-n", namespace, "--subresource=status", "-p", json.dumps({"status": status}))

    def serves() -> bool:
        found = kubectl.must_get("polv", "policy", namespace)
        counts = (found.get("status") or {}).get("replicas") or {}
        return condition(found, "Current")[0] == "True" and counts.get("current") == 1

    try:
        wait_for("it serves", serves)
        yield {"namespace": namespace, "kubeconfig": kubectl.kubeconfig, "prepare_timeout": 60, "timeout": 60}
    finally:
        engine.kill()
        engine.wait()


def test_an_update_pauses_pushes_and_opens(options: dict[str, Any]) -> None:
    with policy_update("policy", 8, **options) as update:
        paused = look(update)
        assert (paused["state"], paused["version"]) == ("paused", "7")
        engines, transit = update.engines, update.epoch
    update.engines = engines
    opened = look(update)
    assert (opened["state"], opened["version"], opened["epoch"]) == ("open", "8", update.epoch)
    assert update.epoch > transit
    assert update.replicas == "1/1"
    assert update.pause_seconds is not None
    assert update.pause_seconds > 0
    with policy_update("policy", 8, **options) as again:
        assert again.already_current


async def test_an_update_that_fails_goes_back_and_the_next_one_works(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        async with policy_update_async("policy", 8, **options):
            raise RuntimeError("the push failed")

    with pytest.raises(RuntimeError, match="the push failed"):
        await fail()
    async with policy_update_async("policy", 8, **options) as update:
        assert look(update)["state"] == "paused"
    where = ("-n", options["namespace"], "--kubeconfig", str(options["kubeconfig"]))
    assert main(["status", "policy", *where]) == DONE
    assert "  version      8\n" in capsys.readouterr().out


def test_a_reset_and_a_bump_by_command(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    where = ("-n", options["namespace"], "--kubeconfig", str(options["kubeconfig"]))
    assert main(["reset", "policy", "--wait", *where]) == DONE
    assert main(["bump", "policy", "9", "--wait", *where]) == DONE
    said = capsys.readouterr().out
    assert "version 7 is current" in said
    assert "version 9 is current" in said
    assert said.count("1/1 replicas\n") == 2
