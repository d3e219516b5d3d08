"""Memory nodes in a real cluster: KV outlives its engine, and a node that goes takes no key with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hack.demo.fleet import Fleet, Replica
from hack.demo.install import Target
from hack.demo.kube import Object, condition, wait

NAMESPACE = "moontide-demo"
NAME = "nodes-alone"
API = "moontide.dev/v1alpha1"
START_SECONDS = 300.0
PROMPT = "the tide comes in and the moon goes out and nobody on the shore has counted the waves " * 12


def _object(kind: str, spec: Object) -> Object:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": spec}


POOL = _object(
    "KVCachePool",
    {
        # A machine that stands still for seconds is no subject here: the master would take both nodes for lost.
        "master": {"clientTtlSeconds": 30, "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}},
        "memory": {"perReplica": "0", "storeNodes": {"replicas": 2, "segmentSize": "64Mi", "drainSeconds": 30}},
    },
)
FLEET = _object(
    "InferenceDeployment",
    {
        "model": {"source": "pvc://tiny-models/policy-a", "servedName": "tiny", "version": "1"},
        "engine": {
            "device": "cpu",
            "args": ["--max-model-len", "2048", "--block-size", "32", "--dtype", "float32", "--enforce-eager"],
        },
        "resources": {"requests": {"cpu": "300m", "memory": "2Gi"}},
        "kvCache": {"poolRef": {"name": NAME}},
    },
)


@pytest.fixture(name="alone")
def _alone(target: Target, fleet: Fleet) -> Iterator[Fleet]:
    """A fleet of one engine that lends nothing, and a pool of two memory nodes."""
    kube = target.kube
    made = Fleet(kube, target.reach(), NAMESPACE, deployment=NAME, pool=NAME)
    kube.apply(POOL, FLEET)
    try:
        wait(lambda: _pool(made, "StoreNodesReady") == "True" or None, 90, "memory nodes that lend", last=_said(made))
        yield made
    finally:
        kube.run("delete", "ifd,kvp", NAME, "--namespace", NAMESPACE, "--timeout=120s", timeout=130)
        made.close()


def _pool(fleet: Fleet, kind: str) -> str:
    return str(condition(fleet.kube.get("kvp", NAME, NAMESPACE), kind)["status"])


def _said(fleet: Fleet) -> Callable[[], str]:
    return lambda: str(fleet.kube.get("kvp", NAME, NAMESPACE).get("status"))


def _serving(fleet: Fleet, other_than: str = "") -> Replica:
    """The engine, admitted."""

    def look() -> Replica | None:
        body = fleet.kube.get("ifd", NAME, NAMESPACE)
        if (body.get("status") or {}).get("current") != "1/1":
            return None
        found = [each for each in fleet.replicas() if each.uid != other_than]
        return found[0] if found else None

    return wait(look, START_SECONDS, "an admitted engine", last=lambda: str(fleet.kube.get("ifd", NAME, NAMESPACE)))


def _keys(fleet: Fleet) -> frozenset[str]:
    return fleet.store().keys(fleet.key_namespace)


def _events(fleet: Fleet, reason: str) -> list[str]:
    return [text for said, text in _all_events(fleet) if said == reason]


def _all_events(fleet: Fleet) -> list[tuple[str, str]]:
    """Reasons and messages of the pool's Events and the deployment's."""
    found = fleet.kube.list("events", NAMESPACE)
    return [(each["reason"], each["message"]) for each in found if each["involvedObject"]["name"] == NAME]


def test_kv_outlives_the_engine_and_a_node_that_goes(alone: Fleet) -> None:
    """Worth its two minutes (two starts of an engine): nothing else shows keys that survive who wrote them."""
    first = _serving(alone)
    answer = first.ask(alone.model, 0, PROMPT)
    assert answer.status == 200, answer
    written = wait(lambda: _keys(alone) or None, 30, "keys in the store", last=_said(alone))

    alone.kube.run("delete", "pod", first.name, "--namespace", NAMESPACE, "--timeout=90s", timeout=100)
    second = _serving(alone, other_than=first.uid)
    assert second.counters().external == 0
    again = second.ask(alone.model, 0, PROMPT)
    assert again.tokens == answer.tokens
    assert second.counters().external > 0

    before = _keys(alone)
    assert before >= written, f"{_said(alone)()}\n{_all_events(alone)}"
    change = {"spec": {"memory": {"storeNodes": {"replicas": 1}}}}
    alone.kube.merge("kvp", NAME, NAMESPACE, change)
    said = wait(lambda: _events(alone, "StoreNodesScaledDown") or None, 30, "an Event that says that a node goes")
    assert "memory nodes go from 2 to 1" in said[0]
    assert "dropped" not in said[0]

    def settled() -> bool | None:
        status = alone.kube.get("kvp", NAME, NAMESPACE)["status"]
        nodes = status.get("storeNodes") or {}
        return (nodes.get("replicas"), nodes.get("ready"), nodes.get("leaving", [])) == (1, 1, []) or None

    wait(settled, 120, "one memory node", last=_said(alone))
    assert _keys(alone) == before
