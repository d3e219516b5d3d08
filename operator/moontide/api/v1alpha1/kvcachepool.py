"""KVCachePool: one Mooncake master service and the memory its clients lend it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1.common import (
    AdminToken,
    Api,
    Conditions,
    ObjectName,
    Quantity,
    ResourceRequirements,
    Timestamp,
    rule,
    validations,
)
from moontide.api.v1alpha1.etcd import Etcd
from moontide.api.v1alpha1.podtemplate import MASTER_CONTAINERS, PodTemplate, template_rules

_template_rules = template_rules(
    MASTER_CONTAINERS, ("MC_RPC_CONNECT_TIMEOUT_MS", "MC_RPC_TIMEOUT_MS"), ("wiper-token",), "the token is the wiper's"
)

OWNED_FLAGS = (
    "rpc_port",
    "port",
    "metrics_port",
    "metrics_host",
    "rpc_address",
    "rpc_interface",
    "default_kv_lease_ttl",
    "client_ttl",
    "eviction_high_watermark_ratio",
    "eviction_ratio",
    "config_path",
    "flagfile",
    "fromenv",
    "tryfromenv",
    "enable_ha",
    "ha_backend_type",
    "ha_backend_connstring",
    "etcd_endpoints",
    "cluster_id",
    "enable_oplog",
    "enable_multi_tenants",
    "enable_offload",
    "root_fs_dir",
    "enable_snapshot",
    "enable_snapshot_restore",
    "enable_cxl",
    "dynamic_replication_mode",
)
"""Flags of the master that have a field here, that the operator or the wiper depends on, or that bring back keys that
were wiped."""
_owned = "|".join(OWNED_FLAGS)


def _one_or_three(schema: dict[str, Any]) -> None:
    """Two masters would be no better than one, and more than three cost and bring nothing."""
    schema.pop("enum", None)
    schema.update(
        {
            "type": "integer",
            **validations(rule("self in [1, 3]", "master.replicas must be 1, or 3 with leader election; write 1 or 3")),
        }
    )


class Master(Api):
    """The Mooncake master process and its wiper sidecar."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                f"self.extraArgs.all(flag, !flag.matches('^--?(no)?({_owned})(=.*)?$'))",
                "master.extraArgs holds a flag that Moontide sets itself or cannot keep its promise with; remove it, "
                "and write the field of spec.master where there is one",
            ),
            rule(
                "self.extraArgs.all(flag, flag.matches('^--?[a-z_]+(=.*)?$'))",
                "master.extraArgs holds no flag; write each as one item, for example -rpc_thread_num=8",
            ),
            rule(
                "self.evictionRatioPercent < self.evictionHighWatermarkPercent",
                "master.evictionRatioPercent is not less than evictionHighWatermarkPercent; write less, for example 5",
            ),
            rule(
                "self.replicas == oldSelf.replicas",
                "master.replicas cannot change while the pool lives: its keys would be lost and its engines would look "
                "for the old master; make another pool and write its name into the fleets' kvCache.poolRef",
            ),
            rule(
                "has(self.etcd) == has(oldSelf.etcd) && (!has(self.etcd) || self.etcd == oldSelf.etcd)",
                "master.etcd cannot change while the pool lives: masters in two etcds would be two stores; make "
                "another pool and write its name into the fleets' kvCache.poolRef",
            ),
            rule(
                "!has(self.etcd) || self.replicas == 3",
                "master.etcd is for the election among several masters; write replicas: 3 beside it, or leave it out",
            ),
        )
    )

    replicas: Annotated[Literal[1, 3], Field(json_schema_extra=_one_or_three)] = 1
    """One master, or three with leader election through etcd, of which two stand by."""
    etcd: Etcd | None = None
    """Where three masters elect their leader and log their keys; without it the pool runs a small etcd itself."""
    image: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    """Image with ``mooncake_master`` and the wiper; the operator's configured image when absent."""
    resources: Annotated[ResourceRequirements, Field(default_factory=ResourceRequirements)]
    lease_ttl_milliseconds: Annotated[int, Field(ge=100, le=600_000)] = 5_000
    """How long a looked-up key is kept from eviction, in milliseconds (``-default_kv_lease_ttl``)."""
    client_ttl_seconds: Annotated[int, Field(ge=1, le=3600)] = 4
    """Seconds without a ping after which a client's memory counts as lost (``-client_ttl``)."""
    eviction_high_watermark_percent: Annotated[int, Field(ge=10, le=100)] = 95
    """Fill, in percent, above which the master evicts (``-eviction_high_watermark_ratio``)."""
    eviction_ratio_percent: Annotated[int, Field(ge=1, le=90)] = 5
    """How much of the keys one eviction removes, in percent (``-eviction_ratio``)."""
    extra_args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = ()
    """More flags of ``mooncake_master``, each as one item."""
    wiper_tls_secret_ref: ObjectName | None = None
    """A Secret of type kubernetes.io/tls for the wiper, with the DNS name ``NAME-master.NAMESPACE.svc``; plain HTTP
    when absent. To set or remove it replaces the masters: the keys of a single one are lost. A renewed one replaces
    nothing."""


