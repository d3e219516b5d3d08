"""A dedicated pool has one fleet: the first, for as long as it names the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moontide.kube.client import Resource, parse
from moontide.kube.kinds import DEPLOYMENT, POOL
from moontide.reconcile import inferencedeployment, isolation
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
NAMES_IT = {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}}


def _pool(kind: str = "Dedicated", holder: str | None = None) -> Resource[Any]:
    metadata = {"name": "kv", "namespace": "ns", "uid": "u-pool"}
    status = {"status": {"holder": holder}} if holder else {}
    return parse(POOL, {"metadata": metadata, "spec": {"isolation": kind}, **status})


def _fleet(name: str, created: str) -> Resource[Any]:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "creationTimestamp": created}
    return parse(DEPLOYMENT, {"metadata": metadata, "spec": NAMES_IT})


OLD, NEW = _fleet("old", "2026-01-01T00:00:00Z"), _fleet("new", "2026-01-02T00:00:00Z")


def test_the_oldest_gets_it_first_and_who_has_it_keeps_it() -> None:
    assert isolation.holder(_pool(), [NEW, OLD]) == "uid-old"
    assert isolation.holder(_pool(holder="uid-new"), [NEW, OLD]) == "uid-new"
    assert isolation.holder(_pool(holder="uid-gone"), [NEW]) == "uid-new"
    assert isolation.holder(_pool(holder="uid-gone"), []) is None
    assert isolation.holder(_pool("Shared", "uid-old"), [OLD]) is None


def test_refusal() -> None:
    assert isolation.refusal(_pool("Shared"), NEW) is None
    assert isolation.refusal(_pool(holder="uid-new"), NEW) is None
    waiting, taken = isolation.refusal(_pool(), NEW), isolation.refusal(_pool(holder="uid-old"), NEW)
    assert waiting is not None
    assert waiting.reason == "WaitingForPool"
    assert taken is not None
    assert taken.reason == "PoolTaken"
    assert "name another pool, or write isolation: Shared" in taken.message


async def test_the_second_fleet_is_told_and_nothing_is_made_for_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    pool = cluster.kube.put("KVCachePool", "ns", "kv", {"isolation": "Dedicated"})
    for name in ("first", "second"):
        cluster.kube.put("InferenceDeployment", "ns", name, NAMES_IT)
    await inferencedeployment.reconcile(cluster.ctx, "ns", "first")
    assert cluster.kube.condition("InferenceDeployment", "ns", "first", "Progressing")[1] == "WaitingForPool"
    assert cluster.kube.applied == []
    pool["status"] = {"holder": "uid-ns-first"}
    for name in ("second", "first"):
        await inferencedeployment.reconcile(cluster.ctx, "ns", name)
    assert cluster.kube.condition("InferenceDeployment", "ns", "second", "Progressing")[:2] == ("False", "PoolTaken")
    assert {child.metadata.name.split("-")[0] for child in cluster.kube.applied} == {"first"}
    pool["status"] = {"holder": "uid-ns-second"}
    cluster.kube.applied.clear()
    await inferencedeployment.reconcile(cluster.ctx, "ns", "second")
    assert {child.metadata.name.split("-")[0] for child in cluster.kube.applied} == {"second"}
