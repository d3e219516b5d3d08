"""Labels and annotations. Pure; the one place where they are spelled."""

from __future__ import annotations

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
PART_OF = "app.kubernetes.io/part-of"
MANAGER = "moontide"
DEPLOYMENT = "moontide.dev/deployment"
POOL = "moontide.dev/pool"
LEADER = "moontide.dev/leader"
"""On the pod of the master that leads, in a pool of three."""
FINALIZER = "moontide.dev/finalizer"
ROTATE_TOKEN = "moontide.dev/rotate-token"
"""On an InferenceDeployment or a KVCachePool: any other value than before asks for a new token of its admin ports or
wipers."""
ADMITTED_CONTAINER = "moontide.dev/admitted-container"
"""On a pod, written before the operator first admits the engine: the id of the container whose engine may have been
admitted. A pod without it, or whose container has another id, runs an engine that never served and never wrote."""


def engine_labels(deployment: str) -> dict[str, str]:
    """Labels of a fleet's children; also the selector of its pods."""
    return {MANAGED_BY: MANAGER, COMPONENT: "engine", DEPLOYMENT: deployment}


def worker_labels(deployment: str) -> dict[str, str]:
    """Labels of the pods that compute for a replica in another pod: no selector of engines takes them."""
    return {MANAGED_BY: MANAGER, COMPONENT: "engine-worker", DEPLOYMENT: deployment}


def store_labels(pool: str) -> dict[str, str]:
    """Labels of a pool's children; also the selector of its pods."""
    return {MANAGED_BY: MANAGER, COMPONENT: "store", POOL: pool}


def store_node_labels(pool: str) -> dict[str, str]:
    """Labels of a pool's memory nodes; also the selector of their pods."""
    return {MANAGED_BY: MANAGER, COMPONENT: "store-node", POOL: pool}


def etcd_labels(pool: str) -> dict[str, str]:
    """Labels of the etcd of a pool; also the selector of its pod."""
    return {MANAGED_BY: MANAGER, COMPONENT: "etcd", POOL: pool}


def selector(labels: dict[str, str]) -> str:
    """``labels`` as the string form of a label selector, keys sorted."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
