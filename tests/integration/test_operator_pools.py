"""Pools against a real API server: memory nodes, who has a dedicated pool, fleets that would be killed, and tokens."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.integration.stage import RESOLVING

API = "moontide.dev/v1alpha1"

# The operator's process, and helpers, come from conftest.py.


def _pool(namespace: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "KVCachePool", "metadata": {"name": "kv", "namespace": namespace}, "spec": spec}


def _fleet(namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    spec = {"model": model, "kvCache": {"poolRef": {"name": "kv"}}, **spec}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": spec}


def _why(kubectl: Any, condition: Any, name: str, namespace: str) -> tuple[str, str]:
    found: tuple[str, str] = condition(kubectl.get("ifd", name, namespace), "Progressing")
    return found


def test_memory_nodes_come_scale_and_go(kubectl: Any, operator: Any, namespace: str, wait_for: Any) -> None:
    def replicas() -> int | None:
        found = kubectl.get("deployment", "kv-nodes", namespace)
        return None if found is None else int(found["spec"]["replicas"])

    kubectl.apply(_pool(namespace, memory={"perReplica": "0", "storeNodes": {"replicas": 3, "segmentSize": "64Mi"}}))
    wait_for("memory nodes", lambda: replicas() == 3)
    change = {"spec": {"memory": {"storeNodes": {"replicas": 1}}}}
    kubectl("patch", "kvp", "kv", "-n", namespace, "--type=merge", "-p", json.dumps(change))
    wait_for("one memory node", lambda: replicas() == 1)
    events = json.loads(kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    said = [each["message"] for each in events if each["reason"] == "StoreNodesScaledDown"]
    assert said == ["memory nodes go from 3 to 1; the master does not answer, so what they hold is not moved"]
    kubectl.apply(_pool(namespace))
    wait_for("no memory node", lambda: replicas() == 0)


def test_a_dedicated_pool_has_one_fleet(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_pool(namespace, isolation="Dedicated"), _fleet(namespace, "first"))
    wait_for("the first has it", lambda: kubectl.get("deployment", "first", namespace))
    before = kubectl.must_get("deployment", "first", namespace)["metadata"]["generation"]
    kubectl.apply(_fleet(namespace, "second"))
    wait_for("the second is told", lambda: _why(kubectl, condition, "second", namespace) == ("False", "PoolTaken"))
    assert kubectl.get("deployment", "second", namespace) is None
    assert kubectl.must_get("deployment", "first", namespace)["metadata"]["generation"] == before
    kubectl("delete", "ifd", "first", "-n", namespace, "--timeout=20s")
    wait_for("the second gets it", lambda: kubectl.get("deployment", "second", namespace))


def test_a_fleet_that_would_be_killed_is_not_made(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_pool(namespace), _fleet(namespace, "chat", resources={"limits": {"memory": "2Gi"}}))
    wait_for("it says so", lambda: _why(kubectl, condition, "chat", namespace) == ("False", "MemoryTooSmall"))
    assert kubectl.get("deployment", "chat", namespace) is None
    kubectl.apply(_fleet(namespace, "chat", resources={"limits": {"memory": "4Gi"}}))
    wait_for("with more it is made", lambda: kubectl.get("deployment", "chat", namespace))


class Wiper:
    """The wiper of a stage's pool, whose kubelet is the test."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._token_file: Path = stage.folder / "kv-wiper.token"

    def runs(self) -> bool:
        """Be the kubelet: the master's pod has an address, at which the wiper is."""
        where = f"/api/v1/namespaces/{self.stage.namespace}/pods"
        pods = self.stage.api("GET", f"{where}?labelSelector=app.kubernetes.io/component%3Dstore")["items"]
        host = self.stage.services
        for pod in pods:
            status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}]}
            self.stage.api("PATCH", f"{where}/{pod['metadata']['name']}/status", {"status": status})
        return len(pods) == 1

    @property
    def secret(self) -> list[str]:
        """The tokens in the Secret, the one in use first."""
        found = self.stage.api("GET", f"/api/v1/namespaces/{self.stage.namespace}/secrets/kv-wiper")
        return base64.b64decode(found["data"]["token"]).decode().split()

    def bring(self, *tokens: str) -> None:
        """Be the kubelet: the token file is what the Secret is."""
        self._token_file.write_text("\n".join(tokens))

    def answers(self, token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        url = f"http://{self.stage.services}:9004/moontide/v1/keys?namespace=nobody"
        return httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code

    @property
    def token(self) -> dict[str, Any]:
        """``status.wiperToken``."""
        body = self.stage.api("GET", self.stage.path("KVCachePool", "kv"))
        return dict((body.get("status") or {}).get("wiperToken") or {})

    def rotate(self, value: str) -> None:
        body = {"metadata": {"annotations": {"moontide.dev/rotate-token": value}}}
        self.stage.api("PATCH", self.stage.path("KVCachePool", "kv"), body)


def test_the_token_of_a_wiper_is_rotated_and_an_operator_killed_in_any_phase_is_followed(
    make_stage: Any, wait_for: Any
) -> None:
    with make_stage() as (stage, make_operator):
        environ = {
            "MOONTIDE_RESYNC_SECONDS": "1",
            "MOONTIDE_TOKEN_OVERLAP_SECONDS": "4",
            # As a pod's container that restarts, the next one need not wait for the Lease.
            "MOONTIDE_POD_NAME": "one",
            "MOONTIDE_POD_UID": "one",
        }
        operator = make_operator("rotating", environ, RESOLVING.format(services=stage.services))
        operator.start()
        stage.pool()
        stage.fleet("chat", fences=False)
        stage.wait_current("chat", 1)
        wiper, version = Wiper(stage), 1
        wait_for("the master's pod", wiper.runs)

        def killed_and_changed() -> None:
            """Another operator, and a change of policy, which of a plain fleet takes two verified wipes."""
            nonlocal version
            operator.stop(signal.SIGKILL)
            operator.start()
            version += 1
            stage.double("change", names=sorted(stage.double("states")), weights=str(version))
            stage.ask("chat", version=str(version))
            stage.wait_current("chat", version)

        def waits(phase: str, for_what: str) -> bool:
            return wiper.token.get("phase") == phase and for_what in wiper.token["message"]

        (old,) = wiper.secret
        wiper.rotate("november")
        wait_for("it says who waits", lambda: waits("Introducing", "(Http401)"))
        kept, new = wiper.secret
        assert (kept, wiper.answers(old), wiper.answers(new)) == (old, 200, 401)
        killed_and_changed()
        assert wiper.token["phase"] == "Introducing"

        wiper.bring(old, new)
        wait_for("it overlaps", lambda: wiper.token["phase"] == "Overlapping")
        killed_and_changed()

        wait_for("it says who still takes the old one", lambda: waits("Retiring", "(takes it)"))
        assert wiper.secret == [new]
        killed_and_changed()
        assert wiper.token["phase"] == "Retiring"
        wiper.bring(new)
        wait_for("it is done", lambda: wiper.token["phase"] == "Current")
        assert wiper.token["rotation"].startswith("november@")
        assert (wiper.answers(old), wiper.answers(new)) == (401, 200)
        killed_and_changed()
        assert wiper.secret == [new]

        events = stage.api("GET", f"/api/v1/namespaces/{stage.namespace}/events")["items"]
        told = {each["reason"] for each in events if each["involvedObject"]["kind"] == "KVCachePool"}
        assert {"TokenRotating", "TokenRotated"} <= told
        assert [each["message"] for each in events if "Unauthorized" in each["message"]] == []
        assert [each for each in stage.journal() if "stale" in each] == []
