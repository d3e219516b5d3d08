"""InferenceDeployment: a fleet of equal vLLM replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from moontide.api.v1alpha1 import arguments, parallelism
from moontide.api.v1alpha1.common import (
    AdminToken,
    Api,
    Conditions,
    EnvVar,
    Name,
    NamespaceName,
    ObjectName,
    Quantity,
    ResourceRequirements,
    rule,
    validations,
)
from moontide.api.v1alpha1.model import Model
from moontide.api.v1alpha1.parallelism import Parallelism
from moontide.api.v1alpha1.podtemplate import ENGINE_CONTAINERS, PodTemplate, template_rules

MANAGED_ENV = ("PYTHONHASHSEED", "VLLM_PLUGINS", "VLLM_PORT", "VLLM_HOST_IP", "MOONCAKE_CONFIG_PATH")
"""Environment variables that the operator sets itself; every ``MOONTIDE_`` and dev-mode variable too."""

ENGINE_VERSIONS = ("0.22.1", "0.23.0", "0.24.0", "0.27.1", "0.32.0", "0.33.0")
"""vLLM releases that the engine plugin's patches know."""

_version_list = "[" + ", ".join(f"'{version}'" for version in ENGINE_VERSIONS) + "]"
_env_list = "[" + ", ".join(f"'{name}'" for name in (*MANAGED_ENV, "VLLM_SERVER_DEV_MODE")) + "]"


class Engine(Api):
    """How the engine process runs."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            *arguments.rules(),
            rule(
                f"!self.env.exists(e, e.name in {_env_list} || e.name.startsWith('MOONTIDE_'))",
                "engine.env holds a variable that Moontide sets itself ("
                + ", ".join(MANAGED_ENV)
                + ", VLLM_SERVER_DEV_MODE, MOONTIDE_*); remove it",
            ),
            rule(
                f"!has(self.version) || self.patches == 'Auto' || self.version in {_version_list}",
                "engine.version is a vLLM that the patches do not know: write one of "
                + ", ".join(ENGINE_VERSIONS)
                + ", or engine.patches: Auto to run it with the patches that know it",
            ),
        )
    )

    image: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    """Image with vLLM and the Moontide plugin; the operator's configured image when absent."""
    version: Annotated[str | None, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=32)] = None
    """The vLLM release, for example 0.32.0: it picks the image unless ``image`` names one. Engines that report another
    release are named in condition ``EnginePatched``. The operator's configured release when absent."""
    patches: Literal["Require", "Auto"] = "Require"
    """What an engine does whose vLLM the patches do not know: ``Require``: it does not start. ``Auto``: it runs with
    those that know it; condition ``EnginePatched`` then says which are missing."""
    device: Literal["cuda", "cpu"] | None = None
    """The operator's configured device when absent (``cuda`` unless changed). ``cpu`` is for trying things out: it
    drops the GPU request and sets what vLLM's CPU build needs."""
    args: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=128)] = ()
    """More flags for ``vllm serve``."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = ()
    admin_tls_secret_ref: ObjectName | None = None
    """A Secret of type kubernetes.io/tls for the admin ports, with the DNS name ``NAME.NAMESPACE.svc`` of the fleet;
    plain HTTP when absent. A renewed one restarts nothing."""


class KVCache(Api):
    """The pool the replicas share KV through."""

    pool_ref: ObjectName
    on_pool_failure: Literal["Fallback", "Crash"] = "Fallback"
    """What an engine does that cannot reach the pool at its start, within a minute. ``Fallback``: it starts without it,
    condition ``KVCacheAttached`` says so, and its pod is made anew when the pool has been ready for a minute.
    ``Crash``: it ends, and is started again until the pool is there. A replica of several nodes always does that."""


class Rollout(Api):
    """How pods are replaced."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.maxSurge > 0 || self.maxUnavailable > 0",
                "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced; write 1 for one of them",
            ),
        )
    )

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 0
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 1
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 30
    """How long requests in flight may take to end after SIGTERM."""
    disruption_budget: Literal["Managed", "Off"] = "Managed"
    """``Managed``: a PodDisruptionBudget keeps drains of nodes from taking more engines at a time than
    ``maxUnavailable`` (at least one). ``Off``: there is none of Moontide's, and you may write your own: a pod must be
    in one at most."""


