"""The token of a fleet's admin ports is rotated while it serves and changes: no request fails, no change, no restart.

Worth about a minute: only a real kubelet brings the Secret's new content to each engine at a time of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from hack.demo.cold import References
from hack.demo.fleet import Fleet, Replica
from hack.demo.kube import Kube
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
        restarted("10")
        yield
    finally:
        restarted(before)


def _phase(fleet: Fleet, name: str) -> str:
    """Of the rotation with this name: empty before it began, ``Current`` when it is over."""
    token = fleet.kube.get("ifd", fleet.deployment, fleet.namespace)["status"].get("adminToken") or {}
    own = {str(token.get(key) or "").partition("@")[0] for key in ("rotation", "other")}
    return str(token["phase"]) if name in own else ""


def _tokens(fleet: Fleet) -> list[str]:
    """The lines of the Secret, the one in use first."""
    return fleet.kube.secret(naming.admin_secret(fleet.deployment), "token", fleet.namespace).split()


def _takes(replica: Replica, token: str) -> int:
    """What a replica's admin port answers to a token."""
    url, headers = f"{replica.admin}/moontide/v1/status", {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers, timeout=30, trust_env=False).status_code


@pytest.mark.usefixtures("short_overlap")
def test_a_rotation_under_load_costs_no_request_no_change_and_no_restart(
    fleet: Fleet, kube: Kube, texts: Prompts, references: References
) -> None:
    trainer = Trainer(fleet, references)
    trainer.begin()
    before, (old,) = release.engines(fleet), _tokens(fleet)
    name = str(time.time_ns())
    changes: Counter[str] = Counter()
    deadline = time.monotonic() + ROTATED_SECONDS
    with Load(fleet.replicas(), fleet.model, dict(enumerate(texts.kept)), clients=2) as load:
        kube.run(
            *("annotate", "ifd", fleet.deployment, "--namespace", fleet.namespace),
            *("--overwrite", f"{labels.ROTATE_TOKEN}={name}"),
        )
        while (phase := _phase(fleet, name)) != "Current":
            assert time.monotonic() < deadline, fleet.kube.get("ifd", fleet.deployment, fleet.namespace)["status"]
            trainer.change(None, hold=False)
            changes[phase] += 1
    failed = [answer for answer in load.answers if answer.status != 200]
    print(f"changes by phase of the rotation: {dict(changes)}; {len(load.answers)} requests, {len(failed)} failed")
    assert failed == []
    assert changes["Introducing"] > 0
    assert changes["Overlapping"] > 0
    assert trainer.epochs == sorted(set(trainer.epochs))
    assert release.engines(fleet) == before

    (new,) = _tokens(fleet)
    assert new != old
    assert {replica.name: (_takes(replica, old), _takes(replica, new)) for replica in fleet.replicas()} == {
        replica.name: (401, 200) for replica in fleet.replicas()
    }
    told = [each["reason"] for each in kube.list("events", fleet.namespace) if each.get("reason") == "TokenRotated"]
    assert told

    trainer.change(None, hold=False)
    version = str(fleet.get_policy()["spec"]["version"])
    for replica in fleet.replicas():
        answer = replica.ask(fleet.model, 0, texts.kept[0])
        assert (answer.status, answer.version, answer.epoch) == (200, version, trainer.epochs[-1])
        assert trainer.by_version[version][0].equals(answer)
