"""What statuses say, from what was seen. No API server and no engine."""

from __future__ import annotations

import dataclasses
import datetime as dt
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from kubernetes.aio import client as k8s

from moontide.errors import InvalidSpec
from moontide.kube.client import Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL
from moontide.planning.model import Command, EngineStatus, Fleet, LoadStatus, Replica, Step, StoreStatus, Wipe
from moontide.planning.stall import Stall
from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile import kvcachepool as kvp
from moontide.reconcile import policyversion
from moontide.reconcile.context import Context
from tests.unit.operator.paperhttp import session

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
CONTEXT = cast("Context", SimpleNamespace(now=lambda: NOW))


def _resource(kind: Any, spec: dict[str, Any], status: dict[str, Any] | None = None) -> Resource[Any]:
    metadata = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}
    return parse(kind, {"metadata": metadata, "spec": spec, **({"status": status} if status else {})})


def _fleet_resource(**spec: Any) -> Resource[Any]:
    model = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
    return _resource(DEPLOYMENT, {"model": model, "replicas": 2, **spec})


POOL_REF = {"kvCache": {"poolRef": {"name": "kv"}}}
POLICY_REF = {"policyRef": {"name": "p"}}


def _engine(**more: Any) -> EngineStatus:
    base: dict[str, Any] = {
        "boot_id": "b",
        "state": "open",
        "epoch": 4,
        "version": "7",
        "weights_version": "7",
        "clean": False,
        "drained": False,
        "running": 0,
        "engine_version": "0.32.0",
        "patches": {"gate": "applied", "two-phase": "upstream"},
        "store": StoreStatus(configured=True, attached=True),
    }
    return EngineStatus.model_validate({**base, **more})


def _replica(name: str, status: EngineStatus | None, **more: Any) -> Replica:
    given = {"pod_uid": name, "fleet": "u", "address": "10.0.0.9:8001", "container_id": "c", **more}
    return Replica(name=name, may_have_served=True, status=status, **given)


def _child(ready: int | None = None, **more: Any) -> k8s.V1Deployment:
    available = k8s.V1DeploymentCondition(type="Available", status="True", reason="MinimumReplicasAvailable")
    return k8s.V1Deployment(
        metadata=k8s.V1ObjectMeta(generation=5),
        spec=k8s.V1DeploymentSpec(selector=k8s.V1LabelSelector(), template=k8s.V1PodTemplateSpec()),
        status=k8s.V1DeploymentStatus(
            **{"ready_replicas": ready, "replicas": 2, "conditions": [available], "observed_generation": 5, **more}
        ),
    )


def _seen(*replicas: Replica, **more: Any) -> ifd.Seen:
    given = {"around": ifd.Around(), "deployment": None, **more}
    return ifd.Seen(fleet=Fleet(name="chat", uid="u", replicas=replicas), **given)


def _policy(epoch: int = 4, **spec: Any) -> Resource[Any]:
    return _resource(POLICY, {"version": 7, **spec}, {"epoch": epoch, "version": "7"})


def test_available_needs_one_that_is_ready() -> None:
    fleet = _fleet_resource()
    assert ifd.available(fleet, _seen()).reason == "NotCreated"
    assert ifd.available(fleet, _seen(deployment=_child(ready=None))).status == "False"
    assert ifd.available(fleet, _seen(deployment=_child(ready=1))).status == "True"
    assert ifd.available(_fleet_resource(replicas=0), _seen(deployment=_child(ready=None))).status == "True"
    assert ifd.available(fleet, _seen(deployment=_child(ready=1, conditions=[]))).status == "False"


