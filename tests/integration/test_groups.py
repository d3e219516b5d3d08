"""Replicas of several pods, against a real API server with a stand-in for the kind of LeaderWorkerSet: no controller
makes pods of it here, so the test writes the status that one would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

API = "moontide.dev/v1alpha1"
KIND = "leaderworkersets.leaderworkerset.x-k8s.io"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": KIND,
        "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
    },
    "spec": {
        "group": "leaderworkerset.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "LeaderWorkerSet", "plural": "leaderworkersets", "singular": "leaderworkerset"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": OPEN, "status": OPEN}}},
            }
        ],
    },
}


def _fleet(namespace: str, **spec: Any) -> dict[str, Any]:
    base = {
        "model": {"source": "pvc://weights/a", "servedName": "tiny"},
        "replicas": 2,
        "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2},
    }
    metadata = {"name": "chat", "namespace": namespace}
    return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": {**base, **spec}}


@pytest.fixture(name="kind")
def _kind(kubectl: Any) -> Iterator[None]:
    """Removes the stand-in again."""
    yield
    kubectl("delete", "crd", KIND, "--ignore-not-found", "--timeout=60s")


def test_a_replica_of_two_pods(
    kubectl: Any, operator: Any, kind: None, namespace: str, wait_for: Any, condition: Any
) -> None:
    def why(which: str = "Progressing") -> tuple[str, str]:
        found: tuple[str, str] = condition(kubectl.get("ifd", "chat", namespace), which)
        return found

    kubectl.apply(_fleet(namespace))
    wait_for("LeaderWorkerSetMissing", lambda: why() == ("False", "LeaderWorkerSetMissing"))
    assert why("Available") == ("False", "NotCreated")
    assert kubectl.get("deployment", "chat", namespace) is None

    kubectl.apply(CRD)
    kubectl.wait_served(KIND)
    made = wait_for("the groups", lambda: kubectl.get(KIND, "chat", namespace))
    assert made["spec"]["replicas"] == 2
    assert made["spec"]["leaderWorkerTemplate"]["size"] == 2
    fleet = kubectl.must_get("ifd", "chat", namespace)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (fleet["metadata"]["uid"], True)
    wait_for("no complaint", lambda: why() == ("True", "Updating"))

    # At rest it is applied again and again, and not changed.
    time.sleep(6)
    assert kubectl.must_get(KIND, "chat", namespace)["metadata"]["generation"] == 1

    kubectl("scale", "ifd", "chat", "-n", namespace, "--replicas=3")
    wait_for("three groups", lambda: kubectl.must_get(KIND, "chat", namespace)["spec"]["replicas"] == 3)
    available = {"type": "Available", "status": "True", "reason": "AllGroupsReady", "message": "all are"}
    said = {"replicas": 3, "readyReplicas": 3, "updatedReplicas": 3, "conditions": [available]}
    patch = json.dumps({"status": said})
    kubectl("patch", KIND, "chat", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    wait_for("Available", lambda: why("Available") == ("True", "AllGroupsReady"))
    wait_for("Complete", lambda: why() == ("False", "Complete"))
    status = kubectl.must_get("ifd", "chat", namespace)["status"]
    assert (status["ready"], status["replicas"]) == ("3/3", 3)


def test_a_set_of_others_is_left_alone(
    kubectl: Any, operator: Any, kind: None, namespace: str, wait_for: Any, condition: Any
) -> None:
    kubectl.apply(CRD)
    kubectl.wait_served(KIND)
    metadata = {"name": "chat", "namespace": namespace}
    theirs = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": metadata}
    kubectl.apply({**theirs, "spec": {"replicas": 7}})
    kubectl.apply(_fleet(namespace))
    wait_for(
        "NameTaken",
        lambda: condition(kubectl.get("ifd", "chat", namespace), "Progressing") == ("False", "NameTaken"),
    )
    assert kubectl.must_get(KIND, "chat", namespace)["spec"] == {"replicas": 7}
