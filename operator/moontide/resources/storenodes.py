"""The memory nodes of a KVCachePool: one Deployment whose pods lend memory and do nothing else. Pure."""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePoolSpec, quantity_bytes
from moontide.api.v1alpha1.common import ResourceRequirements
from moontide.api.v1alpha1.kvcachepool import NODE_CPU, NODE_OVERHEAD, StoreNodes
from moontide.resources import common, timeouts, transport
from moontide.resources.masters import Election, client_address, client_environment

CONTAINER = "store-node"
BUFFER_BYTES = 16 * 2**20
EXIT_SECONDS = 20
"""Beyond the drain: to let the end of the drain be read, to unmount, and for a master that does not answer."""


def deployment(
    pool: str,
    namespace: str,
    owner: k8s.V1OwnerReference,
    spec: KVCachePoolSpec,
    default_image: str,
    election: Election | None = None,
) -> k8s.V1Deployment:
    """The memory nodes; none of them where the spec has no ``storeNodes`` any more. ``election``: of the pool's
    masters, where it has several.

    A rollout replaces one after the other, each as soon as the one before lends: keys move to those that stay.
    Raises ValueError for a segment size that is no amount of memory.
    """
    nodes = spec.memory.store_nodes
    selector = labels.store_node_labels(pool)
    given = nodes or StoreNodes.model_validate({})
    pod = k8s.V1PodSpec(
        enable_service_links=False,
        automount_service_account_token=False,
        security_context=common.pod_security(),
        termination_grace_period_seconds=given.drain_seconds + EXIT_SECONDS,
        containers=[_container(pool, namespace, spec, default_image, given, election)],
        volumes=[common.empty_dir("tmp")],
    )
    made = k8s.V1Deployment(
        api_version="apps/v1",
        kind="Deployment",
        metadata=common.metadata(naming.store_nodes(pool), namespace, owner, selector),
        spec=k8s.V1DeploymentSpec(
            replicas=nodes.replicas if nodes is not None else 0,
            revision_history_limit=3,
            strategy=k8s.V1DeploymentStrategy(
                type="RollingUpdate",
                rolling_update=k8s.V1RollingUpdateDeployment(max_surge=0, max_unavailable=1),
            ),
            selector=k8s.V1LabelSelector(match_labels=selector),
            template=k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels=selector), spec=pod),
        ),
    )
    return transport.dress(made, CONTAINER, spec.transport, (quantity_bytes(given.segment_size), BUFFER_BYTES))


def _container(
    pool: str,
    namespace: str,
    spec: KVCachePoolSpec,
    default_image: str,
    nodes: StoreNodes,
    election: Election | None,
) -> k8s.V1Container:
    over = {"MOONTIDE_PROTOCOL": spec.transport.protocol, "MOONTIDE_DEVICES": transport.device_names(spec.transport)}
    master = naming.service_host(naming.master(pool), namespace)
    port = naming.STORE_NODE_PORT
    return k8s.V1Container(
        name=CONTAINER,
        image=spec.master.image or default_image,
        command=["python3", "-m", "moontide_engine.storenode"],
        env=[
            *common.env(
                {
                    "MOONTIDE_NODE_PORT": str(port),
                    "MOONTIDE_MASTER_ADDRESS": client_address(pool, namespace, election),
                    "MOONTIDE_MASTER_METRICS": f"http://{master}:{naming.MASTER_METRICS_PORT}",
                    "MOONTIDE_SEGMENT_BYTES": str(quantity_bytes(nodes.segment_size)),
                    "MOONTIDE_BUFFER_BYTES": str(BUFFER_BYTES),
                    "MOONTIDE_DRAIN_SECONDS": str(nodes.drain_seconds),
                    **timeouts.rpc(spec.client_timeouts),
                    "MC_HANDSHAKE_CONNECT_TIMEOUT": str(spec.client_timeouts.handshake_seconds),
                    "HOME": "/tmp",
                    **client_environment(election),
                    **(over if spec.transport.protocol != "tcp" else {}),
                }
            ),
            common.field_env("MOONTIDE_NODE_HOST", "status.podIP"),
        ],
        ports=[k8s.V1ContainerPort(name="status", container_port=port, protocol="TCP")],
        resources=common.resources(with_requests(nodes, huge=spec.transport.hugepages is not None)),
        security_context=common.container_security(),
        readiness_probe=common.http_probe(port, "/readyz", period=1, failures=2, timeout=2),
        # Not of the master: a node that is restarted because the master is away loses what it holds.
        liveness_probe=common.http_probe(port, "/healthz", period=10, timeout=10, initial_delay=10),
        volume_mounts=[k8s.V1VolumeMount(name="tmp", mount_path="/tmp")],
    )


def with_requests(nodes: StoreNodes, huge: bool = False) -> ResourceRequirements:
    """The resources of one node, with requests where the spec has none: of the memory that it lends, since a node that
    the scheduler takes for empty is the first to be killed; and of CPU, since one that asks for none gets what busy
    engines beside it leave, and each read and write of the pool waits for it."""
    wanted = nodes.resources
    said = {*wanted.requests, *wanted.limits}
    asked = dict(wanted.requests)
    if "cpu" not in said:
        asked["cpu"] = NODE_CPU
    if "memory" not in said:
        # Huge pages are counted apart from a container's memory.
        needed = (0 if huge else quantity_bytes(nodes.segment_size)) + quantity_bytes(NODE_OVERHEAD)
        asked["memory"] = str(needed)
    return ResourceRequirements(limits=wanted.limits, requests=asked)
