"""When a policy may be left alone after a look that asked the API server for nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moontide.reconcile import glance, policyversion
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
FLEET = {"model": MODEL, "policyRef": {"name": "policy"}, "kvCache": {"poolRef": {"name": "kv"}}, "replicas": 1}


@pytest.fixture(name="cluster")
async def _cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A fleet of one replica that is current."""
    made = Cluster(tmp_path)
    made.kube.put("PolicyVersion", "rl", "policy", {"version": 7})
    made.kube.put("KVCachePool", "rl", "kv", {})
    made.pod(made.kube.put("InferenceDeployment", "rl", "chat", FLEET), "chat-0", "10.0.0.1")
    async with made.http:
        assert await glance.at(made.ctx, "rl", "policy") is None, "nobody is admitted yet"
        for _ in range(3):
            await policyversion.reconcile(made.ctx, "rl", "policy")
        yield made


async def _rests(cluster: Cluster) -> bool:
    """Whether a glance says so. It must never write, nor tell an engine anything."""
    said = (list(cluster.kube.events), list(cluster.kube.annotated), list(cluster.kube.deleted))
    heard = {place: list(engine.heard) for place, engine in cluster.network.engines.items()}
    status = cluster.kube.status("PolicyVersion", "rl", "policy")
    found = await glance.at(cluster.ctx, "rl", "policy")
    assert said == (cluster.kube.events, cluster.kube.annotated, cluster.kube.deleted)
    assert heard == {place: engine.heard for place, engine in cluster.network.engines.items()}
    assert status == cluster.kube.status("PolicyVersion", "rl", "policy")
    return found is not None


async def test_a_policy_that_is_current_rests_as_long_as_its_reconcile_says(cluster: Cluster) -> None:
    assert await glance.at(cluster.ctx, "rl", "policy") == await policyversion.reconcile(cluster.ctx, "rl", "policy")
    assert await _rests(cluster)


async def test_a_policy_that_rests_is_counted_by_who_begins_to_lead(cluster: Cluster) -> None:
    cluster.ctx.metrics.gone("PolicyVersion", "rl", "policy")
    name, labels = "moontide_policy_epoch", {"namespace": "rl", "policy": "policy"}
    assert cluster.ctx.metrics.registry.get_sample_value(name, labels) is None
    assert await _rests(cluster)
    assert cluster.ctx.metrics.registry.get_sample_value(name, labels) == 1


async def test_a_new_version_does_not_rest(cluster: Cluster) -> None:
    cluster.kube.put("PolicyVersion", "rl", "policy", {"version": 8})
    assert not await _rests(cluster)


async def test_a_preparation_does_not_rest(cluster: Cluster) -> None:
    cluster.kube.put("PolicyVersion", "rl", "policy", {"version": 7, "preparing": 8})
    assert not await _rests(cluster)


async def test_a_newcomer_does_not_rest(cluster: Cluster) -> None:
    fleet = cluster.kube.objects["InferenceDeployment", "rl", "chat"]
    cluster.pod(fleet, "chat-1", "10.0.0.2")
    assert not await _rests(cluster)


async def test_an_engine_that_came_anew_does_not_rest(cluster: Cluster) -> None:
    fleet = cluster.kube.objects["InferenceDeployment", "rl", "chat"]
    cluster.engine("10.0.0.1:8001", "another-boot", fleet)
    assert not await _rests(cluster)


async def test_one_that_does_not_answer_does_not_rest(cluster: Cluster) -> None:
    cluster.network.engines["10.0.0.1:8001"].silent = True
    assert not await _rests(cluster)


async def test_one_that_is_not_there_or_goes_is_left_to_the_reconcile(cluster: Cluster) -> None:
    assert await glance.at(cluster.ctx, "rl", "nobody") is None
    metadata: dict[str, Any] = cluster.kube.objects["PolicyVersion", "rl", "policy"]["metadata"]
    metadata["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert not await _rests(cluster)


async def test_adopted_engines_are_left_to_the_reconcile(cluster: Cluster) -> None:
    spec = {"policyRef": {"name": "policy"}, "endpoints": {"urls": []}}
    cluster.kube.put("InferenceDeployment", "rl", "launched", spec)
    for _ in range(3):
        await policyversion.reconcile(cluster.ctx, "rl", "policy")
    assert not await _rests(cluster)