NODE_OVERHEAD = "256Mi"
"""What a memory node needs beside its segment: about 90 MiB empty, and its buffers."""
NODE_CPU = "100m"
"""What a memory node asks for where the spec says nothing of CPU: enough to ping and to be read on a busy machine."""
_NODE_NEEDS = f"quantity(self.segmentSize).add(quantity('{NODE_OVERHEAD}'))"


class StoreNodes(Api):
    """Pods that lend memory to the pool and do nothing else, so that keys outlive the engines that wrote them."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "quantity(self.segmentSize).compareTo(quantity('16Mi')) >= 0",
                "memory.storeNodes.segmentSize is less than Mooncake's smallest segment; write 16Mi or more",
            ),
            rule(
                "!has(self.resources.limits) || !('memory' in self.resources.limits) || "
                f"quantity(string(self.resources.limits['memory'])).compareTo({_NODE_NEEDS}) >= 0",
                "memory.storeNodes.resources.limits.memory is less than segmentSize plus the "
                f"{NODE_OVERHEAD} that the process needs, so the pod would be killed when its segment fills; write the "
                "sum or more, or a smaller segmentSize",
            ),
        )
    )

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    segment_size: Quantity = "4Gi"
    """What each node lends."""
    resources: Annotated[ResourceRequirements, Field(default_factory=ResourceRequirements)]
    """Without a request of memory it is segmentSize and 256Mi, without one of CPU 100m."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """How long a node that goes may take to move its keys to others; what is left then is dropped. 0: all is."""


class Memory(Api):
    """The memory that is lent to the pool: by attached engines, by memory nodes, or by both."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "quantity(self.perReplica).compareTo(quantity('16Mi')) >= 0 || "
                "quantity(self.perReplica).compareTo(quantity('0')) == 0",
                "memory.perReplica is less than Mooncake's smallest segment; write 16Mi or more, or 0 beside "
                "memory.storeNodes",
            ),
            rule(
                "quantity(self.perReplica).compareTo(quantity('0')) != 0 || has(self.storeNodes)",
                "memory.perReplica is 0, so nothing lends the pool any memory; write memory.storeNodes too, or 16Mi or "
                "more",
            ),
        )
    )

    per_replica: Quantity = "1Gi"
    """What each worker process of an attached engine lends; 0 for nothing."""
    local_buffer: Quantity = "64Mi"
    """Transfer buffer of each client."""
    store_nodes: StoreNodes | None = None
    """Dedicated memory nodes."""


class ClientTimeouts(Api):
    """How long clients of the pool, engines and wiper, wait for a master or a peer that does not answer.

    Engines get them at their start: a change rolls the deployments that name the pool.
    """

    rpc_connect_milliseconds: Annotated[int, Field(ge=50, le=60_000)] = 500
    """For a connection to the master, in milliseconds."""
    rpc_milliseconds: Annotated[int, Field(ge=100, le=60_000)] = 2_000
    """For one answer of the master, in milliseconds. Less loses saves when the CPU is scarce."""
    handshake_seconds: Annotated[int, Field(ge=1, le=60)] = 1
    """For a connection to a replica that lends memory, in seconds."""
    transfer_seconds: Annotated[int, Field(ge=1, le=15)] = 3
    """For the next bytes of a transfer from or to a replica, in seconds."""
    load_seconds: Annotated[int, Field(ge=1, le=60)] = 5
    """For all of one load; then the request's prefix is computed. In seconds."""


