"""The Pod Security Standard `restricted`, enforced by a real API server on every pod that there is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

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
