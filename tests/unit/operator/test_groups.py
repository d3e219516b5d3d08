"""Replicas that span pods: the LeaderWorkerSet, and who of its pods counts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import InferenceDeploymentSpec
from moontide.kube.client import Meta
from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile.fleets import lingering, observe
from moontide.resources import engine, groups
from tests.unit.operator.doubles import Cluster

OWNER = k8s.V1OwnerReference(
    api_version="moontide.dev/v1alpha1", kind="InferenceDeployment", name="chat", uid="u-2", controller=True
)
SPEC = {
    "model": {"source": "pvc://weights/a", "servedName": "tiny"},
    "replicas": 3,
    "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2},
    "rollout": {"maxSurge": 1, "maxUnavailable": 2},
    "engine": {"args": ["--max-model-len", "512"]},
}
PLACE = ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--distributed-executor-backend", "mp"]


def _body(**more: Any) -> dict[str, Any]:
    spec = InferenceDeploymentSpec.model_validate({**SPEC, **more})
    made = engine.deployment("chat", "ns", OWNER, spec, engine_image="e:1", default_device="cuda", mooncake=None)
    return groups.group(made, spec.nodes).body


def _template(body: dict[str, Any], which: str) -> tuple[dict[str, Any], dict[str, Any]]:
    template = body["spec"]["leaderWorkerTemplate"][f"{which}Template"]
    (container,) = template["spec"]["containers"]
    return template, container


def test_a_group_for_each_replica() -> None:
    body = _body()
    assert (body["apiVersion"], body["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert body["metadata"]["name"] == "chat"
    assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == ["u-2"]
    assert body["spec"]["replicas"] == 3
    assert body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 1, "maxUnavailable": 2}
    assert body["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert body["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_leader_is_the_replica() -> None:
    template, container = _template(_body(), "leader")
    assert template["metadata"]["labels"] == labels.engine_labels("chat")
    command = container["command"]
    assert command[:5] == ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/a"]
    assert command[-8:] == ["--nnodes", "2", "--node-rank", "0", *PLACE]
    assert command[command.index("--tensor-parallel-size") + 1] == "8"
    assert command[command.index("--pipeline-parallel-size") + 1] == "2"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert container["readinessProbe"]["httpGet"]["path"] == "/moontide/v1/ready"


def test_a_worker_computes_and_serves_nothing() -> None:
    template, container = _template(_body(), "worker")
    assert template["metadata"]["labels"] == labels.worker_labels("chat")
    # Neither the Service's selector nor that of the replicas takes it.
    assert not labels.engine_labels("chat").items() <= template["metadata"]["labels"].items()
    command = container["command"]
    assert command[:5] == ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "/models/a"]
    assert "--model" not in command
    assert "--headless" in command
    assert command[-8:] == ["--nnodes", "2", "--node-rank", "$(MOONTIDE_NODE_RANK)", *PLACE]
    assert "--max-model-len" in command
    (rank,) = [each for each in container["env"] if each["name"] == "MOONTIDE_NODE_RANK"]
    path = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": path}}
    assert not {"ports", "readinessProbe", "startupProbe", "livenessProbe", "lifecycle"} & set(container)
    leader = _template(_body(), "leader")[1]
    assert container["resources"] == leader["resources"]
    assert container["volumeMounts"] == leader["volumeMounts"]


def _pod(name: str, group: str, second: int, **how: Any) -> k8s.V1Pod:
    which = labels.worker_labels("chat") if how.get("worker") else labels.engine_labels("chat")
    running = k8s.V1ContainerState(running=k8s.V1ContainerStateRunning())
    engine_status = k8s.V1ContainerStatus(
        name="engine", image="e", image_id="e", ready=True, restart_count=0, state=running, container_id=f"c://{name}"
    )
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(
            name=name,
            namespace="ns",
            uid=f"uid-{name}-{second}",
            labels={**which, groups.INDEX_LABEL: group},
            creation_timestamp=dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC),
        ),
        status=k8s.V1PodStatus(pod_ip="10.0.0.1", container_statuses=[engine_status]),
    )


def test_workers_are_left_behind_by_a_leader_that_is_gone() -> None:
    workers = [_pod("chat-0-1", "0", 5, worker=True), _pod("chat-1-1", "1", 5, worker=True)]
    assert groups.left_behind([_pod("chat-0", "0", 5), _pod("chat-1", "1", 4)], workers) == []
    # Another leader of the same name and group, which came later; and none at all.
    assert groups.left_behind([_pod("chat-0", "0", 6)], workers) == workers


def test_a_worker_that_is_left_behind_is_waited_for() -> None:
    meta = Meta(name="chat", namespace="ns", uid="u-2", generation=1)
    replica = lingering(_pod("chat-0-1", "0", 5, worker=True), meta, "ns")
    assert (replica.address, replica.terminating, replica.newcomer, replica.silent) == (None, True, False, True)


async def test_observation_sees_leaders_and_who_is_left_behind(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.kube.put("InferenceDeployment", "ns", "chat", SPEC)
    resource = await cluster.ctx.kube.get_deployment("ns", "chat")
    assert resource is not None
    cluster.kube.pods = [_pod("chat-0", "0", 1), _pod("chat-0-1", "0", 2, worker=True)]
    assert [each.name for each in (await observe(cluster.ctx, resource)).replicas] == ["chat-0"]
    cluster.kube.pods[0] = _pod("chat-0", "0", 3)
    replicas = (await observe(cluster.ctx, resource)).replicas
    assert [(each.name, each.terminating) for each in replicas] == [("chat-0", False), ("chat-0-1", True)]


async def test_a_fleet_of_groups_has_no_deployment(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.kube.put("InferenceDeployment", "ns", "chat", SPEC)
    await ifd.reconcile(cluster.ctx, "ns", "chat")
    assert [child.kind for child in cluster.kube.applied] == [
        "Secret",
        "Service",
        "LeaderWorkerSet",
        "PodDisruptionBudget",
    ]


@pytest.mark.parametrize("ready", [0, 3])
def test_status_in_the_words_of_a_deployment(ready: int) -> None:
    metadata = {
        "name": "chat",
        "namespace": "ns",
        "generation": 4,
        "ownerReferences": [{"apiVersion": "v", "kind": "k", "name": "chat", "uid": "u", "controller": True}],
    }
    said = {"replicas": 3, "readyReplicas": ready, "updatedReplicas": 3}
    conditions = [{"type": "Available", "status": "True", "reason": "AllGroupsReady", "message": "all"}]
    live = groups.as_deployment({"metadata": metadata, "status": {**said, "conditions": conditions}})
    assert live.status is not None
    assert (live.status.replicas, live.status.available_replicas, live.status.observed_generation) == (3, ready, 4)
    assert [each.reason for each in live.status.conditions or []] == ["AllGroupsReady"]
    assert groups.as_deployment({"metadata": metadata}).status is None
