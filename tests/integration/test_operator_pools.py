"""Pools against a real API server: memory nodes, who has a dedicated pool, and fleets that would be killed."""

from __future__ import annotations

import json
from typing import Any

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
    kubectl("delete", "ifd", "first", "-n", namespace, "--timeout=60s")
    wait_for("the second gets it", lambda: kubectl.get("deployment", "second", namespace))


def test_a_fleet_that_would_be_killed_is_not_made(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(_pool(namespace), _fleet(namespace, "chat", resources={"limits": {"memory": "2Gi"}}))
    wait_for("it says so", lambda: _why(kubectl, condition, "chat", namespace) == ("False", "MemoryTooSmall"))
    assert kubectl.get("deployment", "chat", namespace) is None
    kubectl.apply(_fleet(namespace, "chat", resources={"limits": {"memory": "4Gi"}}))
    wait_for("with more it is made", lambda: kubectl.get("deployment", "chat", namespace))
