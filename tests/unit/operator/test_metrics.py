"""What Prometheus is told: steps, changes of policy, and the gauges of resources, which go with them."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moontide.api.v1alpha1 import (
    ClosedReplica,
    Condition,
    InferenceDeploymentStatus,
    KVCachePoolStatus,
    PolicyVersionStatus,
    ReplicaCounts,
    ReplicaFailure,
    Update,
)
from moontide.handlers.loops import Key, Loops
from moontide.metrics import GAUGES, Metrics
from moontide.planning.model import Collect, Command, Fleet, Replica, Result, Step, Wipe

BEGAN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def stamp(seconds: float) -> str:
    return (BEGAN + dt.timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample as a scrape shows it: ``name{label=value,...}``."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def condition(type: str, status: str) -> Condition:
    return Condition(type=type, status=status, reason="X", last_transition_time=stamp(0))  # type: ignore[arg-type]


def change(**at: float) -> Update:
    times = {name: stamp(seconds) for name, seconds in at.items() if name.endswith("_at")}
    more = {name: value for name, value in at.items() if not name.endswith("_at")}
    return Update(**{"epoch": 7, "version": "v", "started_at": stamp(0), **times, **more})  # type: ignore[arg-type]


def test_steps_are_counted_by_what_came_of_them() -> None:
    metrics = Metrics()
    replica, fleet = Replica("r", "u", "f", "10.0.0.1:8001", "c", True), Fleet("f", "u")
    metrics.acted(
        [
            Result(Command(Step.QUIESCE, replica, 2), True, seconds=0.02),
            Result(Command(Step.QUIESCE, replica, 2), False, "Unreachable", seconds=3.0),
            Result(Command(Step.DRAIN, replica, 2), False, "RequestsRunning", seconds=0.1),
            Result(Wipe(fleet), True, removed=11),
            Result(Collect(fleet, ("s",)), True, removed=3),
            Result(Collect(fleet, ("s",)), False, "KeysLeft", removed=2),
        ]
    )
    seen = values(metrics)
    assert seen["moontide_steps_total{outcome=done,step=quiesce}"] == 1
    assert seen["moontide_steps_total{outcome=failed,step=quiesce}"] == 1
    assert seen["moontide_steps_total{outcome=waited,step=drain}"] == 1
    assert seen["moontide_step_seconds_count{step=quiesce}"] == 2
    assert seen["moontide_step_seconds_bucket{le=0.025,step=quiesce}"] == 1
    assert seen["moontide_keys_removed_total{step=wipe}"] == 11
    assert seen["moontide_keys_removed_total{step=collect}"] == 5


def test_each_stage_of_a_change_is_observed_once() -> None:
    metrics = Metrics(now=lambda: BEGAN + dt.timedelta(seconds=30))
    looks = [
        PolicyVersionStatus(epoch=6),
        PolicyVersionStatus(epoch=7, last_update=change()),
        PolicyVersionStatus(epoch=7, last_update=change(quiesced_at=1)),
        PolicyVersionStatus(epoch=7, last_update=change(quiesced_at=1)),
        PolicyVersionStatus(epoch=7, last_update=change(quiesced_at=1, resumed_at=4, pause_seconds=2.5)),
    ]
    ages = []
    for before, now in itertools.pairwise(looks):
        metrics.policy("ns", "p", before, now)
        ages.append(values(metrics)["moontide_policy_change_age_seconds{namespace=ns,policy=p}"])
    metrics.policy("ns", "p", looks[-1], looks[-1])
    seen = values(metrics)
    assert ages == [30, 30, 30, 0]
    assert seen["moontide_change_seconds_count{stage=quiesced}"] == 1
    assert seen["moontide_change_seconds_sum{stage=resumed}"] == 4
    assert "moontide_change_seconds_count{stage=wiped}" not in seen
    assert (seen["moontide_pause_seconds_count{}"], seen["moontide_pause_seconds_sum{}"]) == (1, 2.5)


def test_a_change_that_a_later_leader_finishes_is_seen_by_it() -> None:
    metrics = Metrics()
    before = PolicyVersionStatus(epoch=7, last_update=change(quiesced_at=1))
    metrics.policy("ns", "p", before, PolicyVersionStatus(epoch=7, last_update=change(quiesced_at=1, resumed_at=2)))
    seen = values(metrics)
    assert seen["moontide_change_seconds_count{stage=resumed}"] == 1
    assert "moontide_change_seconds_count{stage=quiesced}" not in seen
    assert seen["moontide_pause_seconds_count{}"] == 0


def test_gauges_of_resources_go_with_them() -> None:
    metrics = Metrics()
    failure = ReplicaFailure(replica="r", step="drain", reason="X", since=stamp(0))
    status = PolicyVersionStatus(
        epoch=7,
        replicas=ReplicaCounts(total=5, current=3, closed=1),
        failures=(failure,),
        failures_omitted=2,
        conditions=(condition("Current", "False"), condition("Degraded", "True")),
    )
    metrics.policy("ns", "p", PolicyVersionStatus(), status)
    closed = [ClosedReplica(name=str(i), reason="Starting" if i % 3 else "NoAnswer") for i in range(30)]
    fleet = InferenceDeploymentStatus(ready_replicas=3, current_replicas=2, closed=tuple(closed[:10]))
    metrics.deployment("ns", "p", 4, fleet, closed)
    metrics.pool("ns", "p", KVCachePoolStatus(keys=9, clients=2, capacity_bytes=100, allocated_bytes=40))
    seen = values(metrics)
    assert seen["moontide_policy_epoch{namespace=ns,policy=p}"] == 7
    assert seen["moontide_policy_failures{namespace=ns,policy=p}"] == 3
    states = {state: seen[f"moontide_policy_replicas{{namespace=ns,policy=p,state={state}}}"] for state in STATES}
    assert states == {"current": 3, "closed": 1, "other": 1}
    assert seen["moontide_condition{kind=PolicyVersion,name=p,namespace=ns,type=Current}"] == 0
    assert seen["moontide_condition{kind=PolicyVersion,name=p,namespace=ns,type=Degraded}"] == 1
    assert seen["moontide_deployment_replicas{deployment=p,namespace=ns,state=wanted}"] == 4
    assert seen["moontide_deployment_closed_replicas{deployment=p,namespace=ns,reason=Starting}"] == 20
    assert seen["moontide_pool_bytes{kind=allocated,namespace=ns,pool=p}"] == 40
    for kind in ("PolicyVersion", "InferenceDeployment", "KVCachePool"):
        metrics.gone(kind, "ns", "p")
        metrics.gone(kind, "ns", "never-seen")
    assert not [name for name in values(metrics) if name.partition("{")[0] in GAUGES]


STATES = ("current", "closed", "other")


async def test_the_age_of_the_queue() -> None:
    now, go, key = 100.0, asyncio.Event(), Key("PolicyVersion", "ns", "p")

    async def hang(_: Key) -> float:
        await go.wait()
        return 60.0

    loops = Loops(hang, clock=lambda: now)
    try:
        assert (loops.queue_age(), loops.running_age()) == (0, 0)
        loops.start(key)
        now += 3
        assert loops.queue_age() == 3
        await asyncio.sleep(0)
        assert (loops.queue_age(), loops.running_age()) == (0, 0)
        now += 5
        assert loops.running_age() == 5
        loops.wake(key)
        now += 2
        loops.wake(key)
        assert (loops.queue_age(), loops.running_age()) == (2, 7)
    finally:
        await loops.stop()


def test_why_a_pool_is_degraded_is_a_label_for_as_long_as_it_is() -> None:
    metrics = Metrics()
    why = {"type": "Degraded", "lastTransitionTime": stamp(0)}
    for status, reason in (("False", "AsExpected"), ("True", "ClientsDropped"), ("True", "FillAboveWatermark")):
        said = Condition.model_validate({**why, "status": status, "reason": reason})
        metrics.pool("ns", "p", KVCachePoolStatus(conditions=(said,)))
        seen = [name for name in values(metrics) if name.startswith("moontide_pool_degraded")]
        assert seen == [f"moontide_pool_degraded{{namespace=ns,pool=p,reason={reason}}}"] * (status == "True")
