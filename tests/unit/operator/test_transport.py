"""Manifests for RDMA and huge pages. Rendered only: no machine of the tests has such a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.reconcile import inferencedeployment
from moontide.resources import engine, memory, storenodes
from tests.unit.operator.doubles import Cluster
from tests.unit.operator.poolworld import MIB, OWNER

RDMA: dict[str, Any] = {"protocol": "rdma", "devices": ["mlx5_0", "mlx5_1"]}
MODEL = {"source": "pvc://w/a", "servedName": "tiny", "version": "7"}


def _pool(transport: dict[str, Any], **memory: Any) -> KVCachePoolSpec:
    given = {"perReplica": "33Mi", "localBuffer": "64Mi", "storeNodes": {"segmentSize": "65Mi"}, **memory}
    return KVCachePoolSpec.model_validate({"transport": transport, "memory": given})


def _node(spec: KVCachePoolSpec) -> dict[str, Any]:
    made = k8s.ApiClient().sanitize_for_serialization(storenodes.deployment("kv", "ns", OWNER, spec, "moon:1"))
    template: dict[str, Any] = made["spec"]["template"]["spec"]
    return template


async def _engine(tmp_path: Path, transport: dict[str, Any], **fleet: Any) -> dict[str, Any]:
    cluster = Cluster(tmp_path)
    cluster.kube.put("KVCachePool", "ns", "kv", _pool(transport).to_wire())
    spec = {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}, **fleet}
    cluster.kube.put("InferenceDeployment", "ns", "chat", spec)
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    (made,) = (child for child in cluster.kube.applied if child.kind == "Deployment")
    template: dict[str, Any] = k8s.ApiClient().sanitize_for_serialization(made)["spec"]["template"]["spec"]
    return template


def _env(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def test_the_client_is_told() -> None:
    said = json.loads(engine.mooncake_json("ns", "kv", _pool(RDMA)))
    assert (said["protocol"], said["device_name"]) == ("rdma", "mlx5_0,mlx5_1")
    plain = json.loads(engine.mooncake_json("ns", "kv", KVCachePoolSpec()))
    assert (plain["protocol"], plain["device_name"]) == ("tcp", "")


async def test_rdma_locks_memory_and_nothing_else_changes(tmp_path: Path) -> None:
    plain, over = await _engine(tmp_path, {}), await _engine(tmp_path, RDMA)
    assert over["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert plain["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    del over["containers"][0]["securityContext"]["capabilities"]["add"]
    assert over == plain


def test_nodes_speak_it_too() -> None:
    (container,) = _node(_pool(RDMA))["containers"]
    assert _env(container)["MOONTIDE_PROTOCOL"] == "rdma"
    assert _env(container)["MOONTIDE_DEVICES"] == "mlx5_0,mlx5_1"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert "MOONTIDE_PROTOCOL" not in _env(_node(_pool({}))["containers"][0])


async def test_huge_pages_are_asked_for_each_worker_in_whole_pages(tmp_path: Path) -> None:
    fleet = {"engine": {"args": ["-tp", "2"]}, "resources": {"limits": {"memory": "8Gi"}}}
    template = await _engine(tmp_path, {"hugepages": "2Mi"}, **fleet)
    container = template["containers"][0]
    amount = str(2 * (34 + 64) * MIB)
    assert container["resources"] == {
        "limits": {"memory": "8Gi", "hugepages-2Mi": amount},
        "requests": {"hugepages-2Mi": amount},
    }
    assert _env(container)["MC_STORE_USE_HUGEPAGE"] == "1"
    assert _env(container)["MC_STORE_HUGEPAGE_SIZE"] == "2MB"
    assert {"name": "hugepages", "mountPath": "/dev/hugepages"} in container["volumeMounts"]
    assert {"name": "hugepages", "emptyDir": {"medium": "HugePages-2Mi"}} in template["volumes"]


async def test_a_gpu_fleet_without_a_request_of_memory_gets_one_beside_huge_pages(tmp_path: Path) -> None:
    container = (await _engine(tmp_path, {"hugepages": "1Gi"}))["containers"][0]
    assert container["resources"]["requests"] == {"hugepages-1Gi": str(2 * 2**30), "memory": "64Mi"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "hugepages-1Gi": str(2 * 2**30)}


def test_nodes_request_their_segment_once() -> None:
    (container,) = _node(_pool({"hugepages": "2Mi"}))["containers"]
    pages = str((66 + 16) * MIB)
    assert container["resources"] == {
        "limits": {"hugepages-2Mi": pages},
        "requests": {"cpu": "100m", "memory": str(256 * MIB), "hugepages-2Mi": pages},
    }


def test_huge_pages_are_no_part_of_a_containers_memory() -> None:
    spec = InferenceDeploymentSpec.model_validate({"model": MODEL, "resources": {"limits": {"memory": "2Gi"}}})
    assert memory.too_small(spec, _pool({}), "cuda") is not None
    assert memory.too_small(spec, _pool({"hugepages": "2Mi"}), "cuda") is None
