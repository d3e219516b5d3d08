"""Memory nodes: their manifest, and a pool's reconcile that says what becomes of keys before and while nodes go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import KVCachePoolSpec
from moontide.resources import engine, storenodes
from tests.unit.operator.poolworld import MIB, OWNER, World


def _spec(**nodes: Any) -> KVCachePoolSpec:
    return KVCachePoolSpec.model_validate({"memory": {"perReplica": "0", "storeNodes": nodes}})


def _wire(spec: KVCachePoolSpec) -> dict[str, Any]:
    made = storenodes.deployment("kv", "ns", OWNER, spec, "moon:1")
    wire: dict[str, Any] = k8s.ApiClient().sanitize_for_serialization(made)
    return wire


def test_pods_that_lend_and_drain() -> None:
    wire = _wire(_spec(replicas=3, segmentSize="2Gi", drainSeconds=90))
    assert wire["metadata"]["name"] == "kv-nodes"
    assert wire["spec"]["replicas"] == 3
    assert wire["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert wire["spec"]["selector"]["matchLabels"] == labels.store_node_labels("kv")
    pod = wire["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 110
    (container,) = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["MOONTIDE_SEGMENT_BYTES"] == str(2 * 2**30)
    assert env["MOONTIDE_DRAIN_SECONDS"] == "90"
    assert env["MOONTIDE_MASTER_ADDRESS"] == "kv-master.ns.svc:50051"
    assert env["MOONTIDE_MASTER_METRICS"] == "http://kv-master.ns.svc:9003"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9005}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 9005}
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": str(2 * 2**30 + 256 * MIB)}}


def test_restricted_and_not_the_masters_pods() -> None:
    pod = _wire(_spec())["spec"]["template"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["automountServiceAccountToken"] is False
    wanted = labels.store_labels("kv")
    assert any(pod["metadata"]["labels"].get(key) != value for key, value in wanted.items())


def test_resources_of_the_spec_win() -> None:
    for given in ({"limits": {"memory": "8Gi", "cpu": "2"}}, {"requests": {"memory": "5Gi", "cpu": "1"}}):
        container = _wire(_spec(resources=given))["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"] == given


def test_a_node_asks_for_cpu_whatever_it_asks_of_memory() -> None:
    """One that asks for none gets what busy engines beside it leave."""
    container = _wire(_spec(resources={"limits": {"memory": "8Gi"}}))["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"memory": "8Gi"}, "requests": {"cpu": "100m"}}


def test_nodes_that_are_not_wanted_any_more_are_scaled_down() -> None:
    assert _wire(KVCachePoolSpec())["spec"]["replicas"] == 0


def test_engines_that_lend_nothing_say_so_in_the_connectors_words() -> None:
    text = engine.mooncake_json("ns", "kv", _spec())
    assert '"mode": "standalone-store"' in text
    assert '"global_segment_size": 0' in text
    assert '"mode": "embedded"' in engine.mooncake_json("ns", "kv", KVCachePoolSpec())


def _segment(host: str, used: int, capacity: int) -> dict[str, Any]:
    return {
        "segment_name": f"{host}:12345",
        "allocator_used_bytes": used,
        "allocator_capacity_bytes": capacity,
        "status": "OK",
    }


async def test_a_pool_without_nodes_has_nothing_of_them() -> None:
    world = World(None, None)
    await world.reconcile()
    assert [each[1] for each in world.said if each[0] == "apply"] == ["kv-master"]
    assert world.status.store_nodes is None
    assert [each.type for each in world.status.conditions] == ["Ready", "Degraded"]


async def test_nodes_are_made_and_counted() -> None:
    world = World({"replicas": 2}, None)
    await world.reconcile()
    assert ("apply", "kv-nodes", "2") in world.said
    assert world.condition("StoreNodesReady") == ("True", "Lending")
    assert (world.status.store_nodes.replicas, world.status.store_nodes.ready) == (2, 2)


async def test_it_is_said_before_nodes_go() -> None:
    world = World({"replicas": 1}, 2)
    world.pod("kv-nodes-a", "10.0.0.1")
    world.pod("kv-nodes-b", "10.0.0.2")
    world.segments = [_segment("10.0.0.1", 100 * MIB, 100 * MIB), _segment("10.0.0.2", 100 * MIB, 120 * MIB)]
    await world.reconcile()
    event, applied = (
        next(i for i, each in enumerate(world.said) if each[:2] == wanted)
        for wanted in (("event", "StoreNodesScaledDown"), ("apply", "kv-nodes"))
    )
    assert event < applied
    assert "from 2 to 1" in world.said[event][2]
    assert "90 MiB are dropped" in world.said[event][2]
    assert world.said[event][3] == "Warning"


async def test_removing_the_field_scales_down_and_says_so() -> None:
    world = World(None, 2)
    world.pod("kv-nodes-a", "10.0.0.1", leaving=True)
    await world.reconcile()
    assert ("apply", "kv-nodes", "0") in world.said
    assert any(each[:2] == ("event", "StoreNodesScaledDown") for each in world.said)
    assert world.condition("StoreNodesReady") == ("False", "Draining")


@pytest.mark.parametrize(("moved", "type"), [(40 * MIB, "Normal"), (10 * MIB, "Warning")])
async def test_a_node_that_goes_is_watched_to_its_end(moved: int, type: str) -> None:
    world = World({"replicas": 1}, 1)
    world.pod("kv-nodes-a", "10.0.0.1", leaving=True)
    world.drain = {"reason": "Draining", "held_bytes": 40 * MIB, "moved_keys": 1, "moved_bytes": MIB, "ended": False}
    assert await world.reconcile() <= 1
    assert world.condition("StoreNodesReady") == ("False", "Draining")
    assert world.status.store_nodes.leaving == ("kv-nodes-a moves its keys: 1 so far, 1 MiB of 40 MiB",)
    world.drain = {**world.drain, "reason": "TimeIsOver", "moved_bytes": moved, "ended": True}
    await world.reconcile()
    (left,) = (each for each in world.said if each[:2] == ("event", "StoreNodeLeft"))
    assert left[3] == type


async def test_somebody_elses_deployment_is_not_touched() -> None:
    world = World(None, 2)
    other = k8s.V1OwnerReference(api_version="v1", kind="Other", name="x", uid="other", controller=True)

    async def theirs(namespace: str, name: str) -> Any:
        return SimpleNamespace(metadata=k8s.V1ObjectMeta(owner_references=[other]), spec=None, status=None)

    world.get_child_deployment = theirs  # type: ignore[method-assign]
    await world.reconcile()
    assert [each[1] for each in world.said if each[0] == "apply"] == ["kv-master"]
