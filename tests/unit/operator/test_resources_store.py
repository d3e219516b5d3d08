"""The children of a pool."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import KVCachePoolSpec
from moontide.resources import store


def _wire(child: Any) -> dict[str, Any]:
    """What goes over the wire: the client's own serialisation."""
    made: dict[str, Any] = k8s.ApiClient().sanitize_for_serialization(child)
    return made


OWNER = k8s.V1OwnerReference(
    api_version="moontide.dev/v1alpha1",
    kind="KVCachePool",
    name="kv",
    uid="u-1",
    controller=True,
    block_owner_deletion=True,
)
LABELS = {
    "app.kubernetes.io/managed-by": "moontide",
    "app.kubernetes.io/component": "store",
    "moontide.dev/pool": "kv",
}


@pytest.fixture(name="wire")
def _default() -> dict[str, Any]:
    return _wire(store.deployment("kv", "ns", OWNER, KVCachePoolSpec(), "moon:1"))


def _containers(wire: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in wire["spec"]["template"]["spec"]["containers"]}


def test_one_master_at_a_time(wire: dict[str, Any]) -> None:
    assert wire["spec"]["replicas"] == 1
    assert wire["spec"]["strategy"] == {"type": "Recreate"}
    assert wire["metadata"]["name"] == "kv-master"
    assert wire["metadata"]["labels"] == LABELS
    assert wire["spec"]["selector"] == {"matchLabels": LABELS}
    assert wire["spec"]["template"]["metadata"]["labels"] == LABELS


def test_master_command_line() -> None:
    spec = KVCachePoolSpec.model_validate(
        {"master": {"leaseTtlMilliseconds": 700, "clientTtlSeconds": 9, "evictionHighWatermarkPercent": 80}}
    )
    assert store.master_arguments(spec) == [
        "mooncake_master",
        "-rpc_port=50051",
        "-metrics_port=9003",
        "-default_kv_lease_ttl=700",
        "-client_ttl=9",
        "-eviction_high_watermark_ratio=0.8",
        "-logtostderr",
    ]


def test_what_is_asked_for_beyond_the_defaults_is_written_out() -> None:
    bare = store.master_arguments(KVCachePoolSpec())
    assert not any(each.startswith("-eviction_ratio") for each in bare)
    spec = KVCachePoolSpec.model_validate({"master": {"evictionRatioPercent": 20, "extraArgs": ["-rpc_thread_num=8"]}})
    assert set(store.master_arguments(spec)) - set(bare) == {"-eviction_ratio=0.2", "-rpc_thread_num=8"}
    assert store.master_arguments(spec)[-1] == "-rpc_thread_num=8"


def test_probes_ask_each_container_itself(wire: dict[str, Any]) -> None:
    containers = _containers(wire)
    master, wiper = containers["master"], containers["wiper"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert master[probe]["httpGet"] == {"path": "/health", "port": 9003}
    for probe in ("readinessProbe", "livenessProbe"):
        assert wiper[probe]["httpGet"] == {"path": "/healthz", "port": 9004}


def test_wiper_contract(wire: dict[str, Any]) -> None:
    wiper = _containers(wire)["wiper"]
    env = {each["name"]: each["value"] for each in wiper["env"]}
    assert wiper["command"] == ["python3", "-m", "moontide_engine.wiper"]
    assert env["MOONTIDE_WIPER_PORT"] == "9004"
    assert env["MOONTIDE_WIPER_TOKEN_FILE"] == "/etc/moontide/wiper/token"
    assert env["MOONTIDE_MASTER_ADDRESS"] == "127.0.0.1:50051"
    assert env["MOONTIDE_MASTER_METRICS"] == "http://127.0.0.1:9003"
    mounts = {each["mountPath"]: each for each in wiper["volumeMounts"]}
    assert mounts["/etc/moontide/wiper"]["readOnly"] is True
    volumes = {each["name"]: each for each in wire["spec"]["template"]["spec"]["volumes"]}
    assert volumes["wiper-token"]["secret"]["secretName"] == "kv-wiper"
    assert "/etc/moontide/wiper" not in {each["mountPath"] for each in _containers(wire)["master"]["volumeMounts"]}


def test_restricted(wire: dict[str, Any]) -> None:
    pod = wire["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_image_and_resources_of_the_spec_win() -> None:
    spec = KVCachePoolSpec.model_validate(
        {"master": {"image": "mine:2", "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}}}
    )
    containers = _containers(_wire(store.deployment("kv", "ns", OWNER, spec, "moon:1")))
    assert {each["image"] for each in containers.values()} == {"mine:2"}
    assert containers["master"]["resources"] == {"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}


def test_service() -> None:
    wire = _wire(store.service("kv", "ns", OWNER))
    assert wire["metadata"]["name"] == "kv-master"
    assert {each["name"]: each["port"] for each in wire["spec"]["ports"]} == {
        "rpc": 50051,
        "metrics": 9003,
        "wiper": 9004,
    }
    assert wire["spec"]["selector"] == LABELS
    assert wire["spec"]["publishNotReadyAddresses"] is True


def test_one_master_is_as_it_was_before_there_could_be_three(wire: dict[str, Any]) -> None:
    """An upgrade of the operator restarts no master: its keys would be lost."""
    template = json.dumps(wire["spec"], sort_keys=True)
    assert hashlib.sha256(template.encode()).hexdigest()[:16] == "dedab3f3abc35fb9"


def test_secret() -> None:
    wire = _wire(store.secret("kv", "ns", OWNER, "t0ken"))
    assert wire["metadata"]["name"] == "kv-wiper"
    assert base64.b64decode(wire["data"]["token"]) == b"t0ken"


def test_children_are_owned() -> None:
    for child in (
        store.deployment("kv", "ns", OWNER, KVCachePoolSpec(), "moon:1"),
        store.service("kv", "ns", OWNER),
        store.secret("kv", "ns", OWNER, "t"),
    ):
        wire = _wire(child)
        assert wire["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "moontide.dev/v1alpha1",
                "kind": "KVCachePool",
                "name": "kv",
                "uid": "u-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert wire["metadata"]["namespace"] == "ns"
