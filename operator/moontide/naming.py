"""Names of children. Pure; the one place where a child's name is made."""

from __future__ import annotations

MASTER_RPC_PORT = 50051
MASTER_METRICS_PORT = 9003
WIPER_PORT = 9004
STORE_NODE_PORT = 9005
INFERENCE_PORT = 8000
ADMIN_PORT = 8001
ENGINE_CONTAINER = "engine"


def master(pool: str) -> str:
    """Deployment and Service of a pool's master."""
    return f"{pool}-master"


def store_nodes(pool: str) -> str:
    """Deployment of a pool's memory nodes."""
    return f"{pool}-nodes"


def etcd(pool: str) -> str:
    """Deployment and Service of the etcd that a pool of three masters runs itself."""
    return f"{pool}-etcd"


def wiper_secret(pool: str) -> str:
    """Secret with the token of a pool's wiper."""
    return f"{pool}-wiper"


def mooncake_config(deployment: str) -> str:
    """ConfigMap with the Mooncake client's configuration."""
    return f"{deployment}-mooncake"


def admin_secret(deployment: str) -> str:
    """Secret with the token of a fleet's admin planes."""
    return f"{deployment}-admin"


def qualified(name: str, namespace: str, home: str) -> str:
    """How an object is called in the status of one in namespace ``home``."""
    return name if namespace == home else f"{namespace}/{name}"


def service_host(service: str, namespace: str) -> str:
    """DNS name of a Service inside the cluster."""
    return f"{service}.{namespace}.svc"
