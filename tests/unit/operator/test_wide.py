"""A policy whose fleets are in other namespaces: who may follow, who is counted, and where things are done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moontide.kube.client import parse
from moontide.kube.kinds import POLICY
from moontide.reconcile import inferencedeployment, policyversion
from moontide.trainer.policy import Policy
from moontide.trainer.steps import Answer, Call, Change, Engine, Target
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}
REF = {"name": "policy", "namespace": "rl"}


def _spec(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "policyRef": REF, **more}


@pytest.fixture(name="cluster")
async def _cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """The policy is in ``rl`` and allows ``team-b``; a fleet ``chat`` is in each of rl, team-b and team-c."""
    made = Cluster(tmp_path)
    made.kube.put("PolicyVersion", "rl", "policy", {"version": 7, "allowedNamespaces": ["team-b"]})
    for number, namespace in enumerate(("rl", "team-b", "team-c")):
        made.kube.put("KVCachePool", namespace, "kv", {})
        fleet = made.kube.put(
            "InferenceDeployment", namespace, "chat", _spec(kvCache={"poolRef": {"name": "kv"}}, replicas=1)
        )
        # The names of pods can be the same, too.
        made.pod(fleet, "chat-0", f"10.0.0.{number + 1}")
    async with made.http:
        yield made


def _engines(cluster: Cluster) -> list[tuple[str, int]]:
    return [engine.state for engine in cluster.network.engines.values()]


async def _settle(cluster: Cluster) -> None:
    for _ in range(3):
        await policyversion.reconcile(cluster.ctx, "rl", "policy")


async def _looked(cluster: Cluster, namespace: str, name: str = "chat") -> tuple[str, str, str]:
    await inferencedeployment.reconcile(cluster.ctx, namespace, name)
    return cluster.kube.condition("InferenceDeployment", namespace, name, "PolicyCurrent")


async def test_allowed_fleets_take_part_and_others_are_left_alone(cluster: Cluster) -> None:
    await _settle(cluster)
    assert _engines(cluster) == [("open", 1), ("open", 1), ("closed", 0)]
    status = cluster.kube.status("PolicyVersion", "rl", "policy")
    assert [each["name"] for each in status["members"]] == ["chat", "team-b/chat"]
    assert status["replicas"]["summary"] == "2/2"
    assert (await _looked(cluster, "team-b"))[:2] == ("True", "Current")
    refused = await _looked(cluster, "team-c")
    assert refused[:2] == ("False", "PolicyNotAllowed")
    assert "PolicyVersion policy of namespace rl" in refused[2]
    assert "add team-c to its spec.allowedNamespaces" in refused[2]
    assert cluster.network.engines["10.0.0.3:8001"].heard == []


async def test_what_is_done_to_a_fleet_is_done_in_its_namespace(cluster: Cluster) -> None:
    await _settle(cluster)
    assert set(cluster.kube.annotated) == {("rl", "chat-0"), ("team-b", "chat-0")}
    wiped = dict(cluster.network.wiped)
    assert wiped == {"kv-master.rl.svc": "uid-rl-chat", "kv-master.team-b.svc": "uid-team-b-chat"}
    told = {(kind, namespace) for kind, namespace, _, reason in cluster.kube.events if reason == "ReplicaAdmitted"}
    assert told == {("PolicyVersion", "rl"), ("InferenceDeployment", "team-b")}


async def test_a_replica_of_another_namespace_is_replaced_there_and_named_with_it(cluster: Cluster) -> None:
    await _settle(cluster)
    for engine in cluster.network.engines.values():
        engine.idle.weights = "8"
    cluster.network.engines["10.0.0.2:8001"].silent = True
    spec = {"version": 8, "allowedNamespaces": ["team-b"], "replicaTimeoutSeconds": 1}
    cluster.kube.put("PolicyVersion", "rl", "policy", spec)
    await _settle(cluster)
    failures = cluster.kube.status("PolicyVersion", "rl", "policy")["failures"]
    assert [each["replica"] for each in failures] == ["team-b/chat-0"]
    assert cluster.kube.deleted == []
    cluster.now = cluster.now.replace(minute=1)
    await policyversion.reconcile(cluster.ctx, "rl", "policy")
    assert set(cluster.kube.deleted) == {("team-b", "chat-0")}


async def test_a_permission_that_is_taken_away_disturbs_nobody_and_counts_nobody(cluster: Cluster) -> None:
    await _settle(cluster)
    await _looked(cluster, "team-b")
    cluster.kube.put("PolicyVersion", "rl", "policy", {"version": 8, "weights": "Unchecked"})
    await _settle(cluster)
    assert _engines(cluster) == [("open", 2), ("open", 1), ("closed", 0)]
    status = cluster.kube.status("PolicyVersion", "rl", "policy")
    assert [each["name"] for each in status["members"]] == ["chat"]
    assert status["replicas"]["total"] == 1
    assert (await _looked(cluster, "team-b"))[:2] == ("False", "PolicyNotAllowed")
    kept = cluster.kube.status("InferenceDeployment", "team-b", "chat")
    assert (kept["version"], kept["epoch"]) == ("7", 1)
    # Given back, it takes the way of a fleet of which nothing is known.
    cluster.kube.put(
        "PolicyVersion", "rl", "policy", {"version": 8, "weights": "Unchecked", "allowedNamespaces": ["*"]}
    )
    await _settle(cluster)
    assert _engines(cluster) == [("open", 2), ("open", 2), ("open", 2)]


async def test_trainers_are_told_the_namespace_of_each_token(cluster: Cluster) -> None:
    await _settle(cluster)
    cluster.kube.put("PolicyVersion", "rl", "policy", {"version": 7, "preparing": 8, "allowedNamespaces": ["team-b"]})
    await _settle(cluster)
    fleets = cluster.kube.status("PolicyVersion", "rl", "policy")["preparation"]["fleets"]
    assert fleets == [
        {"name": "chat", "namespace": "rl", "tokenSecret": "chat-admin", "addresses": ["10.0.0.1:8001"]},
        {"name": "team-b/chat", "namespace": "team-b", "tokenSecret": "chat-admin", "addresses": ["10.0.0.2:8001"]},
    ]


async def test_a_missing_policy_elsewhere_is_named_with_its_namespace(cluster: Cluster) -> None:
    cluster.kube.put("InferenceDeployment", "team-b", "other", _spec(policyRef={**REF, "name": "nobody"}))
    verdict = await _looked(cluster, "team-b", "other")
    assert verdict[:2] == ("False", "PolicyNotFound")
    assert "PolicyVersion rl/nobody does not exist" in verdict[2]


async def test_an_operator_of_one_namespace_says_that_it_reaches_no_other(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, watch_namespace="team-b")
    cluster.kube.put("InferenceDeployment", "team-b", "chat", _spec())
    async with cluster.http:
        verdict = await _looked(cluster, "team-b")
        assert verdict[:2] == ("False", "PolicyOutOfReach")
        assert "serves namespace team-b only" in verdict[2]
        cluster.kube.put("PolicyVersion", "team-b", "mine", {"version": 7, "allowedNamespaces": ["*"]})
        cluster.kube.put("InferenceDeployment", "team-b", "chat", _spec(policyRef={"name": "mine"}))
        await policyversion.reconcile(cluster.ctx, "team-b", "mine")
        assert cluster.kube.listed == [("team-b",)] * len(cluster.kube.listed)
        assert (await _looked(cluster, "team-b"))[1] == "Behind"


def test_a_trainer_reads_a_token_where_its_fleet_is() -> None:
    fleets = [
        {"name": "far/chat", "namespace": "far", "tokenSecret": "chat-admin", "addresses": ["10.0.0.1:8001"]},
        {"name": "chat", "tokenSecret": "chat-admin", "addresses": ["10.0.0.2:8001"]},
    ]
    policy = Policy({"status": {"preparation": {"fleets": fleets}}})
    steps = Change(Target("rl", "policy"), 8).engines(policy, until=float("inf"))
    paths: list[str] = []

    def run() -> tuple[Engine, ...]:
        asked = next(steps)
        try:
            while True:
                assert isinstance(asked, Call)
                paths.append(asked.path)
                asked = steps.send(Answer(200, {"data": {"token": "dG9rZW4="}}))
        except StopIteration as done:
            found: tuple[Engine, ...] = done.value
            return found

    engines = run()
    assert paths == [f"/api/v1/namespaces/{each}/secrets/chat-admin" for each in ("far", "rl")]
    assert [each.fleet for each in engines] == ["far/chat", "chat"]


@pytest.mark.parametrize(
    ("allowed", "namespace", "may"),
    [([], "a", False), (["a"], "a", True), (["a"], "b", False), (["*"], "b", True)],
)
def test_who_is_allowed(allowed: list[str], namespace: str, may: bool) -> None:
    metadata = {"name": "p", "namespace": "rl", "uid": "u"}
    policy = parse(POLICY, {"metadata": metadata, "spec": {"version": 7, "allowedNamespaces": allowed}})
    assert policy.model.spec.allows(namespace) is may
