"""`make demo` on the real cluster: every claim that it prints was checked by it; here its verdict is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hack.demo import install
from hack.demo.install import Target
from hack.demo.kube import Kube

if TYPE_CHECKING:
    from tests.e2e.conftest import DemoRun


def test_demo_proves_the_policy_bump(demo: DemoRun) -> None:
    output = "\n".join(demo.lines[-80:])
    assert demo.code == 0, output
    reset, keys, pause, answer = demo.lines[-4:]
    assert reset == "replicas reset 2/2"
    assert re.match(r"keys left 0 \(of [1-9]\d* .*removed: [1-9]\d*\)$", keys), keys
    assert re.fullmatch(r"pause [1-9]\d* ms", pause), pause
    assert re.fullmatch(r"answer after the bump equals the cold engine's, token for token \((\d+) of \1\)", answer), (
        answer
    )
    assert "FALSE" not in "\n".join(demo.lines)


def test_crds_come_from_kubectl_and_the_chart_brings_none(target: Target, kube: Kube) -> None:
    manifest = install.helm(target, "get", "manifest", install.RELEASE, "--namespace", install.SYSTEM_NAMESPACE)
    assert "kind: Deployment" in manifest
    assert "CustomResourceDefinition" not in manifest
    for name in ("kvcachepools", "inferencedeployments", "policyversions"):
        managers = kube.run(
            "get",
            "crd",
            f"{name}.moontide.dev",
            "--show-managed-fields",
            "-o",
            "jsonpath={.metadata.managedFields[*].manager}",
        )
        assert "kubectl" in managers.split()
        assert "helm" not in managers.lower()


def test_engines_asked_for_gpus_and_got_them(kube: Kube) -> None:
    pods = kube.list("pods", "moontide-demo", "app.kubernetes.io/component=engine")
    assert len(pods) == 2
    for pod in pods:
        limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
        assert any(each.get("nvidia.com/gpu") == "1" for each in limits), limits