class Transport(Api):
    """How clients move blocks to one another."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.devices.size() == 0 || self.protocol == 'rdma'",
                "transport.devices are of RDMA; write protocol: rdma too, or remove them",
            ),
        )
    )

    protocol: Literal["tcp", "rdma"] = "tcp"
    """``rdma`` needs IPC_LOCK, which the "restricted" Pod Security Standard forbids, and a device plugin's resource in
    the pods' ``resources``."""
    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")], ...],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Network cards by name, for example mlx5_0; none: Mooncake chooses."""
    hugepages: Literal["2Mi", "1Gi"] | None = None
    """Size of the pages that segments and buffers are allocated in; without it, ordinary ones."""


class KVCachePoolSpec(Api):
    """What the user asks of a pool."""

    isolation: Literal["Shared", "Dedicated"] = "Shared"
    """``Shared``: every fleet that names the pool has its own namespace of keys in it. ``Dedicated``: one fleet has the
    pool for itself, and another that names it waits with reason ``PoolTaken``."""
    master: Annotated[Master, Field(default_factory=Master)]
    memory: Annotated[Memory, Field(default_factory=Memory)]
    transport: Annotated[Transport, Field(default_factory=Transport)]
    client_timeouts: Annotated[ClientTimeouts, Field(default_factory=ClientTimeouts)]
    pod_template: Annotated[PodTemplate | None, Field(json_schema_extra=_template_rules)] = None
    """What should differ in the master's pod: merged over what Moontide makes."""


class StoreNodesStatus(Api):
    """The memory nodes, counted."""

    replicas: int = 0
    ready: int = 0
    """Those whose segment the master may fill."""
    leaving: Annotated[tuple[str, ...], Field(max_length=16)] = ()
    """Pods that are going, each with what becomes of its keys."""


class KVCachePoolStatus(Api):
    """What the operator sees of a pool, read from the master's own endpoints."""

    observed_generation: int | None = None
    conditions: Conditions = ()
    endpoint: str | None = None
    """What clients use for the master's RPC: ``host:port``; with three masters ``etcd://`` and etcd's."""
    leader: str | None = None
    """Name of the pod whose master leads; absent with one master, and while none of three leads."""
    leader_changes: Annotated[tuple[Timestamp, ...], Field(max_length=10)] = ()
    """When the last leaders were seen for the first time, oldest first."""
    clients: int | None = None
    """Clients that have memory mounted."""
    keys: int | None = None
    capacity_bytes: int | None = None
    allocated_bytes: int | None = None
    used: str | None = None
    """Fill for people, for example "12 %"."""
    segments: int | None = None
    """Segments that clients have mounted; a client with several workers has several."""
    evicted_keys: int | None = None
    """Since the master started."""
    master_started_at: Timestamp | None = None
    """When the master that was last seen to run started."""
    master_restarts: int | None = None
    """How often it was seen to have restarted; each time every key was lost."""
    store_nodes: StoreNodesStatus | None = None
    holder: str | None = None
    """UID of the fleet that has a ``Dedicated`` pool: the one that named it first."""
    wiper_tls: bool | None = None
    """True while there may be a pod whose wiper serves TLS."""
    wiper_token: AdminToken | None = None
    """Absent until the wipers' token was rotated for the first time."""
    deployments: Annotated[tuple[str, ...], Field(max_length=256)] = ()
    """Names of the InferenceDeployments that name this pool."""


class KVCachePool(Api):
    """A Mooncake store that the engines of a namespace share."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.metadata.name.size() <= 56 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name becomes part of the name of a Service; write at most 56 lower-case letters, digits "
                "and '-', with a letter first",
            ),
        )
    )

    spec: Annotated[KVCachePoolSpec, Field(default_factory=KVCachePoolSpec)]
    status: KVCachePoolStatus | None = None
