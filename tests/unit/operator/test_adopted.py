"""Engines that others launched: who is adopted, what is remembered of them, and how they are let go."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.reconcile import inferencedeployment, policyversion
from tests.unit.operator.doubles import Cluster, Engine

IFD = "InferenceDeployment"
UID = "uid-rl-chat"
A, B = "http://10.0.0.1:8001", "http://10.0.0.2:9001"


class Adopting(Cluster):
    """A fleet of adopted engines that follows a policy, in one namespace."""

    def fleet(self, *urls: str, gone: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        endpoints = {"urls": list(urls), "gone": list(gone)}
        return self.kube.put(IFD, "rl", "chat", {"policyRef": {"name": "policy"}, "endpoints": endpoints, **more})

    def policy(self, version: int = 7, **more: Any) -> None:
        self.kube.put("PolicyVersion", "rl", "policy", {"version": version, "weights": "Unchecked", **more})

    def start(self, url: str, boot: str, key_namespace: str = UID, **more: Any) -> Engine:
        fleet = self.kube.objects[IFD, "rl", "chat"]
        return self.engine(url.partition("://")[2], boot, fleet, key_namespace=key_namespace, **more)

    def stop(self, url: str) -> None:
        del self.network.engines[url.partition("://")[2]]

    async def settle(self, turns: int = 3) -> None:
        for _ in range(turns):
            await inferencedeployment.reconcile(self.ctx, "rl", "chat")
            await policyversion.reconcile(self.ctx, "rl", "policy")
        await inferencedeployment.reconcile(self.ctx, "rl", "chat")

    @property
    def status(self) -> dict[str, Any]:
        return self.kube.status(IFD, "rl", "chat")

    @property
    def marks(self) -> dict[str, str]:
        return dict(self.status.get("adopted", {}))

    def current(self) -> tuple[str, str, str]:
        return self.kube.condition("PolicyVersion", "rl", "policy", "Current")

    def progressing(self) -> tuple[str, str, str]:
        return self.kube.condition(IFD, "rl", "chat", "Progressing")

    def closed(self) -> dict[str, tuple[str, str]]:
        return {each["name"]: (each["reason"], each["message"]) for each in self.status.get("closed", [])}


@pytest.fixture(name="cluster")
async def _cluster(tmp_path: Path) -> AsyncIterator[Adopting]:
    made = Adopting(tmp_path)
    made.policy()
    made.fleet(A, B)
    async with made.http:
        yield made


async def test_engines_are_admitted_and_count_as_replicas(cluster: Adopting) -> None:
    first, second = cluster.start(A, "a1"), cluster.start(B, "b1")
    await cluster.settle()
    assert (first.state, second.state) == (("open", 1), ("open", 1))
    assert cluster.marks == {"a1": A, "b1": B}
    status = cluster.status
    assert (status["replicas"], status["ready"], status["current"]) == (2, "2/2", "2/2")
    assert "selector" not in status
    assert "endpoint" not in status
    assert cluster.progressing()[:2] == ("False", "Complete")
    assert cluster.kube.condition(IFD, "rl", "chat", "PolicyCurrent")[:2] == ("True", "Current")
    assert cluster.kube.condition(IFD, "rl", "chat", "Available")[0] == "True"
    counts = cluster.kube.status("PolicyVersion", "rl", "policy")["replicas"]
    assert (counts["total"], counts["summary"]) == (2, "2/2")
    # It makes a token for those who launch engines, and nothing that would run.
    assert {type(child) for child in cluster.kube.applied} == {k8s.V1Secret}


async def test_with_a_pool_there_is_the_stores_configuration_too(cluster: Adopting) -> None:
    cluster.kube.put("KVCachePool", "rl", "kv", {})
    cluster.fleet(A, kvCache={"poolRef": {"name": "kv"}})
    engine = cluster.start(A, "a1", store=True)
    await cluster.settle()
    assert engine.state == ("open", 1)
    assert {type(child) for child in cluster.kube.applied} == {k8s.V1Secret, k8s.V1ConfigMap}
    assert ("kv-master.rl.svc", UID) in cluster.network.wiped


async def test_the_mark_is_written_before_the_admission(cluster: Adopting) -> None:
    cluster.fleet(A)
    engine = cluster.start(A, "a1")
    cluster.kube.mark_adopted = _failing  # type: ignore[method-assign,assignment]
    await policyversion.reconcile(cluster.ctx, "rl", "policy")
    assert "admit" not in engine.heard
    assert engine.state == ("closed", 0)


async def _failing(*_: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("more", "reason", "advice"),
    [
        ({"key_namespace": "other"}, "WrongKeyNamespace", f"launch it with the UID of this InferenceDeployment, {UID}"),
        ({"key_namespace": ""}, "WrongKeyNamespace", "MOONTIDE_KEY_NAMESPACE=''"),
        ({"store": True}, "PoolNotNamed", "write spec.kvCache.poolRef, or launch it without a store"),
    ],
)
async def test_an_engine_that_is_not_this_fleets_is_never_commanded(
    cluster: Adopting, more: dict[str, Any], reason: str, advice: str
) -> None:
    other, good = cluster.start(A, "a1", **more), cluster.start(B, "b1")
    await cluster.settle()
    cluster.policy(8)
    await cluster.settle()
    assert other.heard == []
    assert good.state == ("open", 2)
    assert cluster.marks == {"b1": B}
    assert cluster.closed()["10.0.0.1:8001"][0] == reason
    assert advice in cluster.closed()["10.0.0.1:8001"][1]
    assert cluster.current()[:2] == ("True", "Current")


async def test_two_urls_of_one_engine(cluster: Adopting) -> None:
    cluster.network.engines["10.0.0.2:9001"] = engine = cluster.start(A, "a1")
    await cluster.settle()
    assert engine.state == ("open", 1)
    assert cluster.marks == {"a1": A}
    assert cluster.closed() == {
        "10.0.0.2:9001": ("Duplicate", f"the engine of {A} answers here, too; remove one of the two URLs")
    }


async def test_a_wrong_token_and_a_stranger_are_told_apart_and_not_quoted(cluster: Adopting) -> None:
    cluster.engine("10.0.0.1:8001", "a1", {"metadata": {"uid": "another"}})
    await cluster.settle(1)
    closed = cluster.closed()
    assert closed["10.0.0.1:8001"][0] == "Http401"
    assert "token of Secret chat-admin" in closed["10.0.0.1:8001"][1]
    assert closed["10.0.0.2:9001"][0] == "Unreachable"


async def test_an_engine_that_restarts_is_another_and_the_old_one_is_forgotten(cluster: Adopting) -> None:
    cluster.fleet(A)
    cluster.start(A, "a1")
    await cluster.settle()
    again = cluster.start(A, "a2")
    await cluster.settle()
    assert again.state == ("open", 1)
    assert cluster.marks == {"a2": A}


async def test_one_that_never_served_is_not_waited_for(cluster: Adopting) -> None:
    first = cluster.start(A, "a1")
    await cluster.settle()
    cluster.policy(8)
    await cluster.settle()
    assert first.state == ("open", 2)
    assert cluster.current()[:2] == ("True", "Current")
    assert cluster.status["current"] == "1/2"


async def test_a_silent_engine_that_may_have_served_blocks_a_plain_fleet_and_says_so(cluster: Adopting) -> None:
    first, second = cluster.start(A, "a1"), cluster.start(B, "b1")
    for engine in (first, second):
        type(engine.idle).fence_unsupported = "it cannot"  # type: ignore[assignment]
    await cluster.settle()
    second.silent = True
    cluster.policy(8, replicaTimeoutSeconds=1)
    await cluster.settle()
    cluster.now += dt.timedelta(seconds=60)
    await cluster.settle()
    assert first.state[0] == "paused"
    assert cluster.current()[:2] == ("False", "ReplicaUnreachable")
    assert "10.0.0.2:9001" in cluster.current()[2]
    assert "launched by others, so it is isolated and not replaced" in cluster.current()[2]
    assert cluster.kube.deleted == []
    # The process has ended for certain: somebody says so.
    cluster.fleet(A, B, gone=("b1",))
    await cluster.settle()
    assert first.state == ("open", 2)
    assert cluster.marks == {"a1": A}


async def test_a_silent_engine_of_a_salted_fleet_is_given_up_in_time(cluster: Adopting) -> None:
    first, second = cluster.start(A, "a1"), cluster.start(B, "b1")
    await cluster.settle()
    second.silent = True
    cluster.policy(8, replicaTimeoutSeconds=1)
    await cluster.settle()
    assert first.state[0] == "paused"
    cluster.now += dt.timedelta(seconds=2)
    await cluster.settle()
    assert first.state == ("open", 2)
    assert cluster.current()[:2] == ("False", "ReplicaUnreachable")
    assert cluster.kube.deleted == []
    second.silent = False
    await cluster.settle()
    assert second.state == ("open", 2)
    assert cluster.current()[:2] == ("True", "Current")


async def test_one_that_is_removed_from_the_list_is_closed_and_then_forgotten(cluster: Adopting) -> None:
    first, second = cluster.start(A, "a1"), cluster.start(B, "b1")
    await cluster.settle()
    cluster.fleet(A)
    await inferencedeployment.reconcile(cluster.ctx, "rl", "chat")
    assert second.gate.state == "closed"
    assert second.gate.reason == "RemovedFromEndpoints"
    assert cluster.progressing()[:2] == ("True", "Closing")
    await cluster.settle()
    assert cluster.marks == {"a1": A}
    assert first.state == ("open", 1)
    assert (cluster.status["replicas"], cluster.status["current"]) == (1, "1/1")
    assert cluster.progressing()[:2] == ("False", "Complete")
    # Listed again, it is an engine like any other.
    cluster.fleet(A, B)
    await cluster.settle()
    assert second.state == ("open", 1)


async def test_one_that_is_removed_and_does_not_answer_is_kept_until_somebody_decides(cluster: Adopting) -> None:
    first, second = cluster.start(A, "a1"), cluster.start(B, "b1")
    await cluster.settle()
    second.silent = True
    cluster.fleet(A)
    await cluster.settle()
    assert cluster.marks == {"a1": A, "b1": B}
    status, reason, message = cluster.progressing()
    assert (status, reason) == ("True", "Closing")
    assert f"{B} (boot id b1)" in message
    assert "write the boot id into spec.endpoints.gone" in message
    cluster.policy(8)
    await cluster.settle()
    assert first.state[0] == "paused"
    assert cluster.current()[:2] == ("False", "ReplicaUnreachable")
    second.silent = False
    await cluster.settle()
    assert second.state[0] == "closed"
    assert first.state == ("open", 2)
    assert cluster.marks == {"a1": A}


@pytest.mark.parametrize("ending", ["gone", "new boot id"])
async def test_one_that_is_removed_is_forgotten_when_its_process_is_gone(cluster: Adopting, ending: str) -> None:
    cluster.start(A, "a1")
    cluster.start(B, "b1")
    await cluster.settle()
    cluster.stop(B)
    cluster.fleet(A, gone=("b1",) if ending == "gone" else ())
    if ending != "gone":
        newer = cluster.start(B, "b2")
    await cluster.settle(1)
    assert cluster.marks == {"a1": A}
    if ending != "gone":
        assert newer.heard == []


async def test_an_engine_that_gets_another_url_stays_adopted(cluster: Adopting) -> None:
    cluster.fleet(A)
    engine = cluster.start(A, "a1")
    await cluster.settle()
    cluster.network.engines["engine-0.rl:8001"] = engine
    cluster.fleet("http://engine-0.rl:8001")
    engine.heard.clear()
    await cluster.settle()
    assert engine.state == ("open", 1)
    assert engine.heard == []
    assert cluster.marks == {"a1": "http://engine-0.rl:8001"}


async def test_an_engine_that_is_said_to_be_gone_and_answers_counts(cluster: Adopting) -> None:
    cluster.fleet(A)
    engine = cluster.start(A, "a1")
    await cluster.settle()
    cluster.fleet(A, gone=("a1",))
    cluster.policy(8)
    await cluster.settle()
    assert engine.state == ("open", 2)
    assert cluster.marks == {"a1": A}


async def test_a_mark_that_was_lost_is_written_again(cluster: Adopting) -> None:
    cluster.fleet(A)
    cluster.start(A, "a1")
    await cluster.settle()
    cluster.status["adopted"].clear()
    await inferencedeployment.reconcile(cluster.ctx, "rl", "chat")
    assert cluster.marks == {"a1": A}


async def test_without_a_policy_they_are_admitted_with_what_they_say(cluster: Adopting) -> None:
    cluster.kube.put(IFD, "rl", "chat", {"endpoints": {"urls": ["https://10.0.0.1:8001"]}})
    engine = cluster.start(A, "a1")
    await inferencedeployment.reconcile(cluster.ctx, "rl", "chat")
    assert engine.state == ("open", 0)
    assert engine.gate.stamp is not None
    assert engine.gate.stamp.version == "7"
    assert cluster.marks == {"a1": "https://10.0.0.1:8001"}
    assert cluster.network.asked == {"https://10.0.0.1:8001"}
    assert cluster.kube.condition(IFD, "rl", "chat", "PolicyCurrent")[1] == "NoPolicy"
    cluster.kube.put(IFD, "rl", "chat", {"endpoints": {"urls": []}})
    for _ in range(4):
        await inferencedeployment.reconcile(cluster.ctx, "rl", "chat")
    assert engine.gate.state == "closed"
    assert cluster.marks == {}
    assert cluster.progressing()[:2] == ("False", "NoEndpoints")


async def test_a_trainer_is_told_where_they_are(cluster: Adopting) -> None:
    cluster.fleet(A, "https://10.0.0.2:9001", "http://10.0.0.3:8001", "http://10.0.0.4:8001")
    cluster.start(A, "a1")
    cluster.start(B, "b1")
    cluster.start("http://10.0.0.3:8001", "c1", key_namespace="another")
    await cluster.settle()
    cluster.policy(7, preparing=8)
    await cluster.settle()
    (fleet,) = cluster.kube.status("PolicyVersion", "rl", "policy")["preparation"]["fleets"]
    assert fleet["addresses"] == ["10.0.0.1:8001", "https://10.0.0.2:9001"]
    assert fleet["tokenSecret"] == "chat-admin"
