"""The children of a fleet."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from kubernetes.aio import client as k8s

import moontide
from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.api.v1alpha1.inferencedeployment import ENGINE_VERSIONS
from moontide.resources import engine
from moontide_engine.patches import RELEASES


def _wire(child: Any) -> dict[str, Any]:
    """What goes over the wire: the client's own serialisation."""
    made: dict[str, Any] = k8s.ApiClient().sanitize_for_serialization(child)
    return made


OWNER = k8s.V1OwnerReference(
    api_version="moontide.dev/v1alpha1",
    kind="InferenceDeployment",
    name="chat",
    uid="u-2",
    controller=True,
    block_owner_deletion=True,
)
LABELS = {
    "app.kubernetes.io/managed-by": "moontide",
    "app.kubernetes.io/component": "engine",
    "moontide.dev/deployment": "chat",
}


def _spec(**more: Any) -> InferenceDeploymentSpec:
    model = {"source": "pvc://weights/tiny/a", "servedName": "tiny", "version": "7"}
    return InferenceDeploymentSpec.model_validate({"model": model, **more})


def _deployment(spec: InferenceDeploymentSpec, mooncake: str | None = None, device: str = "cuda") -> dict[str, Any]:
    return _wire(
        engine.deployment("chat", "ns", OWNER, spec, engine_image="engine:1", default_device=device, mooncake=mooncake)
    )