def test_progressing() -> None:
    fleet = _fleet_resource()
    done = _child(ready=2, updated_replicas=2, available_replicas=2)
    assert ifd.progressing(fleet, _seen(deployment=done)).reason == "Complete"
    assert ifd.progressing(fleet, _seen(deployment=_child(2, updated_replicas=1))).status == "True"
    late = _child(2, updated_replicas=2, available_replicas=2, observed_generation=4)
    assert ifd.progressing(fleet, _seen(deployment=late)).status == "True"
    stuck = k8s.V1DeploymentCondition(type="Progressing", status="False", reason="ProgressDeadlineExceeded")
    assert ifd.progressing(fleet, _seen(deployment=_child(1, conditions=[stuck]))).reason == "ProgressDeadlineExceeded"
    stall = Stall("chat-1", "CrashLoopBackOff", "container engine ended last with exit status 1")
    stalled = ifd.progressing(fleet, _seen(deployment=_child(1, conditions=[stuck]), stall=stall))
    assert (stalled.status, stalled.reason, stalled.message) == ("False", "Stalled", f"{stall}")
    assert ifd.progressing(fleet, _seen(deployment=done, stall=stall)).reason == "Complete"
    refused = ifd.progressing(fleet, _seen(deployment=done, refusal=InvalidSpec("NameTaken", "theirs")))
    assert (refused.status, refused.reason, refused.message) == ("False", "NameTaken", "theirs")
    assert ifd.progressing(_fleet_resource(**POOL_REF), _seen(deployment=done)).reason == "WaitingForPool"


def test_kv_cache_attached() -> None:
    with_pool = ifd.Around(pool=_resource(POOL, {}))
    fleet = _fleet_resource(**POOL_REF)
    assert ifd.kv_cache_attached(_fleet_resource(), _seen()).reason == "NotConfigured"
    assert ifd.kv_cache_attached(fleet, _seen()).reason == "PoolNotFound"
    assert ifd.kv_cache_attached(fleet, _seen(around=with_pool)).status == "Unknown"
    good = _replica("a", _engine())
    apart = _replica("b", _engine(store=StoreStatus(configured=True, attached=False, reason="MasterGone")))
    assert ifd.kv_cache_attached(fleet, _seen(good, around=with_pool)).status == "True"
    verdict = ifd.kv_cache_attached(fleet, _seen(good, apart, around=with_pool))
    assert (verdict.status, verdict.reason) == ("False", "NotAttached")
    assert "b (MasterGone)" in verdict.message
    assert ifd.kv_cache_attached(fleet, _seen(_replica("c", None), around=with_pool)).status == "Unknown"


def test_current_means_open_in_the_epoch() -> None:
    fleet = _fleet_resource(**POLICY_REF)
    assert ifd.is_current(_replica("a", _engine()), fleet, 4)
    assert not ifd.is_current(_replica("a", _engine()), fleet, 5)
    assert not ifd.is_current(_replica("a", _engine(state="paused")), fleet, 4)
    assert not ifd.is_current(_replica("a", None), fleet, 4)
    assert not ifd.is_current(_replica("a", _engine(), terminating=True), fleet, 4)
    assert not ifd.is_current(_replica("a", _engine(epoch=0)), fleet, None)
    assert ifd.is_current(_replica("a", _engine(epoch=9)), _fleet_resource(), 0)


def test_policy_current() -> None:
    fleet, around = _fleet_resource(**POLICY_REF), ifd.Around(policy=_policy())
    assert ifd.policy_current(fleet, _seen(), 2).reason == "PolicyNotFound"
    assert ifd.policy_current(fleet, _seen(around=around), 1).reason == "Behind"
    assert ifd.policy_current(fleet, _seen(around=around), 2).status == "True"
    assert ifd.policy_current(_fleet_resource(), _seen(), 2).reason == "NoPolicy"
    assert ifd.policy_current(_fleet_resource(), _seen(), 0).status == "False"


def test_engine_patched() -> None:
    def verdict(*replicas: Replica) -> tuple[str, str]:
        said = ifd.engine_patched(Fleet(name="chat", uid="u", replicas=replicas))
        return said.status, said.reason

    assert verdict() == ("Unknown", "NoEngineAnswers")
    assert verdict(_replica("a", _engine())) == ("True", "Patched")
    assert verdict(_replica("a", _engine()), _replica("b", _engine(patches={}))) == ("False", "NotPatched")
    assert verdict(_replica("a", _engine(patches={"gate": "refused"}))) == ("False", "Refused")
    text = ifd.engine_patched(Fleet(name="chat", uid="u", replicas=(_replica("a", _engine()),))).message
    assert text == "vLLM 0.32.0; gate: applied, two-phase: upstream"


