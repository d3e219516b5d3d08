"""The Pod Security Standard `restricted`, enforced by a real API server on every pod that there is; who may do what."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moontide import labels

ROOT = Path(__file__).resolve().parents[2]
API = "moontide.dev/v1alpha1"


def test_every_pod_is_admitted_where_restricted_is_enforced(
    kubectl: Any, operator: Any, namespace: str, wait_for: Any
) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    pool = {"master": {"replicas": 3}, "memory": {"storeNodes": {"replicas": 1, "segmentSize": "16Mi"}}}
    model = {"source": "pvc://weights/a", "servedName": "tiny", "version": "7"}
    bodies = {
        "KVCachePool": ("kv", pool),
        "InferenceDeployment": ("chat", {"model": model, "kvCache": {"poolRef": {"name": "kv"}}}),
    }
    kubectl.apply(
        *(
            {"apiVersion": API, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}
            for kind, (name, spec) in bodies.items()
        )
    )
    wanted = {"engine": 1, "store": 3, "store-node": 1, "etcd": 1}

    def components() -> dict[str, int]:
        pods = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
        found = [pod["metadata"]["labels"].get(labels.COMPONENT) for pod in pods]
        return {name: found.count(name) for name in wanted}

    wait_for("pods of every kind", lambda: components() == wanted, 60)
    refused = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root", "namespace": namespace},
        "spec": {"containers": [{"name": "x", "image": "x"}]},
    }
    assert "violates PodSecurity" in kubectl.refusal(refused)


def test_the_operators_own_pod_too(kubectl: Any, tools: Path, namespace: str) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    command = [str(tools / "helm"), "template", "moontide", str(ROOT / "charts/moontide"), "-n", namespace]
    sets = ("--set", "hook.enabled=true,hook.tlsSecret=tls", "-s", "templates/deployment.yaml")
    made = subprocess.run([*command, *sets], capture_output=True, text=True, check=True).stdout
    template = yaml.safe_load(made)["spec"]["template"]
    del template["spec"]["serviceAccountName"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] |= {"name": "operator", "namespace": namespace}
    kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


@pytest.fixture(name="user_roles")
def _user_roles(kubectl: Any, tools: Path) -> Iterator[None]:
    """The chart's, in the cluster."""
    command = [
        str(tools / "helm"),
        "template",
        "moontide",
        str(ROOT / "charts/moontide"),
        "-s",
        "templates/userroles.yaml",
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kubectl("apply", "-f", "-", stdin=made)
    yield
    kubectl("delete", "-f", "-", stdin=made)


SEEN = ("get kvp", "list ifd", "watch polv")
WRITTEN = ("create ifd", "patch kvp", "update polv", "delete ifd", "deletecollection polv", "patch ifd/scale")
NEVER = ("patch ifd/status", "get secrets", "create pods")


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("moontide-view", SEEN),
        ("moontide-edit", (*SEEN, *WRITTEN)),
        ("view", SEEN),
        # These two of Kubernetes may read Secrets and create pods, with Moontide or without.
        ("edit", (*SEEN, *WRITTEN, "get secrets", "create pods")),
        ("admin", (*SEEN, *WRITTEN, "get secrets", "create pods")),
    ],
)
def test_what_people_may_by_each_role(
    kubectl: Any, namespace: str, user_roles: None, wait_for: Any, role: str, allowed: tuple[str, ...]
) -> None:
    kubectl("create", "rolebinding", "somebody", "-n", namespace, f"--clusterrole={role}", "--user=somebody")

    def may(right: str) -> bool:
        verb, _, what = right.partition(" ")
        kind, _, part = what.partition("/")
        more = [f"--subresource={part}"] if part else []
        done = kubectl.run("auth", "can-i", verb, kind, *more, "-n", namespace, "--as=somebody", check=False)
        return bool(done.stdout.strip() == "yes")

    wait_for("the roles join those of Kubernetes", lambda: may("watch polv"), 60)
    assert {right for right in (*SEEN, *WRITTEN, *NEVER) if may(right)} == set(allowed)