def _pod(wire: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = wire["spec"]["template"]["spec"]
    return pod


def _container(wire: dict[str, Any]) -> dict[str, Any]:
    (container,) = _pod(wire)["containers"]
    assert isinstance(container, dict)
    return container


def _env(wire: dict[str, Any]) -> dict[str, str]:
    env = _container(wire)["env"]
    assert len({each["name"] for each in env}) == len(env)
    return {each["name"]: each["value"] for each in env if "value" in each}


def _flags(wire: dict[str, Any]) -> dict[str, str]:
    command = _container(wire)["command"]
    assert command[:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    return dict(zip(command[3::2], command[4::2], strict=True))


def test_the_image_is_that_of_the_release() -> None:
    template = "there/engine:1-vllm{version}-cuda"
    assert engine.image(_spec(), template, "0.32.0") == "there/engine:1-vllm0.32.0-cuda"
    assert engine.image(_spec(engine={"version": "0.22.1"}), template, "0.32.0") == "there/engine:1-vllm0.22.1-cuda"
    own = _spec(engine={"version": "0.22.1", "image": "mine:1"})
    assert engine.image(own, template, "0.32.0") == "mine:1"
    assert engine.image(_spec(engine={"version": "0.32.0"}), "one:1", "0.32.0") == "one:1"
    with pytest.raises(
        ValueError, match=r"engine\.version is 0\.22\.1, and .* one:1 is vLLM 0\.32\.0: write engine\.image"
    ):
        engine.image(_spec(engine={"version": "0.22.1"}), "one:1", "0.32.0")


def test_a_policy_for_unknown_engines_is_told_only_where_it_is_asked_for() -> None:
    assert "MOONTIDE_PATCHES" not in _env(_deployment(_spec()))
    assert _env(_deployment(_spec(engine={"patches": "Auto"})))["MOONTIDE_PATCHES"] == "Auto"


def test_the_operator_and_the_plugin_know_the_same_releases() -> None:
    assert ENGINE_VERSIONS == RELEASES


def test_command_without_a_pool() -> None:
    wire = _deployment(_spec(rollout={"drainSeconds": 12}))
    assert _flags(wire) == {
        "--model": "/models/tiny/a",
        "--served-model-name": "tiny",
        "--host": "0.0.0.0",
        "--port": "8000",
        "--shutdown-timeout": "12",
    }
    env = _env(wire)
    assert env["MOONTIDE_KEY_NAMESPACE"] == ""
    assert "MOONCAKE_CONFIG_PATH" not in env
    assert "mooncake" not in {each["name"] for each in _pod(wire)["volumes"]}
    assert "annotations" not in wire["spec"]["template"]["metadata"]


def test_command_with_a_pool() -> None:
    wire = _deployment(_spec(kvCache={"poolRef": {"name": "kv"}}), mooncake="{}")
    transfer = json.loads(_flags(wire)["--kv-transfer-config"])
    assert transfer["kv_connector"] == "MooncakeStoreConnector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["cache_prefix"] == "u-2"
    env = _env(wire)
    assert env["MOONTIDE_KEY_NAMESPACE"] == "u-2"
    assert env["MOONCAKE_CONFIG_PATH"] == "/etc/moontide/mooncake/mooncake.json"
    assert env["MC_RPC_CONNECT_TIMEOUT_MS"] == "500"
    assert env["MC_RPC_TIMEOUT_MS"] == "2000"
    assert env["MC_HANDSHAKE_CONNECT_TIMEOUT"] == "1"
    volumes = {each["name"]: each for each in _pod(wire)["volumes"]}
    assert volumes["mooncake"]["configMap"]["name"] == "chat-mooncake"


@pytest.mark.parametrize(("lease", "memo"), [(5_000, None), (60_000, None), (3_000, "1.5"), (500, "0.25")])
def test_lookups_are_used_again_for_half_the_lease_at_most(lease: int, memo: str | None) -> None:
    pool = KVCachePoolSpec.model_validate(
        {"master": {"leaseTtlMilliseconds": lease}, "memory": {"perReplica": "1Gi", "localBuffer": "1Gi"}}
    )
    spec = _spec(kvCache={"poolRef": {"name": "kv"}})
    made = engine.environment(spec, "u-2", "cuda", engine.memo_seconds(pool))
    assert {each.name: each.value for each in made}.get("MOONTIDE_LOOKUP_MEMO_SECONDS") == memo


def test_user_flags_come_last() -> None:
    wire = _deployment(_spec(engine={"args": ["--max-model-len", "512"]}))
    assert _container(wire)["command"][-2:] == ["--max-model-len", "512"]


@pytest.mark.parametrize(
    ("source", "path", "claim"),
    [
        ("pvc://weights/tiny/a", "/models/tiny/a", "weights"),
        ("pvc://w/x", "/models/x", "w"),
        ("hf://org/name", "org/name", None),
    ],
)
def test_model_source(source: str, path: str, claim: str | None) -> None:
    spec = _spec(model={"source": source, "servedName": "tiny"})
    wire = _deployment(spec)
    assert _flags(wire)["--model"] == path
    volumes = {each["name"]: each for each in _pod(wire)["volumes"]}
    mounts = {each["name"]: each for each in _container(wire)["volumeMounts"]}
    if claim is None:
        assert "models" not in volumes
        assert "models" not in mounts
    else:
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
        assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}


@pytest.mark.parametrize(
    ("sizes", "flags", "gpus"),
    [
        ({"tensor": 4}, {"--tensor-parallel-size": "4"}, "4"),
        ({"tensor": 2, "pipeline": 2}, {"--tensor-parallel-size": "2", "--pipeline-parallel-size": "2"}, "4"),
        ({"tensor": 2, "data": 3}, {"--tensor-parallel-size": "2", "--data-parallel-size": "3"}, "6"),
    ],
)
def test_one_engine_over_several_gpus(sizes: dict[str, int], flags: dict[str, str], gpus: str) -> None:
    wire = _deployment(_spec(parallelism=sizes))
    found = {name: value for name, value in _flags(wire).items() if "-parallel-" in name}
    assert found == flags
    assert _container(wire)["resources"] == {"limits": {"nvidia.com/gpu": gpus}}
    assert _container(_deployment(_spec(parallelism=sizes), device="cpu"))["resources"] == {}


def test_environment_of_the_contract() -> None:
    wire = _deployment(_spec())
    env = _env(wire)
    assert env["MOONTIDE_ENABLED"] == "1"
    assert env["MOONTIDE_ADMIN_PORT"] == "8001"
    assert env["MOONTIDE_ADMIN_TOKEN_FILE"] == "/etc/moontide/admin/token"
    assert env["MOONTIDE_WEIGHTS_VERSION"] == "7"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["PYTHONHASHSEED"] == "0"
    assert env["HOME"] == "/cache"
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in _container(wire)["env"]
        if "valueFrom" in each
    }
    assert fields == {"VLLM_HOST_IP": "status.podIP", "MOONTIDE_POD_UID": "metadata.uid"}


def test_user_environment_wins_over_defaults_only() -> None:
    spec = _spec(
        engine={
            "device": "cpu",
            "env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "3"}, {"name": "MINE", "value": "x"}],
        }
    )
    env = _env(_deployment(spec))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["MINE"] == "x"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["OMP_NUM_THREADS"] == "1"


