"""The children of an InferenceDeployment: Deployment, Service, Mooncake client configuration, admin token. Pure.

The pod template depends on the spec, the pool and the configured defaults alone, never on the operator's own version:
an upgrade of the operator restarts no engine.
"""

from __future__ import annotations

import json

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec, quantity_bytes
from moontide.api.v1alpha1.common import ResourceRequirements
from moontide.api.v1alpha1.inferencedeployment import ServiceSettings
from moontide.api.v1alpha1.kvcachepool import ClientTimeouts
from moontide.resources import common, disruption, masters, sources, timeouts, transport

PRE_STOP_SECONDS = 5
"""Between the end of the endpoint's publication and SIGTERM; kube-proxy needs about one second."""
EXIT_SECONDS = 15
"""What vLLM needs to end after its requests have ended."""
STARTUP_PERIOD_SECONDS = 2
PROGRESS_SECONDS = 600
"""Beside the start of an engine: for a node, an image and a drain."""

ADMIN_TOKEN_FOLDER = "/etc/moontide/admin"
MOONCAKE_FOLDER = "/etc/moontide/mooncake"
CACHE_FOLDER = "/cache"
DEFAULT_MEMO_SECONDS = 2.5
"""The engine's own ``MOONTIDE_LOOKUP_MEMO_SECONDS`` (docs/engine-admin-api.md)."""
_VERSION = "{version}"
LOOKUP_PORT = 8002
"""Names the lookup socket inside a pod; nothing listens on it as a TCP port."""


def secret(name: str, namespace: str, owner: k8s.V1OwnerReference, token: str) -> k8s.V1Secret:
    """The bearer token of the fleet's admin planes."""
    return common.token_secret(naming.admin_secret(name), namespace, owner, labels.engine_labels(name), token)


def service(
    name: str, namespace: str, owner: k8s.V1OwnerReference, settings: ServiceSettings | None = None
) -> k8s.V1Service:
    """The fleet's inference port. The admin port is in no Service."""
    selector = labels.engine_labels(name)
    metadata = common.metadata(name, namespace, owner, selector)
    if settings is not None and settings.annotations:
        metadata.annotations = dict(settings.annotations)
    return k8s.V1Service(
        api_version="v1",
        kind="Service",
        metadata=metadata,
        spec=k8s.V1ServiceSpec(
            selector=selector,
            type=settings.type if settings is not None else None,
            ports=[
                k8s.V1ServicePort(
                    name="http", port=service_port(settings), target_port=naming.INFERENCE_PORT, protocol="TCP"
                )
            ],
        ),
    )


def service_port(settings: ServiceSettings | None) -> int:
    """The port of the fleet's Service."""
    return settings.port if settings is not None else naming.INFERENCE_PORT


def mooncake_json(namespace: str, pool: str, spec: KVCachePoolSpec, election: masters.Election | None = None) -> str:
    """The Mooncake client's configuration file. ``election``: of the pool's masters, where it has several.

    Raises ValueError for a size that is no amount of memory.
    """
    lent = quantity_bytes(spec.memory.per_replica)
    content = {
        # The connector's name for an engine that lends nothing.
        "mode": "embedded" if lent else "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": masters.client_address(pool, namespace, election),
        "global_segment_size": lent,
        "local_buffer_size": quantity_bytes(spec.memory.local_buffer),
        "protocol": spec.transport.protocol,
        "device_name": transport.device_names(spec.transport),
    }
    return json.dumps(content, indent=2) + "\n"


def config_map(name: str, namespace: str, owner: k8s.V1OwnerReference, mooncake: str) -> k8s.V1ConfigMap:
    """Holds the Mooncake client's configuration."""
    return k8s.V1ConfigMap(
        api_version="v1",
        kind="ConfigMap",
        metadata=common.metadata(naming.mooncake_config(name), namespace, owner, labels.engine_labels(name)),
        data={"mooncake.json": mooncake},
    )


def arguments(spec: InferenceDeploymentSpec, uid: str) -> list[str]:
    """The engine's command line; ``uid`` is the InferenceDeployment's. The user's flags come last."""
    command = [
        *("python3", "-m", "vllm.entrypoints.openai.api_server"),
        *sources.arguments(spec.pod_model),
        *("--served-model-name", spec.pod_model.served_name),
        *("--host", "0.0.0.0"),
        *("--port", str(naming.INFERENCE_PORT)),
        *("--shutdown-timeout", str(spec.rollout.drain_seconds)),
    ]
    if spec.kv_cache is not None:
        transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cache_prefix": uid, "lookup_rpc_port": LOOKUP_PORT},
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    if spec.parallelism is not None:
        command += spec.parallelism.arguments()
    return [*command, *spec.engine.args]


