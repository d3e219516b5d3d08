"""What tests of the operator's Helm release ask of the cluster."""

from __future__ import annotations

from hack.demo import install
from hack.demo.fleet import Fleet
from hack.demo.kube import Kube, wait
from moontide import labels

DEPLOYMENT = "moontide-operator"
NAMESPACE = ("--namespace", install.SYSTEM_NAMESPACE)
VALUES = ("--values", str(install.EXAMPLES / "values.yaml"))
"""Those of the demo's own release."""
Engines = dict[str, tuple[str, int]]


def revision(kube: Kube) -> str:
    """Of the release as it is deployed now."""
    found = kube.list("secrets", install.SYSTEM_NAMESPACE, f"owner=helm,name={install.RELEASE},status=deployed")
    (number,) = (each["metadata"]["labels"]["version"] for each in found)
    return str(number)


def environment(kube: Kube, name: str) -> str:
    """A variable of the operator's, as its Deployment asks for it."""
    pod = kube.get("deployment", DEPLOYMENT, install.SYSTEM_NAMESPACE)["spec"]["template"]["spec"]
    (value,) = (each["value"] for each in pod["containers"][0]["env"] if each["name"] == name)
    return str(value)


def rolled_out(kube: Kube) -> None:
    """Wait until only pods of the present template are there, and one of them leads."""
    kube.run("rollout", "status", f"deployment/{DEPLOYMENT}", *NAMESPACE, "--timeout=120s", timeout=150)

    def leads() -> str | None:
        lease = kube.get("lease", DEPLOYMENT, install.SYSTEM_NAMESPACE)
        holder = str(lease["spec"].get("holderIdentity") or "").split("_")[0]
        pods = kube.list("pods", install.SYSTEM_NAMESPACE, "app.kubernetes.io/name=moontide-operator")
        return holder if [each["metadata"]["name"] for each in pods] == [holder] else None

    wait(leads, 60, "the only pod of the operator leads")


def engines(fleet: Fleet) -> Engines:
    """Every pod of the fleet's, also one that ends: UID and restarts by name."""
    selector = labels.selector(labels.engine_labels(fleet.deployment))
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(int(each["restartCount"]) for each in pod["status"].get("containerStatuses", ())),
        )
        for pod in fleet.kube.list("pods", fleet.namespace, selector)
    }