def test_devices_and_resources() -> None:
    assert _container(_deployment(_spec()))["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert _container(_deployment(_spec(engine={"device": "cpu"})))["resources"] == {}
    assert _container(_deployment(_spec(), device="cpu"))["resources"] == {}
    assert _container(_deployment(_spec(engine={"device": "cuda"}), device="cpu"))["resources"] != {}
    assert "VLLM_CPU_KVCACHE_SPACE" not in _env(_deployment(_spec()))
    explicit = _spec(engine={"device": "cpu"}, resources={"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}})
    assert _container(_deployment(explicit))["resources"] == {
        "limits": {"nvidia.com/gpu": "1"},
        "requests": {"cpu": "1"},
    }


def test_rollout_and_grace() -> None:
    wire = _deployment(_spec(replicas=4, rollout={"maxSurge": 2, "maxUnavailable": 0, "drainSeconds": 40}))
    assert wire["spec"]["replicas"] == 4
    assert wire["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 2, "maxUnavailable": 0}
    assert _pod(wire)["terminationGracePeriodSeconds"] == 5 + 40 + 15
    assert _container(wire)["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert wire["spec"]["progressDeadlineSeconds"] > 2 * 900


def test_probes() -> None:
    container = _container(_deployment(_spec()))
    startup, ready, live = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert startup["httpGet"] == {"path": "/health", "port": 8000}
    assert (startup["periodSeconds"], startup["failureThreshold"]) == (2, 900)
    assert ready["httpGet"] == {"path": "/moontide/v1/ready", "port": 8000}
    assert ready["periodSeconds"] == 1
    assert live["httpGet"] == {"path": "/health", "port": 8000}
    assert (live["periodSeconds"], live["failureThreshold"], live["timeoutSeconds"]) == (10, 3, 10)


@pytest.mark.parametrize(("seconds", "failures"), [(30, 15), (31, 16), (1800, 900), (7200, 3600)])
def test_a_slow_load_is_waited_for_and_never_meets_a_liveness_probe(seconds: int, failures: int) -> None:
    wire = _deployment(_spec(startupSeconds=seconds))
    startup = _container(wire)["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= seconds
    assert startup["failureThreshold"] == failures
    # Kubernetes begins neither of the other probes before this one has succeeded.
    assert startup["httpGet"] == _container(wire)["livenessProbe"]["httpGet"]
    assert wire["spec"]["progressDeadlineSeconds"] == seconds + 600


def test_service_settings() -> None:
    plain = _wire(engine.service("chat", "ns", OWNER))
    assert "type" not in plain["spec"]
    assert "annotations" not in plain["metadata"]
    settings = _spec(service={"type": "LoadBalancer", "port": 80, "annotations": {"lb": "internal"}}).service
    made = _wire(engine.service("chat", "ns", OWNER, settings))
    assert made["spec"]["type"] == "LoadBalancer"
    assert made["metadata"]["annotations"] == {"lb": "internal"}
    assert [(each["port"], each["targetPort"]) for each in made["spec"]["ports"]] == [(80, 8000)]
    assert made["spec"]["selector"] == LABELS


def test_pod_security_and_volumes() -> None:
    wire = _deployment(_spec(sharedMemory="256Mi"))
    pod, container = _pod(wire), _container(wire)
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["fsGroup"] == 10001
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    assert volumes["admin-token"]["secret"]["secretName"] == "chat-admin"
    paths = {each["mountPath"] for each in container["volumeMounts"]}
    assert paths == {"/tmp", "/cache", "/dev/shm", "/etc/moontide/admin", "/models"}


def test_a_changed_pool_restarts_engines_and_a_changed_operator_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec(kvCache={"poolRef": {"name": "kv"}})
    small = engine.mooncake_json("ns", "kv", KVCachePoolSpec.model_validate({"memory": {"perReplica": "64Mi"}}))
    large = engine.mooncake_json("ns", "kv", KVCachePoolSpec.model_validate({"memory": {"perReplica": "128Mi"}}))
    before = _deployment(spec, small)["spec"]["template"]
    assert before != _deployment(spec, large)["spec"]["template"]
    monkeypatch.setattr(moontide, "__version__", "99.0.0", raising=False)
    assert before == _deployment(spec, small)["spec"]["template"]


def test_mooncake_configuration() -> None:
    pool = KVCachePoolSpec.model_validate({"memory": {"perReplica": "256Mi", "localBuffer": "64Mi"}})
    assert json.loads(engine.mooncake_json("ns", "kv", pool)) == {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "kv-master.ns.svc:50051",
        "global_segment_size": 256 * 2**20,
        "local_buffer_size": 64 * 2**20,
        "protocol": "tcp",
        "device_name": "",
    }


def test_mooncake_configuration_refuses_what_is_no_memory() -> None:
    pool = KVCachePoolSpec.model_validate({"memory": {"perReplica": "256Mi", "localBuffer": "500m"}})
    with pytest.raises(ValueError, match="amount of memory"):
        engine.mooncake_json("ns", "kv", pool)


def test_other_children() -> None:
    service = _wire(engine.service("chat", "ns", OWNER))
    assert [each["port"] for each in service["spec"]["ports"]] == [8000]
    assert service["spec"]["selector"] == LABELS
    config = _wire(engine.config_map("chat", "ns", OWNER, "{}"))
    assert config["metadata"]["name"] == "chat-mooncake"
    assert config["data"] == {"mooncake.json": "{}"}
    secret = _wire(engine.secret("chat", "ns", OWNER, "t0ken"))
    assert secret["metadata"]["name"] == "chat-admin"
    assert base64.b64decode(secret["data"]["token"]) == b"t0ken"
    for wire in (service, config, secret, _deployment(_spec())):
        assert wire["metadata"]["labels"] == LABELS
        assert [each["uid"] for each in wire["metadata"]["ownerReferences"]] == ["u-2"]
