"""What a model's source names is looked for in a real API server, with the rights of the chart and no more."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.stage import proxied

API = "moontide.dev/v1alpha1"
HUB = {"source": "hf://org/name", "servedName": "tiny", "tokenSecretRef": {"name": "hub", "key": "token"}}


def _fleet(namespace: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": namespace}
    return {"apiVersion": API, "kind": "InferenceDeployment", "metadata": metadata, "spec": spec}


def _secret(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "hf_private"}}


def _message(body: dict[str, Any]) -> str:
    found: list[str] = [each["message"] for each in body["status"]["conditions"] if each["type"] == "Progressing"]
    return found[0]


def test_what_is_missing_is_a_condition_and_changes_nothing_that_runs(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any, condition: Any
) -> None:
    def why() -> tuple[str, str]:
        found: tuple[str, str] = condition(kubectl.get("ifd", "chat", namespace), "Progressing")
        return found

    kubectl.apply(_fleet(namespace, model=HUB))
    wait_for("SecretMissing", lambda: why() == ("False", "SecretMissing"))
    assert f"Secret hub of spec.model does not exist in namespace {namespace}" in _message(
        kubectl.must_get("ifd", "chat", namespace)
    )
    assert kubectl.get("deployment", "chat", namespace) is None

    def told() -> list[str]:
        events = json.loads(kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
        return [each["type"] for each in events if each["reason"] == "SecretMissing"]

    # The status is written first.
    assert wait_for("an Event", told) == ["Warning"]

    kubectl.apply(_secret(namespace, "hub"))
    before = wait_for("the fleet starts", lambda: kubectl.get("deployment", "chat", namespace))["spec"]
    (container,) = before["template"]["spec"]["containers"]
    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}

    kubectl.apply(_fleet(namespace, model={**HUB, "cache": {"claim": "nowhere"}}))
    wait_for("ClaimMissing", lambda: why() == ("False", "ClaimMissing"))
    assert kubectl.must_get("deployment", "chat", namespace)["spec"] == before

    kubectl.apply(_fleet(namespace, model={**HUB, "cache": {"claim": "weights"}}))
    wait_for("changed", lambda: kubectl.must_get("deployment", "chat", namespace)["spec"] != before)
    wait_for("no complaint", lambda: why()[1] == "Updating")
    assert "hf_private" not in operator.log()


def test_looking_for_a_secret_does_not_send_its_content(kubectl: Any, api: Any, namespace: str) -> None:
    kubectl.apply(_secret(namespace, "hub"))
    request = urllib.request.Request(
        f"http://127.0.0.1:{api.port}/api/v1/namespaces/{namespace}/secrets/hub?dryRun=All",
        data=b"{}",
        method="PATCH",
        headers={
            "Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
            "Content-Type": "application/merge-patch+json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = json.load(answer)
    assert body["kind"] == "PartialObjectMetadata"
    assert body["metadata"]["name"] == "hub"
    assert "data" not in body


def test_a_pod_that_cannot_start_is_listed_with_the_reason(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any
) -> None:
    kubectl.apply(_secret(namespace, "hub"))
    kubectl.apply(_fleet(namespace, model={**HUB, "tokenSecretRef": {"name": "hub", "key": "elsewhere"}}))

    def pods() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        return found

    (pod,) = wait_for("a pod", pods)
    waiting = {"reason": "CreateContainerConfigError", "message": "couldn't find key elsewhere in Secret hub"}
    engine = {"name": "engine", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"status": {"containerStatuses": [{**engine, "state": {"waiting": waiting}}]}}
    target = ("pod", pod["metadata"]["name"], "-n", namespace, "--subresource=status", "--type=merge")
    kubectl("patch", *target, "-p", json.dumps(status))

    def closed() -> list[tuple[str, str]]:
        said = kubectl.must_get("ifd", "chat", namespace).get("status", {}).get("closed", [])
        return [(each["reason"], each["message"]) for each in said]

    wait_for("the kubelet's reason", lambda: closed() == [(waiting["reason"], waiting["message"])])


@pytest.fixture(scope="module", name="api")
def _api(kubectl: Any) -> Iterator[Any]:
    with proxied(kubectl) as api:
        yield api
