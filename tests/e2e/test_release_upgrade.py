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
from hack.demo.kube import Kube
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from tests.e2e import release
from tests.e2e.oracle.trainer import Trainer

CHART = str(repository_root() / "charts" / "moontide")
LEVEL, VARIABLE = "WARNING", "MOONTIDE_LOG_LEVEL"


@pytest.fixture(name="revision")
def _revision(target: Target, kube: Kube) -> Iterator[str]:
    """The revision of the release that the demo made; it is what there is afterwards, whatever happens."""
    before = release.revision(kube)
    yield before
    if release.environment(kube, VARIABLE) == LEVEL:
        install.helm(target, "rollback", install.RELEASE, before, *release.NAMESPACE)
        release.rolled_out(kube)


def test_upgrade_and_rollback_leave_every_engine_alone(
    fleet: Fleet, target: Target, kube: Kube, texts: Prompts, references: References, revision: str
) -> None:
    values = (*release.VALUES, "--set", f"logLevel={LEVEL}")
    steps = {
        LEVEL: ("upgrade", install.RELEASE, CHART, *release.NAMESPACE, *values),
        release.environment(kube, VARIABLE): ("rollback", install.RELEASE, revision, *release.NAMESPACE),
    }
    assert len(steps) == 2
    trainer = Trainer(fleet, references)
    trainer.begin()
    before = release.engines(fleet)
    generation = kube.get("deployment", fleet.deployment, fleet.namespace)["metadata"]["generation"]
    for level, command in steps.items():
        prompts = dict(enumerate(texts.kept))
        with Load(fleet.replicas(), fleet.model, prompts, clients=2) as load:
            install.helm(target, *command)
            release.rolled_out(kube)
        assert release.environment(kube, VARIABLE) == level
        assert load.answers
        assert [each for each in load.answers if each.status != 200] == []
        assert release.engines(fleet) == before
        assert kube.get("deployment", fleet.deployment, fleet.namespace)["metadata"]["generation"] == generation

        trainer.change(None, hold=False)
        assert trainer.epochs == sorted(set(trainer.epochs))
        number = int(fleet.get_policy()["spec"]["version"])
        for replica in fleet.replicas():
            answer = replica.ask(fleet.model, 0, texts.kept[0])
            assert (answer.status, answer.version, answer.epoch) == (200, str(number), trainer.epochs[-1])
            assert trainer.by_version[str(number)][0].equals(answer)
        assert release.engines(fleet) == before
