"""What three masters need beside what one needs (:mod:`moontide.resources.store`): election, log, etcd. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePoolSpec
from moontide.resources import common

ETCD_PORT = 2379
ETCD_QUOTA_BYTES = 8 * 2**30
"""The most that etcd's makers advise. A key put takes about 550 bytes, and the log is never shortened."""
ETCD_FOLDER = "/var/lib/etcd"
SETTLE_SECONDS = 15
"""After its start, a master replays the log before it can take over: the next is not replaced before."""


@dataclass(frozen=True)
class Election:
    """Where a pool's masters elect their leader."""

    endpoints: tuple[str, ...]
    """Of etcd, as ``HOST:PORT``."""
    cluster: str
    """Names the pool in etcd: its UID, so that a pool that is made again never replays the log of its first life."""
    own: bool
    """Whether the pool runs this etcd."""

    @property
    def joined(self) -> str:
        """The endpoints as masters and clients take them."""
        return ";".join(self.endpoints)


def election(pool: str, namespace: str, uid: str, spec: KVCachePoolSpec) -> Election | None:
    """None for a pool of one master."""
    if spec.master.replicas == 1:
        return None
    if spec.master.etcd is not None:
        return Election(spec.master.etcd.endpoints, uid, own=False)
    return Election((f"{naming.service_host(naming.etcd(pool), namespace)}:{ETCD_PORT}",), uid, own=True)


def client_address(pool: str, namespace: str, found: Election | None) -> str:
    """What a store's client is given for its master."""
    if found is None:
        return f"{naming.service_host(naming.master(pool), namespace)}:{naming.MASTER_RPC_PORT}"
    return f"etcd://{found.joined}"


def client_environment(found: Election | None) -> dict[str, str]:
    """What a store's client has to know besides."""
    return {} if found is None else {"MC_STORE_CLUSTER_ID": found.cluster}


def replicate(deployment: k8s.V1Deployment, found: Election) -> k8s.V1Deployment:
    """The Deployment of one master, made that of three: two stand by.

    All of them are Ready, standbys too: a rollout and a disruption budget would wait for ever for pods of which but one
    can be. Who leads is a label, and only the Service asks for it.
    """
    spec = deployment.spec
    pod = spec.template.spec
    if pod is None:
        raise ValueError("a Deployment without a pod is none of the store's")
    master, wiper = pod.containers
    master.command = [
        *(master.command or ()),
        "-enable_ha=true",
        "-ha_backend_type=etcd",
        f"-etcd_endpoints={found.joined}",
        f"-cluster_id={found.cluster}",
        "-rpc_address=$(POD_IP)",
        "-enable_oplog=true",
    ]
    own_address = common.field_env("POD_IP", "status.podIP")
    master.env = [own_address]
    changed = {
        "MOONTIDE_MASTER_ADDRESS": f"$(POD_IP):{naming.MASTER_RPC_PORT}",
        "MOONTIDE_WIPER_HOSTNAME": "$(POD_IP)",
        "MOONTIDE_ETCD_ENDPOINTS": found.joined,
        **client_environment(found),
    }
    kept = [each for each in wiper.env or () if each.name not in changed]
    wiper.env = [own_address, *kept, *common.env(changed)]
    spec.replicas = 3
    spec.strategy = k8s.V1DeploymentStrategy(
        type="RollingUpdate", rolling_update=k8s.V1RollingUpdateDeployment(max_surge=0, max_unavailable=1)
    )
    spec.min_ready_seconds = SETTLE_SECONDS
    return deployment


def lead(service: k8s.V1Service) -> k8s.V1Service:
    """The Service of one master, made that of the leader of three."""
    if service.spec is not None:
        service.spec.selector = {**(service.spec.selector or {}), labels.LEADER: "true"}
    return service


def etcd_service(pool: str, namespace: str, owner: k8s.V1OwnerReference) -> k8s.V1Service:
    """The name under which masters and clients find the pool's own etcd."""
    selector = labels.etcd_labels(pool)
    return k8s.V1Service(
        api_version="v1",
        kind="Service",
        metadata=common.metadata(naming.etcd(pool), namespace, owner, selector),
        spec=k8s.V1ServiceSpec(
            selector=selector,
            publish_not_ready_addresses=True,
            ports=[k8s.V1ServicePort(name="client", port=ETCD_PORT, target_port=ETCD_PORT, protocol="TCP")],
        ),
    )


def etcd_deployment(pool: str, namespace: str, owner: k8s.V1OwnerReference, image: str) -> k8s.V1Deployment:
    """The pool's own etcd: one member, whose data ends with its pod.

    What it holds is the index of a cache: without it the pool is empty, and nothing that was wiped comes back. Several
    members would need volumes, and somebody who replaces those that are lost: whoever has that gives its endpoints.
    """
    selector = labels.etcd_labels(pool)
    container = k8s.V1Container(
        name="etcd",
        image=image,
        command=[
            "etcd",
            "--name=etcd",
            f"--data-dir={ETCD_FOLDER}/data",
            f"--listen-client-urls=http://0.0.0.0:{ETCD_PORT}",
            f"--advertise-client-urls=http://{naming.service_host(naming.etcd(pool), namespace)}:{ETCD_PORT}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            f"--quota-backend-bytes={ETCD_QUOTA_BYTES}",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=1000",
        ],
        ports=[k8s.V1ContainerPort(name="client", container_port=ETCD_PORT, protocol="TCP")],
        # Elections are lost where it waits for a core.
        resources=k8s.V1ResourceRequirements(requests={"cpu": "200m", "memory": "256Mi"}),
        security_context=common.container_security(),
        startup_probe=common.http_probe(ETCD_PORT, "/health", period=1, failures=60),
        readiness_probe=common.http_probe(ETCD_PORT, "/health", period=2, failures=2, timeout=2),
        # Not /health: an etcd that is full says there that it is ill, and goes on serving what it has.
        liveness_probe=common.http_probe(ETCD_PORT, "/version", period=10, timeout=5),
        volume_mounts=[k8s.V1VolumeMount(name="data", mount_path=ETCD_FOLDER)],
    )
    return k8s.V1Deployment(
        api_version="apps/v1",
        kind="Deployment",
        metadata=common.metadata(naming.etcd(pool), namespace, owner, selector),
        spec=k8s.V1DeploymentSpec(
            replicas=1,
            strategy=k8s.V1DeploymentStrategy(type="Recreate"),
            selector=k8s.V1LabelSelector(match_labels=selector),
            template=k8s.V1PodTemplateSpec(
                metadata=k8s.V1ObjectMeta(labels=selector),
                spec=k8s.V1PodSpec(
                    enable_service_links=False,
                    automount_service_account_token=False,
                    security_context=common.pod_security(),
                    termination_grace_period_seconds=5,
                    containers=[container],
                    volumes=[common.empty_dir("data")],
                ),
            ),
        ),
    )