def memo_seconds(pool: KVCachePoolSpec) -> float | None:
    """How long an engine may use a lookup again: half the lease, None where the engine's own default is shorter."""
    half = pool.master.lease_ttl_milliseconds / 2000
    return half if half < DEFAULT_MEMO_SECONDS else None


def environment(
    spec: InferenceDeploymentSpec,
    uid: str,
    device: str,
    memo: float | None = None,
    client: ClientTimeouts | None = None,
    election: masters.Election | None = None,
) -> list[k8s.V1EnvVar]:
    """The engine's environment: defaults, over them the user's, over those what the protocol depends on.

    ``memo``: see :func:`memo_seconds`; ``client``: the pool's time limits, None for the defaults; ``election``: see
    :func:`mooncake_json`.
    """
    values = {
        "HOME": CACHE_FOLDER,
        "USER": "moontide",
        # vLLM's 5 s are what many clients keep an idle connection for: a request sent at that moment would be lost.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    }
    if device == "cpu":
        values |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Unset, the workers of every pod on a node are bound to the same first core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    if spec.kv_cache is not None:
        # With Mooncake's own one request waits half a minute when the master or a segment's owner is gone.
        values |= timeouts.engine(client or ClientTimeouts())
        if memo is not None:
            values["MOONTIDE_LOOKUP_MEMO_SECONDS"] = f"{memo:g}"
    values |= {variable.name: variable.value for variable in spec.engine.env}
    values |= {
        "PYTHONHASHSEED": "0",
        "VLLM_SERVER_DEV_MODE": "1",
        "MOONTIDE_ENABLED": "1",
        "MOONTIDE_ADMIN_PORT": str(naming.ADMIN_PORT),
        "MOONTIDE_ADMIN_TOKEN_FILE": f"{ADMIN_TOKEN_FOLDER}/token",
        "MOONTIDE_KEY_NAMESPACE": uid if spec.kv_cache is not None else "",
        "MOONTIDE_WEIGHTS_VERSION": spec.pod_model.version,
    }
    if spec.engine.patches != "Require":
        values["MOONTIDE_PATCHES"] = spec.engine.patches
    if spec.kv_cache is not None:
        values["MOONCAKE_CONFIG_PATH"] = f"{MOONCAKE_FOLDER}/mooncake.json"
        if spec.kv_cache.on_pool_failure == "Crash":
            # Fallback is the engine's own default.
            values["MOONTIDE_ON_POOL_FAILURE"] = "Crash"
        values |= masters.client_environment(election)
    return [
        *common.env(values),
        common.field_env("VLLM_HOST_IP", "status.podIP"),
        common.field_env("MOONTIDE_POD_UID", "metadata.uid"),
        *sources.environment(spec.pod_model),
    ]


def image(spec: InferenceDeploymentSpec, template: str, version: str) -> str:
    """The engine's image: the spec's own, else ``template`` with the spec's vLLM release, or ``version``, in the place
    of ``{version}``.

    Raises ValueError where the spec names a release, no image, and the template is that of one other release.
    """
    if spec.engine.image is not None:
        return spec.engine.image
    wanted = spec.engine.version or version
    if wanted != version and _VERSION not in template:
        raise ValueError(
            f"engine.version is {wanted}, and this operator's engine image {template} is vLLM {version}: write "
            f"engine.image too, or set the chart's defaults.engine.image to a name that holds {_VERSION}"
        )
    return template.replace(_VERSION, wanted)


def container_resources(spec: InferenceDeploymentSpec, device: str) -> k8s.V1ResourceRequirements:
    """The spec's resources; without them what one pod computes on for ``cuda``, and nothing for ``cpu``."""
    if spec.resources is not None:
        return common.resources(spec.resources)
    if device == "cuda":
        gpus = spec.parallelism.pod_gpus if spec.parallelism is not None else 1
        return common.resources(ResourceRequirements(limits={"nvidia.com/gpu": str(gpus)}, requests={}))
    return k8s.V1ResourceRequirements()


def deployment(
    name: str,
    namespace: str,
    owner: k8s.V1OwnerReference,
    spec: InferenceDeploymentSpec,
    *,
    engine_image: str,
    default_device: str,
    mooncake: str | None,
    memo: float | None = None,
    fetch_image: str = "",
    client: ClientTimeouts | None = None,
    election: masters.Election | None = None,
) -> k8s.V1Deployment:
    """The fleet. ``engine_image``: see :func:`image`; ``fetch_image``: see :func:`sources.fetchers`; ``memo``: see
    :func:`memo_seconds`; ``client``: see :func:`environment`; ``mooncake``: the content of its Mooncake configuration,
    None without a pool; ``election``: see :func:`mooncake_json`."""
    selector, device = labels.engine_labels(name), spec.engine.device or default_device
    annotations = {common.TEMPLATE_HASH: common.digest(mooncake)} if mooncake is not None else None
    return k8s.V1Deployment(
        api_version="apps/v1",
        kind="Deployment",
        metadata=common.metadata(name, namespace, owner, selector),
        spec=k8s.V1DeploymentSpec(
            replicas=spec.replicas,
            revision_history_limit=3,
            progress_deadline_seconds=spec.startup_seconds + PROGRESS_SECONDS,
            strategy=k8s.V1DeploymentStrategy(
                type="RollingUpdate",
                rolling_update=k8s.V1RollingUpdateDeployment(
                    max_surge=spec.rollout.max_surge, max_unavailable=spec.rollout.max_unavailable
                ),
            ),
            selector=k8s.V1LabelSelector(match_labels=selector),
            template=k8s.V1PodTemplateSpec(
                metadata=k8s.V1ObjectMeta(labels=selector, annotations=annotations),
                spec=k8s.V1PodSpec(
                    enable_service_links=False,
                    automount_service_account_token=False,
                    security_context=common.pod_security(),
                    termination_grace_period_seconds=PRE_STOP_SECONDS + spec.rollout.drain_seconds + EXIT_SECONDS,
                    init_containers=sources.fetchers(spec.pod_model, fetch_image),
                    containers=[
                        _container(
                            spec,
                            owner.uid,
                            engine_image,
                            device,
                            environment(spec, owner.uid, device, memo, client, election),
                        )
                    ],
                    volumes=_volumes(name, spec),
                    topology_spread_constraints=disruption.spread(name, spec),
                ),
            ),
        ),
    )


def _container(
    spec: InferenceDeploymentSpec,
    uid: str,
    engine_image: str,
    device: str,
    variables: list[k8s.V1EnvVar],
) -> k8s.V1Container:
    port = naming.INFERENCE_PORT
    return k8s.V1Container(
        name=naming.ENGINE_CONTAINER,
        image=engine_image,
        command=arguments(spec, uid),
        env=variables,
        ports=[
            k8s.V1ContainerPort(name="http", container_port=port, protocol="TCP"),
            k8s.V1ContainerPort(name="admin", container_port=naming.ADMIN_PORT, protocol="TCP"),
        ],
        resources=container_resources(spec, device),
        security_context=common.container_security(),
        startup_probe=common.http_probe(
            port,
            "/health",
            period=STARTUP_PERIOD_SECONDS,
            failures=-(-spec.startup_seconds // STARTUP_PERIOD_SECONDS),
            timeout=5,
        ),
        readiness_probe=common.http_probe(port, "/moontide/v1/ready", period=1, failures=3, timeout=2),
        liveness_probe=common.http_probe(port, "/health", period=10, failures=3, timeout=10),
        lifecycle=k8s.V1Lifecycle(pre_stop=k8s.V1LifecycleHandler(sleep=k8s.V1SleepAction(seconds=PRE_STOP_SECONDS))),
        volume_mounts=_mounts(spec),
    )


def _mounts(spec: InferenceDeploymentSpec) -> list[k8s.V1VolumeMount]:
    mounts = [
        k8s.V1VolumeMount(name="tmp", mount_path="/tmp"),
        k8s.V1VolumeMount(name="cache", mount_path=CACHE_FOLDER),
        k8s.V1VolumeMount(name="shm", mount_path="/dev/shm"),
        k8s.V1VolumeMount(name="admin-token", mount_path=ADMIN_TOKEN_FOLDER, read_only=True),
    ]
    if spec.kv_cache is not None:
        mounts.append(k8s.V1VolumeMount(name="mooncake", mount_path=MOONCAKE_FOLDER, read_only=True))
    return [*mounts, *sources.mounts(spec.pod_model)]


def _volumes(name: str, spec: InferenceDeploymentSpec) -> list[k8s.V1Volume]:
    volumes = [
        common.empty_dir("tmp"),
        common.empty_dir("cache"),
        common.empty_dir("shm", memory=spec.shared_memory),
        k8s.V1Volume(
            name="admin-token",
            secret=k8s.V1SecretVolumeSource(secret_name=naming.admin_secret(name), default_mode=0o440),
        ),
    ]
    if spec.kv_cache is not None:
        volumes.append(
            k8s.V1Volume(name="mooncake", config_map=k8s.V1ConfigMapVolumeSource(name=naming.mooncake_config(name)))
        )
    return [*volumes, *sources.volumes(spec.pod_model)]
