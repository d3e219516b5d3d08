"""Three masters: their children, what clients are told, and who is taken for the leader."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import httpx
import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec, KVCachePoolStatus
from moontide.kube.client import parse
from moontide.kube.kinds import POOL
from moontide.reconcile import kvcachepool, leadership
from moontide.reconcile.context import Context
from moontide.reconcile.leadership import Leadership, Master
from moontide.resources import engine, masters, store
from tests.unit.operator.doubles import TOKENS, FakeKube
from tests.unit.operator.paperhttp import session

OWNER = k8s.V1OwnerReference(api_version="moontide.dev/v1alpha1", kind="KVCachePool", name="kv", uid="u-1")
THREE = KVCachePoolSpec.model_validate({"master": {"replicas": 3}})
GIVEN = KVCachePoolSpec.model_validate({"master": {"replicas": 3, "etcd": {"endpoints": ["a:2379", "b:2379"]}}})
NOW = dt.datetime(2026, 11, 28, 12, 0, tzinfo=dt.UTC)


def _wire(child: Any) -> dict[str, Any]:
    made: dict[str, Any] = k8s.ApiClient().sanitize_for_serialization(child)
    return made


def _elected(spec: KVCachePoolSpec) -> masters.Election:
    found = masters.election("kv", "ns", "u-1", spec)
    assert found is not None
    return found


@pytest.fixture(name="wire")
def _three() -> dict[str, Any]:
    return _wire(masters.replicate(store.deployment("kv", "ns", OWNER, THREE, "moon:1"), _elected(THREE)))


def test_one_master_elects_nobody() -> None:
    assert masters.election("kv", "ns", "u-1", KVCachePoolSpec()) is None
    assert masters.client_address("kv", "ns", None) == "kv-master.ns.svc:50051"


def test_masters_stand_for_election_with_their_own_address_and_log_their_keys(wire: dict[str, Any]) -> None:
    master, wiper = wire["spec"]["template"]["spec"]["containers"]
    assert master["command"][-6:] == [
        "-enable_ha=true",
        "-ha_backend_type=etcd",
        "-etcd_endpoints=kv-etcd.ns.svc:2379",
        "-cluster_id=u-1",
        "-rpc_address=$(POD_IP)",
        "-enable_oplog=true",
    ]
    own = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert master["env"] == [own]
    # Only what was defined before can be named in a value.
    assert wiper["env"][0] == own
    env = {each["name"]: each.get("value") for each in wiper["env"]}
    assert len(env) == len(wiper["env"])
    assert env["MOONTIDE_MASTER_ADDRESS"] == "$(POD_IP):50051"
    assert env["MOONTIDE_ETCD_ENDPOINTS"] == "kv-etcd.ns.svc:2379"
    assert env["MC_STORE_CLUSTER_ID"] == "u-1"


def test_masters_are_replaced_one_by_one_and_each_has_time_to_catch_up(wire: dict[str, Any]) -> None:
    assert wire["spec"]["replicas"] == 3
    assert wire["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert wire["spec"]["minReadySeconds"] == masters.SETTLE_SECONDS
    assert labels.LEADER not in wire["spec"]["selector"]["matchLabels"]


def test_the_service_is_the_leaders() -> None:
    wire = _wire(masters.lead(store.service("kv", "ns", OWNER)))
    assert wire["spec"]["selector"] == {**labels.store_labels("kv"), "moontide.dev/leader": "true"}


def test_etcd_of_its_own_is_not_taken_for_a_master() -> None:
    deployment = _wire(masters.etcd_deployment("kv", "ns", OWNER, "etcd:1"))
    service = _wire(masters.etcd_service("kv", "ns", OWNER))
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == "kv-etcd"
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    chosen = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= chosen.items()
    assert not labels.store_labels("kv").items() <= chosen.items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "--advertise-client-urls=http://kv-etcd.ns.svc:2379" in container["command"]


def test_clients_are_told_where_leaders_are_elected() -> None:
    content = json.loads(engine.mooncake_json("ns", "kv", GIVEN, _elected(GIVEN)))
    assert content["master_server_address"] == "etcd://a:2379;b:2379"
    spec = InferenceDeploymentSpec.model_validate(
        {"model": {"source": "pvc://w/a", "servedName": "m"}, "kvCache": {"poolRef": {"name": "kv"}}}
    )
    one = {each.name: each.value for each in engine.environment(spec, "u", "cuda")}
    three = {each.name: each.value for each in engine.environment(spec, "u", "cuda", election=_elected(GIVEN))}
    assert dict(three.items() - one.items()) == {"MC_STORE_CLUSTER_ID": "u-1"}


def test_a_master_that_was_frozen_does_not_lead_whatever_it_says() -> None:
    frozen, elected = Master("a", "1", True, serves=True, view=2), Master("b", "2", False, serves=True, view=17)
    assert leadership.choose([frozen, elected]) == elected
    assert leadership.choose([Master("c", "3", False, view=17)]) is None


@pytest.mark.parametrize(
    ("said", "serves", "view"),
    [
        ({"service_ready": True, "view_version": 4}, True, 4),
        ({"service_ready": False, "view_version": 4}, False, 4),
        ({"service_ready": True}, True, 0),
        ([], False, -1),
    ],
)
def test_what_a_master_says_of_itself(said: object, serves: bool, view: int) -> None:
    made = leadership.heard(Master("a", "1", False), said)
    assert (made.serves, made.view) == (serves, view)


def _status(leader: str | None, *minutes_ago: float) -> KVCachePoolStatus:
    changes = tuple(leadership.timestamp(NOW - dt.timedelta(minutes=each)) for each in minutes_ago)
    return KVCachePoolStatus(leader=leader, leader_changes=changes)


def test_changes_of_the_leader_are_counted_for_ten_minutes() -> None:
    a = Master("a", "1", False, serves=True, view=1)
    assert len(leadership.follow(_status("a", 1), [a], NOW).changes) == 1
    assert len(leadership.follow(_status("b", 1), [a], NOW).changes) == 2
    assert len(leadership.follow(_status("b", 11, 1), [a], NOW).changes) == 2
    lost = leadership.follow(_status("b", 1), [], NOW)
    assert (lost.leader, lost.before, len(lost.changes)) == (None, "b", 1)
    assert len(leadership.follow(_status("b", *[1.0] * 10), [a], NOW).changes) == 10


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Leadership(3, None), "NoLeader"),
        (Leadership(3, "a", ("t",) * 4), "LeaderFlapping"),
        (Leadership(2, "a", ("t",)), "FewMasters"),
        (Leadership(3, "a", ("t",) * 3), None),
    ],
)
def test_what_degrades_a_pool(found: Leadership, reason: str | None) -> None:
    trouble = leadership.degraded(found)
    assert (trouble[0] if trouble else None) == reason
    election, degraded = leadership.elected(found, _elected(THREE)), leadership.worse(found)
    assert election.type == "LeaderElection"
    assert election.status == ("False" if found.leader is None else "True")
    assert "no Kubernetes backend" in election.message
    assert (degraded.type, degraded.status) == ("Degraded", "True") if degraded else reason is None


async def test_the_label_follows_the_leader() -> None:
    kube = FakeKube()
    for number in (1, 2, 3):
        metadata = k8s.V1ObjectMeta(
            name=f"m{number}", namespace="ns", uid=f"m{number}", labels=labels.store_labels("kv")
        )
        status = k8s.V1PodStatus(phase="Running", pod_ip=f"10.0.0.{number}")
        kube.pods.append(k8s.V1Pod(metadata=metadata, status=status))
    leader = ""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"service_ready": request.url.host == leader, "view_version": 3})

    context = Context(kube=kube, http=session(answer), tokens=TOKENS, term=lambda: 1, now=lambda: NOW)  # type: ignore[arg-type]
    before = None
    for number, pod in ((2, "m2"), (3, "m3"), (9, None)):
        leader = f"10.0.0.{number}"
        body = kube.put(POOL.kind, "ns", "kv", {"master": {"replicas": 3}})
        status = {"leader": before} if before else {}
        pool = parse(POOL, {**body, "status": status})
        found = await leadership.look(context, pool)
        await leadership.tell(context, pool, found)
        assert (found.leader, found.before, found.masters) == (pod, before, 3)
        # While nobody leads, the last one keeps the label: its wiper says so itself.
        labelled = [p.metadata.name for p in kube.pods if p.metadata and labels.LEADER in (p.metadata.labels or {})]
        assert labelled == [pod or "m3"]
        before = pod or before
    assert [each[3] for each in kube.events] == ["LeaderChanged", "LeaderChanged"]


@pytest.mark.parametrize(("spec", "own"), [(THREE, True), (GIVEN, False)])
def test_a_given_etcd_needs_none_of_its_own(spec: KVCachePoolSpec, own: bool) -> None:
    kube = FakeKube()
    pool = parse(POOL, kube.put(POOL.kind, "ns", "kv", spec.to_wire()))
    context = Context(kube=kube, http=None, tokens=TOKENS, term=lambda: 1)  # type: ignore[arg-type]
    made = [(each.kind, each.metadata.name) for each in kvcachepool.children(context, pool) if each.metadata]
    etcd = [("Service", "kv-etcd"), ("Deployment", "kv-etcd")] if own else []
    assert made == [("Secret", "kv-wiper"), *etcd, ("Service", "kv-master"), ("Deployment", "kv-master")]
