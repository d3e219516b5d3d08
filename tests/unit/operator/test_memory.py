"""The sum of an engine's memory against its limit, and that a fleet of pods that must be killed is not applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.reconcile import inferencedeployment
from moontide.resources import memory
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
POOL = KVCachePoolSpec.model_validate({"memory": {"perReplica": "1Gi", "localBuffer": "64Mi"}})


def _spec(limit: Any = None, **more: Any) -> InferenceDeploymentSpec:
    resources = {"resources": {"limits": {"memory": limit}}} if limit is not None else {}
    return InferenceDeploymentSpec.model_validate({"model": MODEL, **resources, **more})


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ((), 1),
        (("--tensor-parallel-size", "4"), 4),
        (("-tp=2", "-pp", "3"), 6),
        (("--data-parallel-size=2", "--tensor-parallel-size", "2", "-tp", "8"), 16),
        (("--tensor-parallel-size", "many"), 1),
        (("-tp",), 1),
    ],
)
def test_ranks(args: tuple[str, ...], count: int) -> None:
    assert memory.ranks(args) == count


def test_parallelism_is_counted_where_the_spec_has_it() -> None:
    assert memory.pod_ranks(_spec()) == 1
    assert memory.pod_ranks(_spec(engine={"args": ["-tp=2"]})) == 2
    assert memory.pod_ranks(_spec(parallelism={"tensor": 4, "pipeline": 2, "nodes": 2})) == 4


def test_the_limit_is_exact() -> None:
    needed = (1024 + 64 + 1024 + 1024) * 2**20
    assert memory.too_small(_spec(needed), POOL, "cuda") is None
    said = memory.too_small(_spec(needed - 1), POOL, "cuda")
    assert said is not None
    assert "a pod needs 3136 MiB" in said
    assert "1024 MiB the pool's memory.perReplica" in said
    assert "+ 64 MiB its memory.localBuffer" in said
    assert "+ 1024 MiB sharedMemory" in said
    assert "write limits.memory: 3136Mi or more" in said


def test_each_rank_counts() -> None:
    said = memory.too_small(_spec("5Gi", engine={"args": ["-tp", "4"]}), POOL, "cuda")
    assert said is not None
    assert "4096 MiB 4 x the pool's memory.perReplica (1024 MiB) + 256 MiB 4 x its memory.localBuffer" in said
    assert "2560 MiB at least for the processes" in said


def test_what_is_not_there_does_not_count() -> None:
    assert memory.too_small(_spec(), POOL, "cuda") is None
    assert memory.too_small(_spec("2Gi"), None, "cuda") is None
    lends_nothing = KVCachePoolSpec.model_validate({"memory": {"perReplica": "0", "storeNodes": {}}})
    assert memory.too_small(_spec("2112Mi"), lends_nothing, "cuda") is None


def test_the_cpu_build_keeps_its_own_cache_in_memory_too() -> None:
    assert memory.too_small(_spec("3136Mi"), POOL, "cuda") is None
    assert "VLLM_CPU_KVCACHE_SPACE (1 GiB)" in str(memory.too_small(_spec("3136Mi"), POOL, "cpu"))
    more = _spec("5Gi", engine={"env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "8"}]})
    assert "VLLM_CPU_KVCACHE_SPACE (8 GiB)" in str(memory.too_small(more, POOL, "cpu"))


async def test_such_a_fleet_changes_nothing_and_says_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.kube.put("KVCachePool", "ns", "kv", POOL.to_wire())
    spec = {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}, "resources": {"limits": {"memory": "1Gi"}}}
    cluster.kube.put("InferenceDeployment", "ns", "chat", spec)
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    status, reason, message = cluster.kube.condition("InferenceDeployment", "ns", "chat", "Progressing")
    assert (status, reason) == ("False", "MemoryTooSmall")
    assert "a pod needs 3136 MiB" in message
    assert cluster.kube.applied == []
    cluster.kube.put("InferenceDeployment", "ns", "chat", {**spec, "resources": {"limits": {"memory": "4Gi"}}})
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    assert {child.kind for child in cluster.kube.applied} >= {"Deployment", "ConfigMap"}


async def test_engines_that_run_already_are_admitted_all_the_same(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    spec = {"model": MODEL, "resources": {"limits": {"memory": "1Gi"}}}
    running = cluster.pod(cluster.kube.put("InferenceDeployment", "ns", "chat", spec), "chat-0", "10.0.0.1")
    for _ in range(4):
        await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    assert cluster.kube.condition("InferenceDeployment", "ns", "chat", "Progressing")[1] == "MemoryTooSmall"
    assert running.state == ("open", 0)
    assert cluster.kube.applied == []
