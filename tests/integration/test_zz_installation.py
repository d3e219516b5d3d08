"""Ways to install it: one namespace only, Helm with and without CRDs, and an API server that goes away.

These come last: they change what the session's operator and cluster look like.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moontide import labels
from tests.integration.stage import CRDS

ROOT = Path(__file__).resolve().parents[2]
FLEET: dict[str, Any] = {
    "apiVersion": "moontide.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "pvc://weights/a", "servedName": "tiny"}},
}
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(name="helm")
def _helm(kubectl: Any, tools: Path, tmp_path: Path) -> Helm:
    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(tools / "helm"), f"--kubeconfig={kubectl.kubeconfig}", *arguments]
        home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=home, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def test_the_operator_survives_an_api_server_that_goes_away(
    kubectl: Any, operator: Any, cluster_name: str, namespace: str, wait_for: Any
) -> None:
    kubectl.apply({**FLEET, "metadata": {"name": "chat", "namespace": namespace}})
    wait_for("the fleet", lambda: kubectl.get("deployment", "chat", namespace))
    base = [sys.executable, "-m", "hack.cluster"]
    tail = ["kube-apiserver", "--name", cluster_name, "--quiet"]
    subprocess.run([*base, "stop", *tail], cwd=ROOT, check=True, timeout=60, capture_output=True)
    try:
        assert operator.http(operator.liveness_port, "/healthz") == 200
    finally:
        subprocess.run([*base, "start", *tail], cwd=ROOT, check=True, timeout=120, capture_output=True)
    kubectl("scale", "ifd", "chat", "-n", namespace, "--replicas=4")
    wait_for(
        "what changed afterwards is seen",
        lambda: kubectl.must_get("deployment", "chat", namespace)["spec"]["replicas"] == 4,
        60,
    )


def test_one_namespace_with_a_role(
    kubectl: Any, operator: Any, namespace: str, namespaced_operator: Any, wait_for: Any
) -> None:
    operator.stop()
    kubectl("delete", "clusterrolebinding,clusterrole", "-l", "app.kubernetes.io/name=moontide-operator")
    try:
        running = namespaced_operator(namespace)
        kubectl.make_namespace(f"{namespace}-other")
        for where in (f"{namespace}-other", namespace):
            kubectl.apply({**FLEET, "metadata": {"name": "chat", "namespace": where}})
        wait_for("the fleet", lambda: kubectl.get("deployment", "chat", namespace))
        kubectl("scale", "deployment", "chat", "-n", namespace, "--replicas=3")
        wait_for("drift", lambda: kubectl.must_get("deployment", "chat", namespace)["spec"]["replicas"] == 1)
        assert kubectl.get("deployment", "chat", f"{namespace}-other") is None
        assert "forbidden" not in running.log().lower()
        running.stop()
    finally:
        kubectl("delete", "namespace", f"{namespace}-other", "--wait=false", "--ignore-not-found")


def test_helm_beside_crds_that_kubectl_applied(kubectl: Any, helm: Helm) -> None:
    helm("install", "beside", str(ROOT / "charts/moontide"), "-n", "beside", "--create-namespace",
         "--set", "crds.install=false")  # fmt: skip
    assert kubectl.get("deployment", "beside-moontide-operator", "beside") is not None
    helm("uninstall", "beside", "-n", "beside")
    assert "inferencedeployments.moontide.dev" in kubectl("get", "crd", "-o", "name")


def test_helm_with_crds_keeps_them_when_it_goes(kubectl: Any, helm: Helm, namespace: str) -> None:
    kubectl("delete", "-f", str(ROOT / "crds"), "--timeout=60s")
    chart = str(ROOT / "charts/moontide")
    helm("install", "moontide", chart, "-n", "whole", "--create-namespace", "--set", "image=moontide.test/operator:1")
    kubectl.wait_served(*CRDS)
    deployment = kubectl.must_get("deployment", "moontide-operator", "whole")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "moontide.test/operator:1"
    kubectl.apply({**FLEET, "metadata": {"name": "chat", "namespace": namespace}})
    helm("upgrade", "moontide", chart, "-n", "whole", "--set", "logLevel=DEBUG")
    second = helm("install", "second", chart, "-n", "whole", "--set", "watchNamespace=default", check=False)
    assert "the CRDs are those of release moontide in namespace whole" in second.stderr
    assert "write crds.install=false for a further release" in second.stderr
    helm("install", "second", chart, "-n", "whole", "--set", "watchNamespace=default,crds.install=false")
    # As docs/upgrade.md hands them over.
    marks = ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-")
    kubectl("annotate", *kubectl("get", "-f", str(ROOT / "crds"), "-o", "name").split(), *marks)
    helm("upgrade", "second", chart, "-n", "whole", "--set", "watchNamespace=default", "--take-ownership")
    helm("uninstall", "second", "-n", "whole")
    helm("uninstall", "moontide", "-n", "whole")
    # What a release left behind that is gone, another may take.
    helm("install", "third", chart, "-n", "whole", "--take-ownership")
    helm("uninstall", "third", "-n", "whole")
    assert kubectl.get("ifd", "chat", namespace) is not None
    kubectl("delete", "ifd", "chat", "-n", namespace, "--timeout=60s")


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("watchNamespace=a",),
        ("replicas=2",),
        ("imagePullSecrets[0].name=s", "imagePullPolicy=Never"),
        ("hook.enabled=true", "hook.tlsSecret=s"),
        ("watchNamespace=a", "hook.enabled=true"),
        ("monitoring.dashboard.enabled=true",),
        ("nodeSelector.disk=ssd", "tolerations[0].operator=Exists", "podLabels.team=b", "podAnnotations.team=b"),
        ("networkPolicies.enabled=true", "networkPolicies.namespaces={default}"),
        ("trainer.roles[0].namespace=a", "trainer.roles[0].policies[0]=policy", "trainer.roles[0].fleets[0]=chat"),
    ],
)
def test_the_api_server_takes_every_manifest(kubectl: Any, helm: Helm, values: tuple[str, ...], namespace: str) -> None:
    sets = [part for value in values for part in ("--set", value.replace("=a", f"={namespace}"))]
    made = helm("template", "x", str(ROOT / "charts/moontide"), "-n", namespace, "--set", "crds.install=false", *sets)
    said = kubectl("apply", "--dry-run=server", "-o", "json", "-f", "-", stdin=made.stdout)
    assert json.loads(said)["items"]


def test_monitors_find_the_pods_that_there_are(helm: Helm) -> None:
    sets = [part for kind in ("podMonitors", "rules") for part in ("--set", f"monitoring.{kind}.enabled=true")]
    made = helm("template", "moontide", str(ROOT / "charts/moontide"), "-n", "ours", *sets, "--set", "watchNamespace=a")
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made.stdout) if each}
    engines = found["PodMonitor", "moontide-operator-engines"]["spec"]
    selector = engines["selector"]["matchLabels"]
    assert selector.items() <= labels.engine_labels("chat").items()
    assert engines["namespaceSelector"] == {"matchNames": ["a"]}
    template = found["Deployment", "moontide-operator"]["spec"]["template"]
    operator = found["PodMonitor", "moontide-operator"]["spec"]
    assert operator["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {each["port"] for each in operator["podMetricsEndpoints"]} <= ports
    alerts = yaml.safe_load((ROOT / "charts/moontide/files/alerts.yaml").read_text())
    ours = 'moontide_leader{namespace="ours", pod=~"moontide-operator-[a-z0-9]+-[a-z0-9]+"}'
    for rule in alerts["groups"][0]["rules"]:
        if "moontide_leader" in rule["expr"]:
            rule["labels"] |= {"namespace": "ours", "operator": "moontide-operator"}
            rule["expr"] = rule["expr"].replace("moontide_leader", ours)
            rule["expr"] = rule["expr"].replace("state{state=~", 'state{namespace="a", state=~')
    assert found["PrometheusRule", "moontide-operator"]["spec"] == alerts


def _rules(manifests: str, kind: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in yaml.safe_load_all(manifests):
        if each and each["kind"] == kind and not each["metadata"]["name"].endswith("-hook"):
            for rule in each["rules"]:
                for resource in rule["resources"]:
                    found.setdefault(resource, set()).update(rule["verbs"])
    return found


def test_the_documented_rights_are_those_of_the_chart(helm: Helm) -> None:
    verbs = "get|list|watch|create|update|patch|delete|deletecollection"
    row = rf"^\| (`[^|]*`) \| ((?:{verbs})(?: (?:{verbs}))*) \|"
    rows = re.findall(row, (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    told = {name: set(verbs.split()) for names, verbs in rows for name in re.findall(r"`([^`]+)`", names)}
    made = helm("template", "moontide", str(ROOT / "charts/moontide"), "-n", "ours", "-s", "templates/rbac.yaml")
    assert _rules(made.stdout, "ClusterRole") == told


OPERATOR = ("ours", {"app.kubernetes.io/name": "moontide-operator", "app.kubernetes.io/instance": "moontide"})
ENGINE, STORE = ("rl", labels.engine_labels("chat")), ("rl", labels.store_labels("kv"))
WORKER, NODE, ETCD = (
    ("rl", labels.worker_labels("chat")),
    ("rl", labels.store_node_labels("kv")),
    ("rl", labels.etcd_labels("kv")),
)
TRAINER, SCRAPER, ADOPTED = ("rl", {"app": "trainer"}), ("rl", {"app": "prometheus"}), ("rl", {"app": "mine"})
STRANGER, NEIGHBOUR = ("rl", {"app": "web"}), ("other", labels.engine_labels("chat"))
EVERYBODY = (OPERATOR, ENGINE, STORE, WORKER, NODE, ETCD, TRAINER, SCRAPER, ADOPTED, STRANGER, NEIGHBOUR)
FAMILY = (ENGINE, STORE, WORKER, NODE, ETCD, ADOPTED)
Pod = tuple[str, dict[str, str]]


@pytest.mark.parametrize(
    ("target", "port", "allowed"),
    [
        (ENGINE, 8000, EVERYBODY),
        (ENGINE, 8001, (OPERATOR, TRAINER)),
        (ENGINE, 15467, FAMILY),
        (WORKER, 8001, (OPERATOR, TRAINER)),
        (WORKER, 29500, FAMILY),
        (STORE, 50051, FAMILY),
        (STORE, 9003, (OPERATOR, NODE, SCRAPER, STORE)),
        (STORE, 9004, (OPERATOR, STORE)),
        (NODE, 17000, (*FAMILY, OPERATOR)),
        (ETCD, 2379, (*FAMILY, OPERATOR)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_who_reaches_what_under_the_network_policies(
    helm: Helm, target: Pod, port: int, allowed: tuple[Pod, ...]
) -> None:
    given = {"trainers": "trainer", "scrapers": "prometheus", "engines": "mine"}
    sets = [f"networkPolicies.{kind}[0].podSelector.matchLabels.app={app}" for kind, app in given.items()]
    sets += ["networkPolicies.enabled=true", "networkPolicies.namespaces={rl}"]
    arguments = [part for each in sets for part in ("--set", each)]
    template = ("-n", "ours", "-s", "templates/networkpolicies.yaml")
    made = helm("template", "moontide", str(ROOT / "charts/moontide"), *template, *arguments)
    policies = [each["spec"] for each in yaml.safe_load_all(made.stdout) if each]
    assert len(policies) == 3
    assert [pod for pod in EVERYBODY if _reaches(policies, pod, target, port)] == [
        pod for pod in EVERYBODY if pod in allowed
    ]


def _matches(selector: dict[str, Any], found: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {}).items() <= found.items()
    return exact and all(found.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))


def _reaches(policies: list[dict[str, Any]], source: Pod, target: Pod, port: int) -> bool:
    """What the API says that policies of namespace ``rl`` mean."""
    concerned = [each for each in policies if _matches(each["podSelector"], target[1])]
    assert concerned
    for rule in (rule for each in concerned for rule in each["ingress"]):
        ports = rule.get("ports")
        if ports and not any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports):
            continue
        if "from" not in rule or any(_is_peer(peer, source) for peer in rule["from"]):
            return True
    return False


def _is_peer(peer: dict[str, Any], source: Pod) -> bool:
    namespace = {"kubernetes.io/metadata.name": source[0]}
    there = _matches(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else source[0] == "rl"
    return there and _matches(peer.get("podSelector", {}), source[1])
