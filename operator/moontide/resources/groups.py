"""A fleet whose replicas span pods: a LeaderWorkerSet in the place of the Deployment. Pure.

Each replica is a group of ``nodes`` pods. The leader pod runs the engine with its gate and its Service: it *is* the
replica, and has the labels of one. The workers run vLLM without a server; they belong to nobody's selector.
"""

from __future__ import annotations

import copy
import datetime as dt
from dataclasses import dataclass
from typing import Any

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.resources.podtemplate import Overridden

GROUP = "leaderworkerset.x-k8s.io"
VERSION = "v1"
PLURAL = "leaderworkersets"
KIND = "LeaderWorkerSet"
INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
"""On every pod of a group: which group of the set it is of."""
WORKER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
"""On every pod of a group: 0 for the leader."""
LEADER_ADDRESS = "$(LWS_LEADER_ADDRESS)"
RANK = "MOONTIDE_NODE_RANK"


@dataclass(frozen=True)
class Group:
    """A LeaderWorkerSet to apply."""

    metadata: k8s.V1ObjectMeta
    body: dict[str, Any]
    kind: str = KIND


def group(fleet: k8s.V1Deployment | Overridden, nodes: int) -> Group:
    """The LeaderWorkerSet whose leaders are the pods of ``fleet`` (see :func:`engine.deployment`)."""
    deployment = fleet.child if isinstance(fleet, Overridden) else fleet
    metadata, spec = deployment.metadata, deployment.spec
    if metadata is None or spec is None or spec.strategy is None or spec.strategy.rolling_update is None:
        raise ValueError("a Deployment that was not made by resources.engine")
    leader = copy.deepcopy(fleet.body["spec"]["template"]) if isinstance(fleet, Overridden) else _wire(spec.template)
    worker = copy.deepcopy(leader)
    _lead(_engine(leader), nodes)
    worker["metadata"]["labels"] = labels.worker_labels(leader["metadata"]["labels"][labels.DEPLOYMENT])
    _work(_engine(worker), nodes)
    rolling = spec.strategy.rolling_update
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": _wire(metadata),
        "spec": {
            "replicas": spec.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxSurge": rolling.max_surge,
                    "maxUnavailable": rolling.max_unavailable,
                },
            },
            "leaderWorkerTemplate": {
                "size": nodes,
                # What is left of a group cannot go on: its ranks have lost one another.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }
    return Group(metadata, body)


def _wire(part: k8s.V1PodTemplateSpec | k8s.V1ObjectMeta) -> dict[str, Any]:
    made: dict[str, Any] = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    return made


def _engine(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in template["spec"]["containers"] if c["name"] == naming.ENGINE_CONTAINER)
    return found


def _place(nodes: int, rank: str) -> list[str]:
    addressed = ["--nnodes", str(nodes), "--node-rank", rank, "--master-addr", LEADER_ADDRESS]
    return [*addressed, "--distributed-executor-backend", "mp"]


def _lead(container: dict[str, Any], nodes: int) -> None:
    container["command"] = [*container["command"], *_place(nodes, "0")]


def _work(container: dict[str, Any], nodes: int) -> None:
    """Make of the engine's container one that computes for the leader and serves nothing."""
    arguments = container["command"][3:]
    at = arguments.index("--model")
    model = arguments.pop(at + 1)
    arguments.pop(at)
    serve = ["python3", "-m", "vllm.entrypoints.cli.main", "serve", model]
    container["command"] = [*serve, *arguments, "--headless", *_place(nodes, f"$({RANK})")]
    rank = {"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{WORKER_LABEL}']"}}}
    container["env"] = [*container["env"], rank]
    for served in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        container.pop(served, None)


def as_deployment(body: dict[str, Any]) -> k8s.V1Deployment:
    """What a live LeaderWorkerSet says, in a Deployment's words: a group is counted where a pod would be."""
    metadata, said = body["metadata"], body.get("status") or {}
    return k8s.V1Deployment(
        metadata=k8s.V1ObjectMeta(
            name=metadata["name"],
            namespace=metadata["namespace"],
            generation=metadata.get("generation"),
            owner_references=[
                k8s.V1OwnerReference(
                    api_version=each["apiVersion"],
                    kind=each["kind"],
                    name=each["name"],
                    uid=each["uid"],
                    controller=each.get("controller"),
                )
                for each in metadata.get("ownerReferences") or ()
            ],
        ),
        spec=k8s.V1DeploymentSpec(selector=k8s.V1LabelSelector(), template=k8s.V1PodTemplateSpec()),
        status=k8s.V1DeploymentStatus(
            replicas=said.get("replicas"),
            ready_replicas=said.get("readyReplicas"),
            available_replicas=said.get("readyReplicas"),
            updated_replicas=said.get("updatedReplicas"),
            observed_generation=said.get("observedGeneration", metadata.get("generation")),
            conditions=[
                k8s.V1DeploymentCondition(
                    type=each["type"], status=each["status"], reason=each.get("reason"), message=each.get("message")
                )
                for each in said.get("conditions") or ()
            ],
        )
        if said
        else None,
    )


def left_behind(leaders: list[k8s.V1Pod], workers: list[k8s.V1Pod]) -> list[k8s.V1Pod]:
    """Workers whose leader is gone: those that are older than the leader of their group, and those without one.

    Their engine serves nobody any more, but what it had to put into the store may still be on its way.
    """
    born = {_index(pod): _created(pod) for pod in leaders}
    return [pod for pod in workers if _index(pod) not in born or _created(pod) < born[_index(pod)]]


def _index(pod: k8s.V1Pod) -> str:
    return ((pod.metadata.labels if pod.metadata is not None else None) or {}).get(INDEX_LABEL, "")


def _created(pod: k8s.V1Pod) -> dt.datetime:
    created = pod.metadata.creation_timestamp if pod.metadata is not None else None
    if created is None:
        raise ValueError("a pod without a time of creation was never stored by an API server")
    return created
