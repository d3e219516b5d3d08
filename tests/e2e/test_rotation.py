"""The tokens of a fleet's admin ports and of its pool's wiper are rotated while it serves and changes.

No request fails, no change, and nothing restarts. Worth about a minute: only a real kubelet brings the Secrets' new
content to each pod at a time of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from hack.demo.cold import References
from hack.demo.fleet import Fleet, Replica
from hack.demo.kube import Kube, wait
from hack.demo.load import Load
from hack.demo.prompts import Prompts
from moontide import labels, naming
from tests.e2e import release
from tests.e2e.oracle.trainer import Trainer

OVERLAP = "MOONTIDE_TOKEN_OVERLAP_SECONDS"
ROTATED_SECONDS = 240.0
"""Bounds a rotation that does not end; a kubelet that was told to look every ten seconds needs thirty."""


@pytest.fixture
def short_overlap(kube: Kube) -> Iterator[None]:
    """An operator that has engines take both tokens for seconds, where the chart allows a minute at least."""

    def restarted(seconds: str) -> None:
        kube.run("set", "env", f"deployment/{release.DEPLOYMENT}", *release.NAMESPACE, f"{OVERLAP}={seconds}")
        release.rolled_out(kube)

    before = release.environment(kube, OVERLAP)
    try:
        # Longer than a change takes on a machine that stands still for a while: one must see it.
        restarted("25")
        yield
    finally:
        restarted(before)


@dataclass(frozen=True)
class Rotated:
    """What has a token that is rotated: its kind and name, where its status tells of it, and its Secret."""

    kind: str
    name: str
    field: str
    secret: str


def _both(fleet: Fleet) -> tuple[Rotated, Rotated]:
    """The fleet and its pool."""
    return (
        Rotated("ifd", fleet.deployment, "adminToken", naming.admin_secret(fleet.deployment)),
        Rotated("kvp", fleet.pool, "wiperToken", naming.wiper_secret(fleet.pool)),
    )


def _phase(fleet: Fleet, what: Rotated, name: str) -> str:
    """Of the rotation with this name: empty before it began, ``Current`` when it is over."""
    token = fleet.kube.get(what.kind, what.name, fleet.namespace)["status"].get(what.field) or {}
    own = {str(token.get(key) or "").partition("@")[0] for key in ("rotation", "other")}
    return str(token["phase"]) if name in own else ""


def _tokens(fleet: Fleet, what: Rotated) -> list[str]:
    """The lines of the Secret, the one in use first."""
    return fleet.kube.secret(what.secret, "token", fleet.namespace).split()


def _takes(replica: Replica, token: str) -> int:
    """What a replica's admin port answers to a token."""
    url, headers = f"{replica.admin}/moontide/v1/status", {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers, timeout=60, trust_env=False).status_code


def _counts(fleet: Fleet, token: str) -> int:
    """What the pool's wiper answers to a token."""
    store = fleet.store()
    url = f"{store.reach.url(store.pod, naming.WIPER_PORT)}/moontide/v1/keys"
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(url, params={"namespace": "x"}, headers=headers, timeout=30, trust_env=False).status_code


def _master(fleet: Fleet) -> tuple[str, int]:
    """Its pod, and how often its containers were started again."""
    pod = fleet.store().pod
    return pod["metadata"]["uid"], sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


@pytest.mark.usefixtures("short_overlap")
def test_a_rotation_under_load_costs_no_request_no_change_and_no_restart(
    fleet: Fleet, kube: Kube, texts: Prompts, references: References
) -> None:
    trainer = Trainer(fleet, references)
    trainer.begin()
    before, master = release.engines(fleet), _master(fleet)
    engines, wiper = _both(fleet)
    (old,), (old_of_wiper,) = _tokens(fleet, engines), _tokens(fleet, wiper)
    name = str(time.time_ns())
    changes: Counter[str] = Counter()
    deadline = time.monotonic() + ROTATED_SECONDS
    with Load(fleet.replicas(), fleet.model, dict(enumerate(texts.kept)), clients=2) as load:
        for each in (engines, wiper):
            kube.run(
                *("annotate", each.kind, each.name, "--namespace", fleet.namespace),
                *("--overwrite", f"{labels.ROTATE_TOKEN}={name}"),
            )
        while (phases := tuple(_phase(fleet, each, name) for each in (engines, wiper))) != ("Current", "Current"):
            assert time.monotonic() < deadline, (phases, fleet.kube.get("kvp", fleet.pool, fleet.namespace)["status"])
            trainer.change(None, hold=False)
            changes.update({f"{each.kind} {phase}": 1 for each, phase in zip((engines, wiper), phases, strict=True)})
    failed = [answer for answer in load.answers if answer.status != 200]
    print(f"changes by phase of the rotation: {dict(changes)}; {len(load.answers)} requests, {len(failed)} failed")
    assert failed == []
    for each in (engines, wiper):
        assert changes[f"{each.kind} Introducing"] > 0
        assert changes[f"{each.kind} Overlapping"] > 0
    assert trainer.epochs == sorted(set(trainer.epochs))
    assert (release.engines(fleet), _master(fleet)) == (before, master)

    (new,) = _tokens(fleet, engines)
    assert new != old
    assert {replica.name: (_takes(replica, old), _takes(replica, new)) for replica in fleet.replicas()} == {
        replica.name: (401, 200) for replica in fleet.replicas()
    }
    (new_of_wiper,) = _tokens(fleet, wiper)
    assert new_of_wiper != old_of_wiper
    assert (_counts(fleet, old_of_wiper), _counts(fleet, new_of_wiper)) == (401, 200)

    def told() -> bool:
        events = [each for each in kube.list("events", fleet.namespace) if each.get("reason") == "TokenRotated"]
        return {each["involvedObject"]["kind"] for each in events} == {"InferenceDeployment", "KVCachePool"}

    wait(lambda: told() or None, 60, "Events")

    trainer.change(None, hold=False)
    version = str(fleet.get_policy()["spec"]["version"])
    for replica in fleet.replicas():
        answer = replica.ask(fleet.model, 0, texts.kept[0])
        assert (answer.status, answer.version, answer.epoch) == (200, version, trainer.epochs[-1])
        assert trainer.by_version[version][0].equals(answer)