class ServiceSettings(Api):
    """How clients reach the fleet's Service."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The Service's port; engines listen on 8000 whatever is written here."""
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=16384)]], Field(default_factory=dict, max_length=64)
    ]
    """For whoever makes load balancers and DNS names from Services."""


class PolicyRef(Api):
    """Names a PolicyVersion."""

    name: Name
    namespace: NamespaceName | None = None
    """Its namespace; the fleet's own when absent. Another one's ``spec.allowedNamespaces`` must list the fleet's."""


_port = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"  # 1 to 65535
_url = f"^https?://([a-z0-9]([-a-z0-9.]*[a-z0-9])?|[[][0-9a-f:.]+[]]):{_port}$"
EngineUrl = Annotated[
    str,
    Field(
        max_length=280,
        json_schema_extra=validations(
            rule(
                f"self.matches('{_url}')",
                "endpoints.urls holds more or less than scheme, host and port of an engine's admin port, in small "
                "letters; write for example http://10.0.0.7:8001",
            )
        ),
    ),
]
BootId = Annotated[str, Field(min_length=1, max_length=64)]


class Endpoints(Api):
    """Engines that others launch. Each belongs to this fleet by its ``MOONTIDE_KEY_NAMESPACE``, which is the fleet's
    UID, and takes the token of Secret ``NAME-admin``."""

    urls: Annotated[tuple[EngineUrl, ...], Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "set"})]
    """``http://HOST:PORT`` of each engine's admin port. May be empty. One that is removed is closed."""
    gone: Annotated[tuple[BootId, ...], Field(max_length=256, json_schema_extra={"x-kubernetes-list-type": "set"})] = ()
    """Boot ids of engines that do not answer and whose process has ended for certain: they are no longer waited for."""


_pods_only = (
    "!has(self.resources) && !has(self.parallelism) && "
    "self.replicas == 1 && self.sharedMemory == '1Gi' && !has(self.engine.image) && "
    "!has(self.engine.device) && !has(self.engine.version) && "
    "!has(self.engine.adminTlsSecretRef) && "
    "self.engine.patches == 'Require' && self.engine.args.size() == 0 && self.engine.env.size() == 0 && "
    "self.rollout.maxSurge == 0 && self.rollout.maxUnavailable == 1 && self.rollout.drainSeconds == 30 && "
    "self.rollout.disruptionBudget == 'Managed' && !has(self.spread) && "
    "!has(self.podTemplate) && !has(self.service) && self.startupSeconds == 1800 && "
    "(!has(self.kvCache) || self.kvCache.onPoolFailure == 'Fallback')"
)
_template_rules = template_rules(
    ENGINE_CONTAINERS,
    (*MANAGED_ENV, "VLLM_SERVER_DEV_MODE"),
    ("admin-token", "models", "mooncake", "shm"),
    "write spec.sharedMemory for the size of /dev/shm, and spec.model.source for weights",
)