def test_engine_patched_names_what_is_missing_and_what_is_another_release() -> None:
    def verdict(version: str | None, *replicas: Replica) -> tuple[str, str]:
        said = ifd.engine_patched(Fleet(name="chat", uid="u", replicas=replicas), version)
        return said.reason, said.message

    old = _replica("a", _engine(engine_version="0.22.1+cpu", patches={"gate": "applied", "load": "not-applicable"}))
    assert verdict("0.22.1", old) == ("Patched", "vLLM 0.22.1; gate: applied, load: not-applicable")
    reason, message = verdict("0.22.1", old, _replica("b", _engine()))
    assert reason == "OtherVersion"
    assert "engine.version asks for 0.22.1" in message
    assert "vLLM 0.22.1 and 0.32.0" in message
    reason, message = verdict(None, _replica("a", _engine(patches={"gate": "applied", "epoch": "unverified"})))
    assert reason == "Unverified"
    assert "epoch: unverified" in message


def test_closed_replicas_say_why() -> None:
    around = ifd.Around(policy=_policy())
    replicas = (
        _replica("open", _engine()),
        _replica("paused", _engine(state="paused")),
        _replica("old-weights", _engine(state="closed", weights_version="6")),
        _replica("expired", _engine(state="closed", reason="PauseExpired")),
        _replica("silent", None, error="Timeout: no answer"),
        _replica("starting", None, container_id=None),
        _replica("going", None, terminating=True),
    )
    closed = ifd.closed_replicas(Fleet(name="chat", uid="u", replicas=replicas), around)
    assert [(each.name, each.reason) for each in closed] == [
        ("expired", "PauseExpired"),
        ("old-weights", "WaitingForWeights"),
        ("silent", "NoAnswer"),
        ("starting", "Starting"),
    ]
    assert all(each.address == "10.0.0.9:8001" for each in closed)
    unchecked = ifd.Around(policy=_policy(weights="Unchecked"))
    (only,) = ifd.closed_replicas(Fleet(name="chat", uid="u", replicas=(replicas[2],)), unchecked)
    assert only.reason == "Closed"
    loads = LoadStatus(source="/models/8", version="8", running=True, seconds=12.3)
    failed = LoadStatus(source="/models/8", version="8", running=False, error="no such folder")
    loaders = (
        _replica("a", _engine(state="closed", loading=loads)),
        _replica("b", _engine(state="closed", loading=failed)),
    )
    by_itself = ifd.Around(policy=_policy(weights="Load", weightsSource="/models/{version}"))
    said = ifd.closed_replicas(Fleet(name="chat", uid="u", replicas=loaders), by_itself)
    assert [(each.reason, each.message) for each in said] == [
        ("Loading", "/models/8 is being loaded as version 8, for 12 s so far"),
        ("LoadFailed", "no such folder"),
    ]
    many = tuple(_replica(f"r{i:02}", None) for i in range(30))
    assert len(ifd.closed_replicas(Fleet(name="chat", uid="u", replicas=many), around)) == 30


def test_a_fleet_status_as_a_whole() -> None:
    fleet = _fleet_resource(**POLICY_REF)
    seen = _seen(
        _replica("a", _engine()),
        _replica("b", _engine(epoch=3)),
        around=ifd.Around(policy=_policy()),
        deployment=_child(ready=2),
    )
    status = ifd.status_of(CONTEXT, fleet, seen)
    assert (status.ready, status.current, status.current_replicas, status.replicas) == ("2/2", "1/2", 1, 2)
    assert (status.epoch, status.version, status.observed_generation) == (4, "7", 3)
    assert status.endpoint == "chat.ns.svc:8000"
    assert len(status.conditions) == 5


def test_a_missing_policy_does_not_unsay_what_is_served() -> None:
    metadata = {"policyRef": {"name": "p"}}
    fleet = _fleet_resource(**metadata)
    before = _resource(DEPLOYMENT, fleet.model.to_wire()["spec"], {"version": "6", "epoch": 3})
    status = ifd.status_of(CONTEXT, before, _seen(_replica("a", _engine())))
    assert (status.version, status.epoch, status.current_replicas) == ("6", 3, 0)


