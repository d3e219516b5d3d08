"""A real API server takes the CRDs, fills the defaults, and enforces every rule with a sentence that helps."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from moontide import crdgen
from moontide.kube.kinds import KINDS

API = "moontide.dev/v1alpha1"
POOL: dict[str, Any] = {"apiVersion": API, "kind": "KVCachePool", "metadata": {"name": "kv"}, "spec": {}}
FLEET: dict[str, Any] = {
    "apiVersion": API,
    "kind": "InferenceDeployment",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "pvc://weights/a", "servedName": "tiny"}},
}
POLICY: dict[str, Any] = {
    "apiVersion": API,
    "kind": "PolicyVersion",
    "metadata": {"name": "policy"},
    "spec": {"version": 7},
}

HUB = {"source": "hf://org/name", "servedName": "tiny"}
LOAD = {"version": 7, "weights": "Load", "weightsSource": "/models/policy-{version}"}
ADOPTING: dict[str, Any] = {**FLEET, "spec": {"endpoints": {"urls": ["http://10.0.0.7:8001"]}}}


def _with(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(base)
    node = made
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return made


# Object, and a part of the message of the rule that refuses it.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (_with(POOL, "metadata.name", "p" * 57), "metadata.name becomes part of the name of a Service; write at most 56"),
    (_with(POOL, "metadata.name", "1kv"), "metadata.name becomes part of the name of a Service; write at most 56"),
    (_with(POOL, "metadata.name", "kv.a"), "metadata.name becomes part of the name of a Service; write at most 56"),
    (_with(POOL, "spec.memory.perReplica", "1Mi"), "write 16Mi or more"),
    (_with(POOL, "spec.memory.perReplica", "0"), "nothing lends the pool any memory; write memory.storeNodes too"),
    (
        _with(POOL, "spec.memory", {"perReplica": "0", "storeNodes": {"segmentSize": "1Mi"}}),
        "memory.storeNodes.segmentSize is less than Mooncake's smallest segment; write 16Mi or more",
    ),
    (
        _with(POOL, "spec.memory.storeNodes", {"segmentSize": "2Gi", "resources": {"limits": {"memory": "2Gi"}}}),
        "memory.storeNodes.resources.limits.memory is less than segmentSize plus the 256Mi",
    ),
    (
        _with(POOL, "spec.memory.storeNodes", {"segmentSize": "2Gi", "resources": {"limits": {"memory": 2415919103}}}),
        "memory.storeNodes.resources.limits.memory is less than segmentSize plus the 256Mi",
    ),
    (_with(POOL, "spec.memory.storeNodes", {"replicas": 0}), "spec.memory.storeNodes.replicas"),
    *(
        (_with(POOL, "spec.master.extraArgs", [flag]), "master.extraArgs holds a flag that Moontide sets itself")
        for flag in (
            "-rpc_port=1",
            "--client_ttl=1",
            "-enable_offload",
            "--noenable_ha",
            "-eviction_ratio=0.1",
            "-flagfile=/x",
        )
    ),
    *(
        (_with(POOL, "spec.master.extraArgs", [flag]), "write each as one item, for example -rpc_thread_num=8")
        for flag in ("8", "rpc_thread_num=8", "-rpc_thread_num 8")
    ),
    (
        _with(POOL, "spec.master", {"evictionRatioPercent": 50, "evictionHighWatermarkPercent": 50}),
        "master.evictionRatioPercent is not less than evictionHighWatermarkPercent",
    ),
    (_with(POOL, "spec.transport", {"devices": ["mlx5_0"]}), "transport.devices are of RDMA; write protocol: rdma too"),
    (_with(POOL, "spec.master", {"replicas": 2}), "write 1 or 3"),
    (_with(POOL, "spec.master", {"etcd": {"endpoints": ["e:2379"]}}), "write replicas: 3 beside it"),
    (
        _with(POOL, "spec.master", {"replicas": 3, "etcd": {"endpoints": ["https://e:2379"]}}),
        "write each endpoint as HOST:PORT",
    ),
    (_with(FLEET, "metadata.name", "f" * 64), "metadata.name becomes the name of a Service; write at most 63"),
    (_with(FLEET, "metadata.name", "my.chat"), "metadata.name becomes the name of a Service; write at most 63"),
    (_with(FLEET, "spec.policyRef", {"name": "a/b"}), "no object can have this name; write lower-case letters"),
    (_with(FLEET, "spec.model.source", "/data/weights"), "write pvc://CLAIM/FOLDER, hf://ORG/NAME,"),
    *(
        (_with(FLEET, "spec.model.source", source), "write pvc://CLAIM/FOLDER, hf://ORG/NAME, s3://BUCKET/PREFIX or")
        for source in (
            "pvc://claim",
            "hf://name",
            "hf://a/b/c",
            "s3://bucket",
            "s3://bucket/a/",
            "file://a",
            "gs://b/a",
            # A hub's cache on a claim, as llm-d-modelservice names it.
            "pvc+hf://claim/org/name",
        )
    ),
    *(
        (_with(FLEET, "spec.model.source", source), "model.source has a segment '..'")
        for source in (
            "pvc://weights/../../etc",
            "pvc://../x",
            "pvc://w/a/..",
            "s3://b/../other",
            "file:///a/../b",
            "hf://../n",
        )
    ),
    *(
        (_with(POLICY, "spec", {**LOAD, "weightsSource": source}), "weightsSource has a segment '..'")
        for source in ("/models/../{version}", "/../{version}", "/{version}/..", "hf://../{version}")
    ),
    *(
        (_with(FLEET, "spec.model", {"servedName": "tiny", "source": source, **more}), message)
        for source, more, message in (
            ("pvc://w/a", {"revision": "main"}, "or write model.source: hf://ORG/NAME"),
            ("s3://b/a", {"tokenSecretRef": {"name": "hub", "key": "t"}}, "(for s3://: model.credentialsSecretRef)"),
            ("hf://o/n", {"credentialsSecretRef": {"name": "s3"}}, "(for hf://: model.tokenSecretRef)"),
            ("hf://o/n", {"endpoint": "http://store:9000"}, "(for hf://: model.tokenSecretRef)"),
            ("file:///a", {"cache": {"size": "1Gi"}}, "pvc:// and file:// fetch nothing; remove it"),
            ("hf://o/n", {"cache": {}}, "write cache.claim for a PersistentVolumeClaim of yours, or cache.size"),
            ("hf://o/n", {"cache": {"claim": "c", "size": "1Gi"}}, "model.cache is either a claim or a size"),
        )
    ),
    *(
        (
            _with(_with(FLEET, "spec.model", {**HUB, **more}), "spec.engine", {"env": [{"name": name, "value": "x"}]}),
            "which model.tokenSecretRef and model.cache set; remove it",
        )
        for name, more in (
            ("HF_TOKEN", {"tokenSecretRef": {"name": "hub", "key": "t"}}),
            ("HF_HOME", {"cache": {"size": "1Gi"}}),
        )
    ),
    (_with(FLEET, "spec.engine.args", ["--port", "1"]), "engine.args holds a flag that Moontide sets itself"),
    (_with(FLEET, "spec.engine.version", "0.31.0"), "engine.version is a vLLM that the patches do not know: write one"),
    (_with(FLEET, "spec.engine.version", "v0.32"), "spec.engine.version"),
    (_with(FLEET, "spec.engine.patches", "Off"), "spec.engine.patches"),
    *(
        (_with(FLEET, "spec.engine.args", ["--max-model-len", "512", argument]), message)
        for message, given in {
            "write spec.model.source, servedName": ("--model=x", "--served_model_name", "--served", "--revision", "--"),
            "and write spec.kvCache": ("--kv_transfer_config={}", "--kv-transfer", "--kv-transfer-config.kv_role=x"),
            "and write spec.rollout.drainSeconds": ("--shutdown_timeout=1",),
            "TLS and API keys belong in front": (
                "--middle=a.B",
                "--config",
                "--uds=/s",
                "--api_key=x",
                "--ssl-keyfile=k",
            ),
            "(--headless, --api-server-count": (
                "--headless",
                "--nnodes=2",
                "-n2",
                "-r=1",
                "-asc",
                "-dpn",
                "--data-par",
            ),
        }.items()
        for argument in given
    ),
    (
        _with(FLEET, "spec.engine.env", [{"name": "PYTHONHASHSEED", "value": "1"}]),
        "engine.env holds a variable that Moontide sets itself",
    ),
    (
        _with(FLEET, "spec.engine.env", [{"name": "MOONTIDE_ENABLED", "value": "0"}]),
        "engine.env holds a variable that Moontide sets itself",
    ),
    *(
        (
            _with(_with(FLEET, "spec.parallelism", {"tensor": 2}), "spec.engine", {"args": [argument]}),
            "remove it, and write spec.parallelism.tensor, pipeline or data",
        )
        for argument in (
            "--tensor-parallel-size=2",
            "--pipeline_parallel_size",
            "--tensor",
            "-tp",
            "-tp=2",
            "-dp",
            "-pp",
        )
    ),
    *(
        (
            _with(_with(FLEET, "spec.parallelism", sizes), "spec.resources", {"limits": {"nvidia.com/gpu": gpus}}),
            "write that number, or remove spec.resources, as it is the default",
        )
        for sizes, gpus in (
            ({"tensor": 2}, 1),
            ({"tensor": 2, "pipeline": 2}, "2"),
            ({"data": 3}, 4),
            ({}, 2),
            ({"tensor": 4, "nodes": 2}, 4),
        )
    ),
    (_with(FLEET, "spec.parallelism", {"tensor": 3, "nodes": 2}), "write for example tensor: 8, pipeline: 2, nodes: 2"),
    (_with(FLEET, "spec.parallelism", {"tensor": 2, "data": 2, "nodes": 2}), "write data: 1, and more spec.replicas"),
    (_with(ADOPTING, "spec.parallelism", {"tensor": 2}), "remove them, and write one URL a replica"),
    (_with(FLEET, "spec.rollout", {"maxSurge": 0, "maxUnavailable": 0}), "write 1 for one of them"),
    (_with(FLEET, "spec.resources", {"limits": {"cpu": "much"}}), "write for example 1, 500m or 4Gi"),
    (_with(FLEET, "spec.resources", {"requests": {"cpu": -1}}), "write for example 1, 500m or 4Gi"),
    (_with(POOL, "spec.master", {"resources": {"limits": {"cpu": "1 core"}}}), "write for example 1, 500m or 4Gi"),
    (_with(POLICY, "spec.version", "a b"), "version must be a whole number from 0"),
    (_with(POLICY, "spec.version", -1), "version must be a whole number from 0"),
    (_with(POLICY, "spec.version", ""), "version must be a whole number from 0"),
    (
        _with(POLICY, "spec", {"version": 7, "replicaTimeoutSeconds": 120, "deadlineSeconds": 120}),
        "replicaTimeoutSeconds must be less than deadlineSeconds",
    ),
    (_with(POLICY, "spec.preparing", "a b"), "version must be a whole number from 0"),
    (
        _with(POLICY, "spec", {"version": 7, "strategy": "Fence", "runningRequests": "Keep"}),
        "write runningRequests: Wait, or strategy: Barrier",
    ),
    (_with(POLICY, "spec.weights", "Load"), "write for example weights: Load and weightsSource:"),
    (_with(POLICY, "spec.weightsSource", "/models/{version}"), "with weights: Load and only then"),
    *(
        (
            _with(POLICY, "spec", {**LOAD, "weightsSource": source}),
            "write for example /models/policy-{version} or hf://",
        )
        for source in (
            "/models/policy",
            "models/{version}",
            "hf://org/name",
            "hf://{version}",
            "hf://o/n/{version}",
            "/a {version}",
        )
    ),
    (_with(POLICY, "spec", {**LOAD, "strategy": "Fence"}), "write strategy: Barrier, or weights: External"),
    (_with(POLICY, "spec", {**LOAD, "preparing": 8}), "remove it, and write the new version as version"),
    (
        _with(POLICY, "spec", {"version": 7, "strategy": "Fence", "onStoreFailure": "Hold"}),
        "write onStoreFailure: Detach, or strategy: Barrier",
    ),
    (_with(FLEET, "spec.endpoints", {"urls": []}), "a fleet either runs engines or adopts them"),
    ({**FLEET, "spec": {}}, "a fleet either runs engines or adopts them"),
    (_with(ADOPTING, "spec.replicas", 2), "remove them, and write one URL a replica"),
    (_with(ADOPTING, "spec.engine", {"args": ["--seed=1"]}), "remove them, and write one URL a replica"),
    (_with(ADOPTING, "spec.engine", {"adminTlsSecretRef": {"name": "t"}}), "remove them, and write one URL a replica"),
    (_with(ADOPTING, "spec.resources", {"limits": {"cpu": 1}}), "remove them, and write one URL a replica"),
    (_with(ADOPTING, "spec.rollout", {"drainSeconds": 1}), "remove them, and write one URL a replica"),
    (
        _with(ADOPTING, "spec.kvCache", {"poolRef": {"name": "kv"}, "onPoolFailure": "Crash"}),
        "remove them, and write one URL a replica",
    ),
    *(
        (_with(ADOPTING, "spec.endpoints.urls", [url]), "write for example http://10.0.0.7:8001")
        for url in (
            "10.0.0.7:8001",
            "ftp://10.0.0.7:8001",
            "http://10.0.0.7",
            "http://10.0.0.7:8001/",
            "http://10.0.0.7:8001/v1",
            "http://10.0.0.7:8001?a=b",
            "http://user:word@10.0.0.7:8001",
            "http://10.0.0.7:0",
            "http://10.0.0.7:65536",
            "http://Engine-0:8001",
        )
    ),
    (_with(POLICY, "spec.allowedNamespaces", ["*", "team-b"]), "write ['*'] for every namespace, or the names alone"),
]


def _container(name: str, **fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, **fields}]}}


ENGINE_REFUSED = [
    ({"metadata": {"labels": {"moontide.dev/deployment": "x"}}}, "podTemplate.metadata.labels holds a key"),
    ({"metadata": {"labels": {"app.kubernetes.io/component": "x"}}}, "podTemplate.metadata.labels holds a key"),
    ({"metadata": {"annotations": {"moontide.dev/config-hash": "x"}}}, "podTemplate.metadata.annotations holds a key"),
    ({"spec": {"terminationGracePeriodSeconds": 1}}, "write spec.rollout.drainSeconds"),
    ({"spec": {"enableServiceLinks": True}}, "podTemplate.spec holds a field that Moontide sets itself"),
    ({"spec": {"restartPolicy": "Never"}}, "podTemplate.spec holds a field that Moontide sets itself"),
    ({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "write spec.sharedMemory"),
    ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.podTemplate.spec.volumes[0].name"),
    (_container("engine", image="x"), "image: write spec.engine.image"),
    (_container("engine", command=["x"]), "command: write spec.engine.args"),
    (_container("engine", resources={"limits": {"cpu": 1}}), "resources: write spec.resources"),
    (_container("engine", readinessProbe={"httpGet": {"port": 1}}), "readinessProbe: remove it"),
    (_container("engine", envFrom=[{"secretRef": {"name": "x"}}]), "write env with valueFrom"),
    (_container("engine", env=[{"name": "VLLM_PLUGINS", "value": ""}]), "podTemplate sets a variable"),
    (_container("engine", env=[{"name": "MOONTIDE_ENABLED", "value": "0"}]), "podTemplate sets a variable"),
    (_container("engine", volumeMounts=[{"name": "x", "mountPath": "/etc/moontide/admin"}]), "write another mountPath"),
    ({"spec": {f"field{number}": 1 for number in range(65)}}, "Too many"),
    ({"unknown": 1}, 'unknown field "spec.podTemplate.unknown"'),
]
SPEC_REFUSED = [
    ({"service": {"type": "ExternalName"}}, "spec.service.type"),
    ({"service": {"port": 0}}, "spec.service.port"),
    ({"startupSeconds": 1}, "spec.startupSeconds"),
]
MASTER_REFUSED = [
    (_container("master", image="x"), "image: write spec.master.image"),
    (_container("wiper", command=["x"]), "container wiper that Moontide sets itself"),
    ({"spec": {"volumes": [{"name": "wiper-token", "emptyDir": {}}]}}, "podTemplate.spec.volumes holds a volume"),
    ({"metadata": {"labels": {"moontide.dev/pool": "x"}}}, "podTemplate.metadata.labels holds a key"),
]
REFUSED += [(_with(FLEET, "spec.podTemplate", over), said) for over, said in ENGINE_REFUSED]
REFUSED += [(_with(POOL, "spec.podTemplate", over), said) for over, said in MASTER_REFUSED]
REFUSED += [
    (_with(FLEET, f"spec.{field}", value), said) for spec, said in SPEC_REFUSED for field, value in spec.items()
]
REFUSED += [
    (_with(ADOPTING, f"spec.{field}", value), "remove them, and write one URL a replica")
    for field, value in (
        ("podTemplate", {}),
        ("service", {"port": 80}),
        ("spread", "Prefer"),
        ("startupSeconds", 60),
        ("rollout", {"disruptionBudget": "Off"}),
    )
]
EPOCH_RULE = "an epoch only goes up"
"""Of a status that follows another: it has a test of its own."""
MODE_RULE = "a fleet cannot change from pods to spec.endpoints or back"
"""Of a spec that follows another: it has a test of its own."""
NODES_RULE = "parallelism.nodes cannot be changed"
"""Of a spec that follows another: it has a test of its own."""

MASTERS_RULES = ("master.replicas cannot change", "master.etcd cannot change")
"""The same, of a pool."""


def _rules(node: Any) -> Iterator[dict[str, str]]:
    if isinstance(node, dict):
        yield from node.get("x-kubernetes-validations", [])
        for value in node.values():
            yield from _rules(value)
    elif isinstance(node, list):
        for value in node:
            yield from _rules(value)


@pytest.fixture(scope="module", name="unused")
def _unused(kubectl: Any) -> str:
    """A namespace for what is never created in it."""
    kubectl.make_namespace("refused")
    return "refused"


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[f"{b['kind']}-{i}" for i, (b, _) in enumerate(REFUSED)])
def test_each_rule_is_enforced_with_its_message(kubectl: Any, unused: str, body: dict[str, Any], message: str) -> None:
    said = kubectl.refusal(_with(body, "metadata.namespace", unused))
    assert message in said


def test_no_rule_is_without_a_case() -> None:
    messages = {rule["message"] for kind in KINDS for rule in _rules(crdgen.schema(kind.model))}
    assert messages
    parts = [EPOCH_RULE, MODE_RULE, NODES_RULE, *MASTERS_RULES, *(part for _, part in REFUSED)]
    untested = [message for message in messages if not any(part in message for part in parts)]
    assert untested == []


@pytest.mark.parametrize(
    "body",
    [
        _with(FLEET, "spec.replicas", -1),
        _with(FLEET, "spec.replicas", "two"),
        _with(FLEET, "spec.model", {"source": "pvc://w/a"}),
        _with(FLEET, "spec.engine.device", "tpu"),
        _with(FLEET, "spec.engine.adminTlsSecretRef", {"name": ""}),
        _with(FLEET, "spec.parallelism", {"tensor": 0}),
        _with(FLEET, "spec.model.version", "a b"),
        _with(FLEET, "spec.kvCache", {"poolRef": {"name": "kv"}, "onPoolFailure": "Hold"}),
        _with(POLICY, "spec", {}),
        _with(POLICY, "spec.version", None),
        _with(POLICY, "spec.runningRequests", "Drop"),
        _with(POLICY, "spec.strategy", "Rolling"),
        _with(POLICY, "spec.weights", "Pull"),
        _with(POLICY, "spec.onStoreFailure", "Fallback"),
        _with(POLICY, "spec.deadlineSeconds", 1),
        _with(POLICY, "spec.allowedNamespaces", ["Team_B"]),
        _with(POLICY, "spec.allowedNamespaces", ["a", "a"]),
        _with(FLEET, "spec.policyRef", {"name": "p", "namespace": "Team_B"}),
        _with(ADOPTING, "spec.endpoints", {"urls": ["http://10.0.0.7:8001"] * 2}),
        _with(ADOPTING, "spec.endpoints", {"gone": ["b"]}),
        _with(POOL, "spec.memory.perReplica", "lots"),
        _with(POOL, "spec.master.wiperTlsSecretRef", {"name": ""}),
        _with(POOL, "spec.master.evictionHighWatermarkPercent", 101),
    ],
    ids=lambda body: json.dumps(body["spec"])[:60],
)
def test_the_schema_refuses(kubectl: Any, unused: str, body: dict[str, Any]) -> None:
    said = kubectl.refusal(_with(body, "metadata.namespace", unused))
    assert "spec" in said


@pytest.mark.parametrize("body", [POOL, FLEET, POLICY], ids=lambda body: body["kind"])
def test_unknown_fields_are_refused_by_strict_validation(kubectl: Any, unused: str, body: dict[str, Any]) -> None:
    said = kubectl.refusal(_with(_with(body, "metadata.namespace", unused), "spec.notAField", 1))
    assert "unknown field" in said


def test_defaults(kubectl: Any, namespace: str) -> None:
    bare_pool = {key: value for key, value in POOL.items() if key != "spec"}
    kubectl.apply(*(_with(each, "metadata.namespace", namespace) for each in (bare_pool, FLEET, POLICY)))
    pool = kubectl.must_get("kvp", "kv", namespace)["spec"]
    assert pool["memory"] == {"perReplica": "1Gi", "localBuffer": "64Mi"}
    assert pool["master"]["clientTtlSeconds"] == 4
    fleet = kubectl.must_get("ifd", "chat", namespace)["spec"]
    assert fleet["replicas"] == 1
    assert fleet["rollout"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
        "drainSeconds": 30,
        "disruptionBudget": "Managed",
    }
    assert fleet["startupSeconds"] == 1800
    assert fleet["model"]["version"] == "default"
    policy = kubectl.must_get("polv", "policy", namespace)["spec"]
    assert policy == {
        "version": 7,
        "strategy": "Barrier",
        "weights": "External",
        "runningRequests": "Wait",
        "requestsDuringBarrier": "Queue",
        "deadlineSeconds": 120,
        "prepareDeadlineSeconds": 600,
        "replicaTimeoutSeconds": 20,
        "onReplicaFailure": "Replace",
        "onStoreFailure": "Detach",
        "suspend": False,
        "resetNonce": "",
        "allowedNamespaces": [],
    }


@pytest.mark.parametrize("version", [0, 42, "42", "step-42", "2026.1:a_b"])
def test_versions_that_are_fine(kubectl: Any, namespace: str, version: int | str) -> None:
    kubectl.apply(_with(_with(POLICY, "metadata.namespace", namespace), "spec.version", version))
    assert kubectl.must_get("polv", "policy", namespace)["spec"]["version"] == version


@pytest.mark.parametrize(
    "source", ["/models/policy-{version}", "/{version}", "/a..b/..{version}/...", "hf://org/name-{version}"]
)
def test_sources_that_are_fine(kubectl: Any, namespace: str, source: str) -> None:
    kubectl.apply(_with(_with(POLICY, "metadata.namespace", namespace), "spec", {**LOAD, "weightsSource": source}))
    assert kubectl.must_get("polv", "policy", namespace)["spec"]["weightsSource"] == source


def test_a_part_of_an_object_gets_the_defaults_of_the_rest(kubectl: Any, namespace: str) -> None:
    body = _with(_with(FLEET, "metadata.namespace", namespace), "spec.rollout", {"maxSurge": 1})
    kubectl.apply(body)
    rollout = kubectl.must_get("ifd", "chat", namespace)["spec"]["rollout"]
    assert rollout == {"maxSurge": 1, "maxUnavailable": 1, "drainSeconds": 30, "disruptionBudget": "Managed"}


@pytest.mark.parametrize(
    "more",
    [
        {"parallelism": {"tensor": 2, "pipeline": 2}, "resources": {"limits": {"nvidia.com/gpu": 4}}},
        {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "64Gi"}}},
        {"parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2}, "resources": {"limits": {"nvidia.com/gpu": 8}}},
        {"parallelism": {"data": 2}, "resources": {"limits": {"amd.com/gpu": 2}}},
        {
            "parallelism": {"tensor": 2},
            "engine": {"args": ["--enable-expert-parallel", "-ep", "--seed=1", "-dcp", "2"]},
        },
    ],
)
def test_parallelism_that_is_fine(kubectl: Any, namespace: str, more: dict[str, Any]) -> None:
    body = _with(FLEET, "metadata.namespace", namespace)
    kubectl.apply({**body, "spec": {**body["spec"], **more}})


@pytest.mark.parametrize(
    "model",
    [
        {"source": "hf://org/name", "revision": "refs/pr/1", "tokenSecretRef": {"name": "hub", "key": "token"}},
        {"source": "hf://org/name", "cache": {"claim": "c"}},
        {"source": "s3://bucket/a/b", "credentialsSecretRef": {"name": "s3"}, "endpoint": "http://store:9000"},
        {"source": "s3://bucket/a", "region": "eu-1", "cache": {"size": "100Gi"}},
        {"source": "file:///opt/weights"},
        {"source": "pvc://weights/a..b/..c/..."},
    ],
    ids=lambda model: model["source"],
)
def test_models_that_are_fine(kubectl: Any, namespace: str, model: dict[str, Any]) -> None:
    kubectl.apply(_with(_with(FLEET, "metadata.namespace", namespace), "spec.model", {**model, "servedName": "m"}))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-model-len", "512", "--seed", "-1", "-sc", '{"method": "ngram"}', "--quantization=awq"],
        ["--enable-lora", "--lora-modules", "a=/models/a", "--data-parallel-size=2", "-tp", "2", "-dp", "2", "-ep"],
        ["--model-impl", "auto", "--tokenizer-revision=x", "--hf-overrides", "{}", "--no-enable-prefix-caching"],
    ],
)
def test_arguments_that_are_fine(kubectl: Any, namespace: str, arguments: list[str]) -> None:
    kubectl.apply(_with(_with(FLEET, "metadata.namespace", namespace), "spec.engine.args", arguments))


@pytest.mark.parametrize("url", ["https://engine-0.rl.svc:1", "http://[fd00::7]:65535", "http://10.0.0.7:8001"])
def test_urls_that_are_fine(kubectl: Any, namespace: str, url: str) -> None:
    kubectl.apply(_with(_with(ADOPTING, "metadata.namespace", namespace), "spec.endpoints.urls", [url]))


@pytest.mark.parametrize(("first", "second"), [(FLEET, ADOPTING), (ADOPTING, FLEET)], ids=["to-urls", "to-pods"])
def test_a_fleet_keeps_its_way(kubectl: Any, namespace: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    kubectl.apply(_with(first, "metadata.namespace", namespace))
    with pytest.raises(Exception, match=MODE_RULE):
        kubectl.apply(_with(second, "metadata.namespace", namespace))


def test_a_replica_keeps_the_number_of_its_nodes(kubectl: Any, namespace: str) -> None:
    one = _with(FLEET, "metadata.namespace", namespace)
    kubectl.apply(one)
    kubectl.apply(_with(one, "spec.parallelism", {"tensor": 2}))
    with pytest.raises(Exception, match=NODES_RULE):
        kubectl.apply(_with(one, "spec.parallelism", {"tensor": 2, "nodes": 2}))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"replicas": 3}, MASTERS_RULES[0]),
        ({"replicas": 3}, {"replicas": 1}, MASTERS_RULES[0]),
        ({"replicas": 3}, {"replicas": 3, "etcd": {"endpoints": ["e:2379"]}}, MASTERS_RULES[1]),
    ],
)
def test_a_pool_keeps_its_masters(
    kubectl: Any, namespace: str, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    kubectl.apply(_with(_with(POOL, "metadata.namespace", namespace), "spec.master", first))
    with pytest.raises(Exception, match=message):
        kubectl.apply(_with(_with(POOL, "metadata.namespace", namespace), "spec.master", second))


def test_status_belongs_to_the_status_subresource(kubectl: Any, namespace: str) -> None:
    body = _with(_with(POLICY, "metadata.namespace", namespace), "status", {"epoch": 9})
    kubectl("create", "-f", "-", stdin=json.dumps(body))
    assert kubectl.must_get("polv", "policy", namespace).get("status", {}).get("epoch", 0) != 9


def test_a_writer_that_has_not_seen_the_last_epoch_is_refused(kubectl: Any, namespace: str) -> None:
    """A leader that was frozen in the middle of writing its status, and goes on when another leads."""
    body = _with(_with(POLICY, "metadata.namespace", namespace), "metadata.name", "late")
    kubectl.apply(body)

    def write(epoch: int) -> Any:
        patch = json.dumps({"status": {"epoch": epoch}})
        return kubectl("patch", "polv", "late", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)

    write(1001)
    with pytest.raises(Exception, match=EPOCH_RULE):
        write(1000)
    write(1002)


def test_printer_columns(kubectl: Any, namespace: str) -> None:
    kubectl.apply(*(_with(each, "metadata.namespace", namespace) for each in (POOL, FLEET, POLICY)))

    def headers(kind: str) -> list[str]:
        first: str = kubectl("get", kind, "-n", namespace).splitlines()[0]
        return first.split()

    assert headers("kvp") == ["NAME", "READY", "LEADER", "CLIENTS", "KEYS", "USED", "AGE"]
    assert headers("ifd") == ["NAME", "MODEL", "READY", "CURRENT", "VERSION", "POOL", "AGE"]
    assert headers("polv") == ["NAME", "VERSION", "STATE", "REPLICAS", "PAUSED", "AGE"]
