"""A fleet with replicas that fell back: what its status says, and which pod is deleted."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import InferenceDeploymentSpec
from moontide.kube.client import Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL
from moontide.planning.model import EngineStatus, Fleet, Replica, StoreStatus
from moontide.planning.reattach import Reattach
from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile import reattach
from moontide.reconcile.fleets import unasked
from moontide.resources import engine
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
FALLEN = StoreStatus(configured=True, attached=False, reason="Fallback: nobody there")
READY_AT = dt.datetime(2026, 1, 1, 23, 0, tzinfo=dt.UTC)


def _resource(kind: Any, spec: dict[str, Any], status: dict[str, Any] | None = None) -> Resource[Any]:
    metadata = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}
    return parse(kind, {"metadata": metadata, "spec": spec, **({"status": status} if status else {})})


def _fleet(**more: Any) -> Resource[Any]:
    return _resource(DEPLOYMENT, {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}, **more})


def _pool(ready: str = "True", **status: Any) -> Resource[Any]:
    condition = {"type": "Ready", "status": ready, "reason": "Serving", "lastTransitionTime": "2026-01-01T23:00:00Z"}
    return _resource(POOL, {}, {"conditions": [condition], **status})


def _replica(store: StoreStatus = FALLEN, name: str = "chat-1", **more: Any) -> Replica:
    """A pod as the API server sends it, whose engine started ten minutes before the pool was ready."""
    state = {"running": {"startedAt": (READY_AT - dt.timedelta(minutes=10)).isoformat()}}
    container = {"name": "engine", "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": state}
    pod = k8s.V1Pod.from_dict(
        {
            "metadata": {"name": name, "namespace": "ns", "uid": f"pod-{name}", "labels": labels.engine_labels("chat")},
            "status": {"phase": "Running", "containerStatuses": [{**container, "containerID": "c://1"}]},
        }
    )
    assert pod is not None
    base = unasked(pod, _fleet().meta, "ns")
    said: dict[str, Any] = {"state": "open", "weights_version": "7", "store": store, **more}
    status = EngineStatus(boot_id=name, epoch=4, version="7", clean=False, drained=False, running=0, **said)
    return Replica(**{**vars(base), "status": status})


def _judge(cluster: Cluster, resource: Resource[Any], *replicas: Replica, **more: Any) -> Reattach:
    given: dict[str, Any] = {"pool": _pool(), "policy": None, "complete": True, **more}
    return reattach.judge(cluster.ctx, resource, Fleet(name="chat", uid="u", replicas=replicas), **given)


def test_crash_alone_is_told_to_the_engine() -> None:
    def told(**kv_cache: Any) -> dict[str, Any]:
        spec = InferenceDeploymentSpec.model_validate(
            {"model": MODEL, **({"kvCache": {"poolRef": {"name": "kv"}, **kv_cache}} if kv_cache else {})}
        )
        return {each.name: each.value for each in engine.environment(spec, "u", "cpu")}

    assert told(onPoolFailure="Crash")["MOONTIDE_ON_POOL_FAILURE"] == "Crash"
    assert "MOONTIDE_ON_POOL_FAILURE" not in told(onPoolFailure="Fallback")
    assert "MOONTIDE_ON_POOL_FAILURE" not in told()


def test_the_condition_names_who_fell_back_and_what_comes_next() -> None:
    around = ifd.Around(pool=_pool())
    attached = _replica(StoreStatus(configured=True, attached=True), "chat-2")

    def verdict(store: StoreStatus, found: Reattach) -> tuple[str, str, str]:
        fleet = Fleet(name="chat", uid="u", replicas=(_replica(store), attached))
        seen = ifd.Seen(around=around, deployment=None, fleet=fleet, reattach=found)
        said = ifd.kv_cache_attached(_fleet(), seen)
        return said.status, said.reason, said.message

    status, reason, message = verdict(FALLEN, Reattach(waits="it waits"))
    assert (status, reason) == ("False", "Fallback")
    assert "chat-1 (Fallback: nobody there); it waits" in message
    assert "chat-2" not in message
    assert verdict(FALLEN, Reattach(_replica()))[2].endswith("pod chat-1 is made anew now")
    lost = StoreStatus(configured=True, attached=False, reason="rank 0: the store was closed")
    assert verdict(lost, Reattach())[1] == "NotAttached"


def test_a_pool_is_ready_since_its_condition_says_so_or_its_master_started() -> None:
    assert reattach.ready_since(None) is None
    assert reattach.ready_since(_resource(POOL, {})) is None
    assert reattach.ready_since(_pool("False")) is None
    assert reattach.ready_since(_pool()) == READY_AT
    assert reattach.ready_since(_pool(masterStartedAt="2026-01-01T22:00:00Z")) == READY_AT
    later = reattach.ready_since(_pool(masterStartedAt="2026-01-01T23:30:00Z"))
    assert later == READY_AT + dt.timedelta(minutes=30)


def test_a_policy_that_is_missing_or_changes_is_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    update = {"epoch": 4, "version": "7", "startedAt": "2026-01-01T00:00:00Z", "resumedAt": "2026-01-01T00:00:01Z"}
    done = {"observedGeneration": 3, "epoch": 4, "targetVersion": "7", "lastUpdate": update}
    policy = _resource(POLICY, {"version": 7}, done)
    following = _fleet(policyRef={"name": "p"})
    assert _judge(cluster, _fleet(), _replica()).replica is not None
    assert _judge(cluster, following, _replica()).replica is None
    assert _judge(cluster, following, _replica(), policy=policy).replica is not None
    busy = _resource(POLICY, {"version": 8}, done)
    assert "change of the policy" in _judge(cluster, following, _replica(), policy=busy).waits
    pushed = _replica(weights_version="9")
    assert _judge(cluster, following, pushed, policy=policy).replica is None
    loads = _resource(POLICY, {"version": 7, "weights": "Load", "weightsSource": "/models/{version}"}, done)
    assert _judge(cluster, following, pushed, policy=loads).replica is not None


async def test_the_pod_is_deleted_with_an_event_and_nothing_else_is(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    resource = _fleet(replicas=2)
    await reattach.act(cluster.ctx, resource, Reattach(waits="it waits"))
    assert (cluster.kube.deleted, cluster.kube.events) == ([], [])
    found = _judge(cluster, resource, _replica(), _replica(name="chat-2"))
    await reattach.act(cluster.ctx, resource, found)
    assert cluster.kube.deleted == [("ns", "chat-1")]
    assert [event[-1] for event in cluster.kube.events] == ["Reattaching"]


async def test_a_fleet_is_admitted_without_its_pool_and_joins_it_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    kube = cluster.kube
    since = "2026-01-01T23:00:00Z"
    ready = {"type": "Ready", "status": "False", "reason": "MasterUnreachable", "lastTransitionTime": since}
    pool = kube.put("KVCachePool", "ns", "kv", {})
    pool["status"] = {"conditions": [ready]}
    fleet = kube.put("InferenceDeployment", "ns", "chat", {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}})
    double = cluster.pod(fleet, "chat-1", "10.0.0.1")
    double.idle.fell_back = "nobody there"
    (container,) = kube.pods[0].status.container_statuses
    container.state.running.started_at = READY_AT - dt.timedelta(minutes=10)
    owner = k8s.V1OwnerReference(
        api_version="moontide.dev/v1alpha1",
        kind="InferenceDeployment",
        name="chat",
        uid=fleet["metadata"]["uid"],
        controller=True,
    )
    child = k8s.V1Deployment(
        metadata=k8s.V1ObjectMeta(generation=1, owner_references=[owner]),
        spec=k8s.V1DeploymentSpec(selector=k8s.V1LabelSelector(), template=k8s.V1PodTemplateSpec()),
        status=k8s.V1DeploymentStatus(
            replicas=1, ready_replicas=1, updated_replicas=1, available_replicas=1, observed_generation=1
        ),
    )

    async def get_child(namespace: str, name: str) -> k8s.V1Deployment:
        return child

    monkeypatch.setattr(kube, "get_child_deployment", get_child)
    await ifd.reconcile(cluster.ctx, "ns", "chat")
    assert double.state[0] == "open"
    status, reason, message = kube.condition("InferenceDeployment", "ns", "chat", "KVCacheAttached")
    assert (status, reason) == ("False", "Fallback")
    assert "chat-1 (Fallback: nobody there); its pod is made anew when" in message
    assert kube.deleted == []

    pool["status"] = {"conditions": [{**ready, "status": "True", "reason": "Serving"}]}
    await ifd.reconcile(cluster.ctx, "ns", "chat")
    assert kube.deleted == [("ns", "chat-1")]
    assert [event[-1] for event in kube.events].count("Reattaching") == 1
    await ifd.reconcile(cluster.ctx, "ns", "chat")
    assert kube.deleted == [("ns", "chat-1")]
    await cluster.http.close()