METRICS = """# TYPE master_active_clients gauge
master_active_clients 2
# TYPE master_key_count gauge
master_key_count 40
# TYPE master_total_capacity_bytes gauge
master_total_capacity_bytes 1000
# TYPE master_allocated_bytes gauge
master_allocated_bytes 123
"""
SERVING = {"status": "ok", "service_ready": True}


async def _look(health: httpx.Response | Exception, metrics: httpx.Response) -> kvp.MasterState:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            if isinstance(health, Exception):
                raise health
            return health
        return metrics

    return await kvp.look_at_master(session(answer), "http://master:9003")


async def test_a_serving_master() -> None:
    state = await _look(httpx.Response(200, json=SERVING), httpx.Response(200, text=METRICS))
    assert state == kvp.MasterState("", "", clients=2, keys=40, capacity_bytes=1000, allocated_bytes=123)


async def test_what_else_a_master_says_is_not_read() -> None:
    more = "master_key_count_by_tenant{tenant=} 7\nmaster_put_start_requests_total abc\n# TYPE master_other gauge\n"
    counted = "# TYPE master_evicted_key_count counter\nmaster_evicted_key_count 9\n"
    segments = 'segment_total_capacity_bytes{segment="a"} 5\nsegment_total_capacity_bytes{segment="b"} 0\n'
    text = f"master_nof_allocated_bytes x\n{METRICS}{counted}# HELP a\n{segments}{more}"
    state = await _look(httpx.Response(200, json=SERVING), httpx.Response(200, text=text))
    wanted = kvp.MasterState("", "", clients=2, keys=40, capacity_bytes=1000, allocated_bytes=123, segments=1)
    assert state == dataclasses.replace(wanted, evicted_keys=9)
    state = await _look(httpx.Response(200, json=SERVING), httpx.Response(200, text=METRICS.replace("40", "forty")))
    assert state.reason == "MasterUnreadable"


@pytest.mark.parametrize(
    ("health", "metrics", "reason"),
    [
        (httpx.ConnectError("no"), httpx.Response(200, text=METRICS), "MasterUnreachable"),
        (httpx.ReadTimeout("slow"), httpx.Response(200, text=METRICS), "MasterUnreachable"),
        (httpx.Response(200, json={"service_ready": False}), httpx.Response(200, text=METRICS), "MasterNotServing"),
        (httpx.Response(200, text=""), httpx.Response(200, text=METRICS), "MasterNotServing"),
        (httpx.Response(503, json=SERVING), httpx.Response(200, text=METRICS), "MasterNotServing"),
        (httpx.Response(200, json=SERVING), httpx.Response(200, text=""), "MasterUnreadable"),
        (httpx.Response(200, json=SERVING), httpx.Response(500, text=METRICS), "MasterUnreadable"),
        (httpx.Response(200, json=SERVING), httpx.Response(200, text="<html>"), "MasterUnreadable"),
    ],
)
async def test_a_master_that_does_not_serve(
    health: httpx.Response | Exception, metrics: httpx.Response, reason: str
) -> None:
    state = await _look(health, metrics)
    assert state.reason == reason
    assert state.message
    assert state.keys is None


def test_fill_for_people() -> None:
    assert kvp.used(123, 1000) == "12 %"
    assert kvp.used(0, 0) == "0 %"
    assert kvp.used(None, 5) is None


def test_the_answers_that_tell_why_a_step_is_not_done_are_waited_for() -> None:
    replica = Replica("r", "u", "f", "10.0.0.1:8001", "c", True, status=_engine())
    silent = Replica("s", "v", "f", "10.0.0.2:8001", "c", True, status=_engine(responsive=False, running=None))
    for step in Step:
        late = policyversion.substitute(Command(step, replica, 2))
        assert (late is not None) == (step is Step.QUIESCE)
        assert policyversion.substitute(Command(step, silent, 2)) is not None
    assert policyversion.substitute(Wipe(Fleet("f", "u"))) is None
