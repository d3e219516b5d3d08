"""Which replica that fell back is restarted, and when none is."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest

from moontide.api.v1alpha1 import PolicyVersionSpec, PolicyVersionStatus, Preparation, ReplicaFailure, Update
from moontide.planning.model import EngineStatus, Replica, StoreStatus
from moontide.planning.reattach import AGAIN_SECONDS, READY_SECONDS, Look, decide, fallen, is_settled

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
ATTACHED = StoreStatus(configured=True, attached=True)
FALLEN = StoreStatus(configured=True, attached=False, reason="Fallback: nobody there")


def _ago(seconds: float) -> dt.datetime:
    return NOW - dt.timedelta(seconds=seconds)


def _replica(name: str, store: StoreStatus = FALLEN, started: float | None = 600, **more: Any) -> Replica:
    said = {"state": "open", "weights_version": "7", **more.pop("said", {})}
    status = EngineStatus(
        boot_id=name, epoch=4, version="7", clean=False, drained=False, running=0, store=store, **said
    )
    given: dict[str, Any] = {"status": status, "may_have_served": True, **more}
    return Replica(
        name=name,
        pod=name,
        pod_uid=name,
        fleet="u",
        address="10.0.0.9:8001",
        container_id="c",
        container_started=None if started is None else _ago(started),
        **given,
    )


LOOK = Look(
    replicas=(_replica("c"), _replica("b"), _replica("a", ATTACHED)),
    wanted=3,
    max_unavailable=1,
    ready_since=_ago(READY_SECONDS),
    complete=True,
    settled=True,
    comes_with="7",
    now=NOW,
)


def test_one_at_a_time_by_name() -> None:
    assert [each.name for each in fallen(LOOK.replicas)] == ["b", "c"]
    found = decide(LOOK)
    assert found.replica is not None
    assert found.replica.name == "b"
    assert not found.waits


def test_nothing_to_do() -> None:
    apart = _replica("a", StoreStatus(configured=True, attached=False, reason="rank 0: the store was closed"))
    none = _replica("b", StoreStatus(configured=False, attached=False, reason="NotConfigured"))
    found = decide(replace(LOOK, replicas=(apart, none), wanted=2))
    assert (found.replica, found.waits) == (None, "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ready_since": None}, "ready for a minute"),
        ({"ready_since": _ago(READY_SECONDS - 1)}, "ready for a minute"),
        ({"max_unavailable": 0}, "maxUnavailable is 0"),
        ({"settled": False}, "after the change of the policy"),
        ({"complete": False}, "every replica serves"),
        ({"wanted": 4}, "every replica serves"),
        ({"replicas": (*LOOK.replicas, _replica("d", ATTACHED, terminating=True))}, "every replica serves"),
        ({"replicas": (*LOOK.replicas, _replica("d", ATTACHED, status=None))}, "every replica serves"),
        ({"replicas": (_replica("b"), _replica("a", said={"state": "closed"})), "wanted": 2}, "every replica serves"),
        ({"comes_with": "6"}, "push them again"),
        ({"replicas": (_replica("b", url="http://b:1"),), "wanted": 1}, "launched by others"),
        ({"replicas": (_replica("b", started=30),), "wanted": 1}, "was ready when it started"),
        ({"replicas": (_replica("b", started=None),), "wanted": 1}, "was ready when it started"),
    ],
)
def test_it_waits_and_says_what_for(change: dict[str, Any], why: str) -> None:
    found = decide(replace(LOOK, **change))
    assert found.replica is None
    assert why in found.waits


def test_weights_that_a_new_pod_loads_by_itself_are_no_reason_to_wait() -> None:
    pushed = replace(LOOK, replicas=(_replica("b", said={"weights_version": "9"}),), wanted=1)
    assert decide(pushed).replica is None
    assert decide(replace(pushed, comes_with=None)).replica is not None
    both = replace(LOOK, replicas=(*pushed.replicas, _replica("c")), wanted=2)
    chosen = decide(both).replica
    assert chosen is not None
    assert chosen.name == "c"


def test_a_replica_that_fell_back_beside_a_ready_pool_is_tried_again_after_an_hour() -> None:
    late = replace(LOOK, ready_since=_ago(2 * AGAIN_SECONDS), wanted=1)
    assert decide(replace(late, replicas=(_replica("b", started=AGAIN_SECONDS - 1),))).replica is None
    assert decide(replace(late, replicas=(_replica("b", started=AGAIN_SECONDS),))).replica is not None


def test_settled_is_a_policy_whose_last_change_is_over() -> None:
    spec = PolicyVersionSpec.model_validate({"version": 7})
    over = Update(epoch=4, version="7", started_at="2026-01-02T03:04:05Z", resumed_at="2026-01-02T03:04:06Z")
    done = PolicyVersionStatus(observed_generation=3, epoch=4, target_version="7", last_update=over)
    assert is_settled(spec, 3, done)
    failure = ReplicaFailure(replica="a", step="drain", reason="StoreBusy", since="2026-01-02T03:04:05Z")
    coming = Preparation(version="8", epoch=5, started_at="2026-01-02T03:04:05Z")
    for status in (
        None,
        PolicyVersionStatus(),
        done.model_copy(update={"target_version": "6"}),
        done.model_copy(update={"observed_generation": 2}),
        done.model_copy(update={"reset_nonce": "again"}),
        done.model_copy(update={"last_update": over.model_copy(update={"resumed_at": None})}),
        done.model_copy(update={"failures": (failure,)}),
        done.model_copy(update={"preparation": coming}),
    ):
        assert not is_settled(spec, 3, status), status
    assert is_settled(
        spec, 3, done.model_copy(update={"preparation": coming.model_copy(update={"outcome": "Expired"})})
    )
