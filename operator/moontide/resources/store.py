"""The children of a KVCachePool: the Mooncake master with its wiper, their Service and the wiper's token. Pure."""

from __future__ import annotations

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePoolSpec
from moontide.resources import common, timeouts

MASTER_CONTAINER = "master"
WIPER_CONTAINER = "wiper"
TOKEN_FOLDER = "/etc/moontide/wiper"
MASTERS_RATIO = 5
"""Percent that an eviction removes where no flag says so."""


def master_arguments(spec: KVCachePoolSpec) -> list[str]:
    """The command line of the master."""
    master = spec.master
    return [
        "mooncake_master",
        f"-rpc_port={naming.MASTER_RPC_PORT}",
        f"-metrics_port={naming.MASTER_METRICS_PORT}",
        f"-default_kv_lease_ttl={master.lease_ttl_milliseconds}",
        f"-client_ttl={master.client_ttl_seconds}",
        f"-eviction_high_watermark_ratio={master.eviction_high_watermark_percent / 100:g}",
        # The master's own default is not written out: it would replace masters that run, and lose their keys.
        *([f"-eviction_ratio={ratio / 100:g}"] if (ratio := master.eviction_ratio_percent) != MASTERS_RATIO else []),
        "-logtostderr",
        *master.extra_args,
    ]


def secret(pool: str, namespace: str, owner: k8s.V1OwnerReference, token: str) -> k8s.V1Secret:
    """The bearer tokens of the pool's wipers: ``token`` has one a line."""
    return common.token_secret(naming.wiper_secret(pool), namespace, owner, labels.store_labels(pool), token)


def service(pool: str, namespace: str, owner: k8s.V1OwnerReference) -> k8s.V1Service:
    """The name under which engines find the master, and the operator the wiper.

    It publishes addresses that are not ready: engines that wait for the master connect the moment it listens, and
    the operator asks a wiper whose master is dead, to be told so.
    """
    selector = labels.store_labels(pool)
    return k8s.V1Service(
        api_version="v1",
        kind="Service",
        metadata=common.metadata(naming.master(pool), namespace, owner, selector),
        spec=k8s.V1ServiceSpec(
            selector=selector,
            publish_not_ready_addresses=True,
            ports=[
                k8s.V1ServicePort(name=name, port=port, target_port=port, protocol="TCP")
                for name, port in (
                    ("rpc", naming.MASTER_RPC_PORT),
                    ("metrics", naming.MASTER_METRICS_PORT),
                    ("wiper", naming.WIPER_PORT),
                )
            ],
        ),
    )


def deployment(
    pool: str, namespace: str, owner: k8s.V1OwnerReference, spec: KVCachePoolSpec, default_image: str
) -> k8s.V1Deployment:
    """The master and its wiper, in one pod: one at a time, since two masters would split the keys."""
    selector = labels.store_labels(pool)
    image = spec.master.image or default_image
    pod = k8s.V1PodSpec(
        enable_service_links=False,
        automount_service_account_token=False,
        security_context=common.pod_security(),
        termination_grace_period_seconds=10,
        containers=[_master(spec, image), _wiper(spec, image)],
        volumes=[
            common.empty_dir("tmp"),
            k8s.V1Volume(
                name="wiper-token",
                secret=k8s.V1SecretVolumeSource(secret_name=naming.wiper_secret(pool), default_mode=0o440),
            ),
        ],
    )
    return k8s.V1Deployment(
        api_version="apps/v1",
        kind="Deployment",
        metadata=common.metadata(naming.master(pool), namespace, owner, selector),
        spec=k8s.V1DeploymentSpec(
            replicas=1,
            strategy=k8s.V1DeploymentStrategy(type="Recreate"),
            selector=k8s.V1LabelSelector(match_labels=selector),
            template=k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels=selector), spec=pod),
        ),
    )


def _master(spec: KVCachePoolSpec, image: str) -> k8s.V1Container:
    return k8s.V1Container(
        name=MASTER_CONTAINER,
        image=image,
        command=master_arguments(spec),
        ports=[
            k8s.V1ContainerPort(name="rpc", container_port=naming.MASTER_RPC_PORT, protocol="TCP"),
            k8s.V1ContainerPort(name="metrics", container_port=naming.MASTER_METRICS_PORT, protocol="TCP"),
        ],
        resources=common.resources(spec.master.resources),
        security_context=common.container_security(),
        startup_probe=common.http_probe(naming.MASTER_METRICS_PORT, "/health", period=1, failures=60),
        readiness_probe=common.http_probe(naming.MASTER_METRICS_PORT, "/health", period=2, failures=2, timeout=2),
        liveness_probe=common.http_probe(naming.MASTER_METRICS_PORT, "/health", period=5, timeout=5),
        volume_mounts=[k8s.V1VolumeMount(name="tmp", mount_path="/tmp")],
    )


def _wiper(spec: KVCachePoolSpec, image: str) -> k8s.V1Container:
    return k8s.V1Container(
        name=WIPER_CONTAINER,
        image=image,
        command=["python3", "-m", "moontide_engine.wiper"],
        env=common.env(
            {
                "MOONTIDE_WIPER_PORT": str(naming.WIPER_PORT),
                "MOONTIDE_WIPER_TOKEN_FILE": f"{TOKEN_FOLDER}/token",
                "MOONTIDE_MASTER_ADDRESS": f"127.0.0.1:{naming.MASTER_RPC_PORT}",
                "MOONTIDE_MASTER_METRICS": f"http://127.0.0.1:{naming.MASTER_METRICS_PORT}",
                **timeouts.rpc(spec.client_timeouts),
                "HOME": "/tmp",
            }
        ),
        ports=[k8s.V1ContainerPort(name="wiper", container_port=naming.WIPER_PORT, protocol="TCP")],
        # A container that asks for nothing is starved on a busy node until its probes fail.
        resources=k8s.V1ResourceRequirements(requests={"cpu": "50m", "memory": "64Mi"}),
        security_context=common.container_security(),
        readiness_probe=common.http_probe(naming.WIPER_PORT, "/healthz", period=2, failures=2, timeout=2),
        liveness_probe=common.http_probe(naming.WIPER_PORT, "/healthz", period=5, timeout=5, initial_delay=10),
        volume_mounts=[
            k8s.V1VolumeMount(name="tmp", mount_path="/tmp"),
            k8s.V1VolumeMount(name="wiper-token", mount_path=TOKEN_FOLDER, read_only=True),
        ],
    )