class InferenceDeploymentSpec(Api):
    """What the user asks of a fleet."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "has(self.model) != has(self.endpoints)",
                "a fleet either runs engines or adopts them: write spec.model for pods that Moontide makes, or "
                "spec.endpoints for engines that you launch",
            ),
            rule(
                f"!has(self.endpoints) || ({_pods_only})",
                "spec.engine, replicas, resources, parallelism, sharedMemory, rollout, startupSeconds, service, "
                "spread, kvCache.onPoolFailure and podTemplate are of pods, and spec.endpoints makes none: remove "
                "them, and write one URL a replica",
            ),
            *parallelism.rules(),
            rule(
                "!has(self.model) || !self.engine.env.exists(e, e.name == 'HF_TOKEN' && has(self.model.tokenSecretRef) "
                "|| e.name == 'HF_HOME' && has(self.model.cache))",
                "engine.env holds HF_TOKEN or HF_HOME, which model.tokenSecretRef and model.cache set; remove it",
            ),
            rule(
                "has(self.endpoints) == has(oldSelf.endpoints)",
                "a fleet cannot change from pods to spec.endpoints or back: write another InferenceDeployment",
            ),
        )
    )

    model: Model | None = None
    engine: Annotated[Engine, Field(default_factory=Engine)]
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    resources: ResourceRequirements | None = None
    """Container resources; when absent the ``nvidia.com/gpu`` that ``parallelism`` asks for (device cuda) or none
    (device cpu)."""
    parallelism: Parallelism | None = None
    """How many GPUs one replica computes on; one when absent, unless ``engine.args`` says otherwise."""
    shared_memory: Quantity = "1Gi"
    """Size of ``/dev/shm``; vLLM needs at least 160Mi."""
    kv_cache: KVCache | None = None
    """Without it the replicas keep local caches only."""
    policy_ref: PolicyRef | None = None
    """The PolicyVersion this fleet follows; without it epoch 0 holds for ever."""
    rollout: Annotated[Rollout, Field(default_factory=Rollout)]
    startup_seconds: Annotated[int, Field(ge=30, le=86_400)] = 1800
    """How long an engine may take to load its model. Until it answers, no liveness probe can end it; one that takes
    longer is restarted."""
    spread: Literal["Prefer", "Require"] | None = None
    """Replicas on different nodes, within this fleet and template: ``Prefer``: where it can be had. ``Require``: nodes
    differ by one replica at most, and a pod waits for a node that keeps it so. When absent, the scheduler's own spread
    holds."""
    service: ServiceSettings | None = None
    """The Service in front of the fleet; a ClusterIP on port 8000 when absent."""
    pod_template: Annotated[PodTemplate | None, Field(json_schema_extra=_template_rules)] = None
    """What should differ in the engines' pods: merged over what Moontide makes."""
    endpoints: Endpoints | None = None
    """Engines that others launch, in place of pods."""

    @property
    def pod_model(self) -> Model:
        """The model of a fleet that has pods. Raises ValueError for one that adopts engines."""
        if self.model is None:
            raise ValueError("engines that others launch have no model of ours")
        return self.model

    @property
    def nodes(self) -> int:
        """Pods of one replica."""
        return self.parallelism.nodes if self.parallelism is not None else 1

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return self.replicas if self.endpoints is None else len(self.endpoints.urls)


class ClosedReplica(Api):
    """A replica that serves nothing, and why."""

    name: str
    address: str | None = None
    """``host:port`` of its admin plane, where a trainer pushes weights, or its URL where that is not http."""
    reason: str
    message: Annotated[str, Field(max_length=1024)] = ""


class InferenceDeploymentStatus(Api):
    """What the operator sees of a fleet."""

    observed_generation: int | None = None
    conditions: Conditions = ()
    replicas: int = 0
    ready_replicas: int = 0
    current_replicas: int = 0
    """Replicas open in the fleet's epoch."""
    ready: str | None = None
    """Ready of wanted, for people: "2/2"."""
    current: str | None = None
    """Current of wanted, for people: "2/2"."""
    selector: str | None = None
    """Label selector of the pods, for the scale subresource."""
    version: str | None = None
    epoch: int | None = None
    endpoint: str | None = None
    """Host of the Service in front of the fleet."""
    pool: str | None = None
    closed: Annotated[tuple[ClosedReplica, ...], Field(max_length=10)] = ()
    adopted: dict[str, Annotated[str, Field(max_length=280)]] = Field(default_factory=dict, max_length=1024)
    """Engines of ``spec.endpoints`` that may serve or write: boot id to URL, written before the first admission."""
    admin_token: AdminToken | None = None
    """Absent until the admin token was rotated for the first time."""


class InferenceDeployment(Api):
    """A fleet of equal vLLM replicas that share KV through a pool and follow a policy."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            rule(
                "self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name becomes the name of a Service; write at most 63 lower-case letters, digits and '-', "
                "with a letter first",
            ),
        )
    )

    spec: InferenceDeploymentSpec
    status: InferenceDeploymentStatus | None = None
