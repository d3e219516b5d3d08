"""`helm uninstall`: engines serve on, and what is deleted later does not hang."""

from __future__ import annotations

from hack.demo import install
from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.install import Target
from hack.demo.kube import Kube, wait
from hack.demo.prompts import Prompts
from hack.demo.story import side_of


def test_uninstall_leaves_engines_serving_and_nothing_hangs(
    fleet: Fleet, target: Target, kube: Kube, texts: Prompts, references: References
) -> None:
    before = {pod["metadata"]["uid"] for pod in fleet.pods()}
    version = int(fleet.get_policy()["spec"]["version"])
    replicas = fleet.replicas()
    install.helm(target, "uninstall", install.RELEASE, "--namespace", install.SYSTEM_NAMESPACE)
    wait(lambda: not kube.list("pods", install.SYSTEM_NAMESPACE) or None, 90, "no operator")

    assert {pod["metadata"]["uid"] for pod in fleet.pods()} == before
    for replica in replicas:
        for number, text in enumerate(texts.kept):
            answer = replica.ask(fleet.model, number, text)
            assert answer.status == 200
            assert answer.version == str(version)
            assert references[side_of(version)][number].equals(answer)

    for kind in ("ifd", "polv", "kvp"):
        kube.run("delete", kind, "--all", "--namespace", fleet.namespace, "--timeout=60s", timeout=70)
    wait(lambda: not kube.list(install.KINDS, fleet.namespace) or None, 30, "no resource of ours")
    wait(lambda: not kube.list("pods", fleet.namespace) or None, 120, "no pod", every=1.0)
    kube.run("delete", "namespace", fleet.namespace, "--timeout=90s", timeout=100)
    kube.run("delete", "pv", "moontide-demo-models", "--timeout=30s")
