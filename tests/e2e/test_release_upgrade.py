"""`helm upgrade` and `helm rollback` of the operator while a fleet serves: no engine notices, and changes go on.

Worth about 40 s: what unit tests cannot show is that a release with other values leaves every pod of a real kubelet
alone, and that the operator after it leads, with the epochs that there were. (Its name puts it before uninstall.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.cluster.settings import repository_root
from hack.demo import install
from hack.demo.cold import References
from hack.demo.fleet import Fleet
from hack.demo.install import Target
from hack.demo.kube import Kube, wait
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from moontide import labels
from tests.e2e.oracle.trainer import Trainer

CHART = str(repository_root() / "charts" / "moontide")
DEPLOYMENT = "moontide-operator"
LEVEL = "WARNING"
Engines = dict[str, tuple[str, int]]


@pytest.fixture(name="revision")
def _revision(target: Target, kube: Kube) -> Iterator[str]:
    """The revision of the release that the demo made; it is what there is afterwards, whatever happens."""
    namespace = ("--namespace", install.SYSTEM_NAMESPACE)
    before = kube.get("secret", _release_secret(kube), install.SYSTEM_NAMESPACE)["metadata"]["labels"]["version"]
    yield str(before)
    if _level(kube) == LEVEL:
        install.helm(target, "rollback", install.RELEASE, str(before), *namespace)
        _rolled_out(kube)


def _release_secret(kube: Kube) -> str:
    """Helm's record of the release as it is deployed now."""
    found = kube.list("secrets", install.SYSTEM_NAMESPACE, f"owner=helm,name={install.RELEASE},status=deployed")
    (name,) = (each["metadata"]["name"] for each in found)
    return str(name)


def _level(kube: Kube) -> str:
    """The log level that the operator's Deployment asks for."""
    pod = kube.get("deployment", DEPLOYMENT, install.SYSTEM_NAMESPACE)["spec"]["template"]["spec"]
    (level,) = (each["value"] for each in pod["containers"][0]["env"] if each["name"] == "MOONTIDE_LOG_LEVEL")
    return str(level)


def _rolled_out(kube: Kube) -> None:
    """Wait until only pods of the present template are there, and one of them leads."""
    place = ("--namespace", install.SYSTEM_NAMESPACE)
    kube.run("rollout", "status", f"deployment/{DEPLOYMENT}", *place, "--timeout=120s", timeout=150)

    def leads() -> str | None:
        lease = kube.get("lease", DEPLOYMENT, install.SYSTEM_NAMESPACE)
        holder = str(lease["spec"].get("holderIdentity") or "").split("_")[0]
        pods = kube.list("pods", install.SYSTEM_NAMESPACE, "app.kubernetes.io/name=moontide-operator")
        return holder if [each["metadata"]["name"] for each in pods] == [holder] else None

    wait(leads, 60, "the only pod of the operator leads")


def _engines(fleet: Fleet) -> Engines:
    """Every pod of the fleet's, also one that ends: UID and restarts by name."""
    selector = labels.selector(labels.engine_labels(fleet.deployment))
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(int(each["restartCount"]) for each in pod["status"].get("containerStatuses", ())),
        )
        for pod in fleet.kube.list("pods", fleet.namespace, selector)
    }


def test_upgrade_and_rollback_leave_every_engine_alone(
    fleet: Fleet, target: Target, kube: Kube, texts: Prompts, references: References, revision: str
) -> None:
    namespace = ("--namespace", install.SYSTEM_NAMESPACE)
    values = ("--values", str(install.EXAMPLES / "values.yaml"), "--set", f"logLevel={LEVEL}")
    steps = {
        LEVEL: ("upgrade", install.RELEASE, CHART, *namespace, *values),
        _level(kube): ("rollback", install.RELEASE, revision, *namespace),
    }
    assert len(steps) == 2
    trainer = Trainer(fleet, references)
    trainer.begin()
    before = _engines(fleet)
    generation = kube.get("deployment", fleet.deployment, fleet.namespace)["metadata"]["generation"]
    for level, command in steps.items():
        prompts = dict(enumerate(texts.kept))
        with Load(fleet.replicas(), fleet.model, prompts, clients=2) as load:
            install.helm(target, *command)
            _rolled_out(kube)
        assert _level(kube) == level
        assert load.answers
        assert [each for each in load.answers if each.status != 200] == []
        assert _engines(fleet) == before
        assert kube.get("deployment", fleet.deployment, fleet.namespace)["metadata"]["generation"] == generation

        trainer.change(None, hold=False)
        assert trainer.epochs == sorted(set(trainer.epochs))
        number = int(fleet.get_policy()["spec"]["version"])
        for replica in fleet.replicas():
            answer = replica.ask(fleet.model, 0, texts.kept[0])
            assert (answer.status, answer.version, answer.epoch) == (200, str(number), trainer.epochs[-1])
            assert trainer.by_version[str(number)][0].equals(answer)
        assert _engines(fleet) == before
