"""A user's podTemplate over the pods of a fleet and of a pool, and what it may not touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import InferenceDeploymentSpec, KVCachePoolSpec
from moontide.api.v1alpha1.podtemplate import ENGINE_FIELDS, MASTER_FIELDS, POD_FIELDS, WIPER_FIELDS, PodTemplate
from moontide.reconcile import inferencedeployment
from moontide.resources import engine, podtemplate, store
from tests.unit.operator.doubles import Cluster

OWNER = k8s.V1OwnerReference(api_version="v", kind="InferenceDeployment", name="chat", uid="u", controller=True)


def _fleet() -> k8s.V1Deployment:
    model = {"source": "pvc://weights/a", "servedName": "tiny"}
    spec = InferenceDeploymentSpec.model_validate({"model": model, "kvCache": {"poolRef": {"name": "kv"}}})
    return engine.deployment("chat", "ns", OWNER, spec, engine_image="e:1", default_device="cuda", mooncake="{}")


def _pool() -> k8s.V1Deployment:
    return store.deployment("kv", "ns", OWNER, KVCachePoolSpec(), "m:1")


def _over(override: dict[str, Any], owned: podtemplate.Owned = podtemplate.ENGINE) -> dict[str, Any]:
    made = podtemplate.over(
        _fleet() if owned is podtemplate.ENGINE else _pool(), PodTemplate.model_validate(override), owned
    )
    assert isinstance(made, podtemplate.Overridden)
    template: dict[str, Any] = made.body["spec"]["template"]
    return template


@pytest.mark.parametrize("override", [None, {}, {"spec": {}}, {"metadata": {}}, {"metadata": {"labels": {}}}])
def test_nothing_to_override_is_the_child_itself(override: dict[str, Any] | None) -> None:
    child = _fleet()
    parsed = None if override is None else PodTemplate.model_validate(override)
    assert podtemplate.over(child, parsed, podtemplate.ENGINE) is child


@pytest.mark.parametrize("child", [_fleet(), _pool()], ids=["fleet", "pool"])
def test_the_body_is_what_the_client_would_have_sent(child: k8s.V1Deployment) -> None:
    override = PodTemplate.model_validate({"metadata": {"labels": {"team": "a"}}})
    made = podtemplate.over(child, override, podtemplate.ENGINE)
    assert isinstance(made, podtemplate.Overridden)
    assert made.body["spec"]["template"]["metadata"]["labels"].pop("team") == "a"
    assert made.body == k8s.ApiClient().sanitize_for_serialization(child)
    assert made.kind == "Deployment"


def test_a_production_override() -> None:
    template = _over(
        {
            "metadata": {"labels": {"team": "rl"}, "annotations": {"cluster-autoscaler/safe-to-evict": "false"}},
            "spec": {
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "priorityClassName": "rollouts",
                "serviceAccountName": "engines",
                "runtimeClassName": "nvidia",
                "imagePullSecrets": [{"name": "registry"}],
                "securityContext": {"supplementalGroups": [44]},
                "containers": [
                    {
                        "name": "engine",
                        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                        "volumeMounts": [{"name": "rdma", "mountPath": "/dev/infiniband"}],
                        "ports": [{"name": "extra", "containerPort": 9100}],
                    },
                    {"name": "shipper", "image": "logs:1"},
                ],
                "initContainers": [{"name": "fetch", "image": "fetch:1"}],
                "volumes": [
                    {"name": "rdma", "hostPath": {"path": "/dev/infiniband"}},
                    {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}},
                ],
                "aFieldOfTomorrow": {"kept": True},
            },
        }
    )
    labels = template["metadata"]["labels"]
    assert labels["team"] == "rl"
    assert labels["moontide.dev/deployment"] == "chat"
    pod = template["spec"]
    assert pod["aFieldOfTomorrow"] == {"kept": True}
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["supplementalGroups"] == [44]
    first, second = pod["containers"]
    assert (first["name"], second) == ("engine", {"name": "shipper", "image": "logs:1"})
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert [each["containerPort"] for each in first["ports"]] == [8000, 8001, 9100]
    assert {each["mountPath"] for each in first["volumeMounts"]} >= {"/dev/infiniband", "/etc/moontide/admin"}
    assert first["readinessProbe"]["httpGet"]["path"] == "/moontide/v1/ready"
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}
    assert volumes["admin-token"]["secret"]["secretName"] == "chat-admin"
    assert volumes["admin-token"]["secret"]["defaultMode"] == 0o440


def _container(name: str, **fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, **fields}]}}


REFUSED: list[tuple[podtemplate.Owned, dict[str, Any], str]] = [
    *((podtemplate.ENGINE, {"spec": {field: None}}, instead) for field, instead in POD_FIELDS.items()),
    *((podtemplate.MASTER, {"spec": {field: 1}}, instead) for field, instead in POD_FIELDS.items()),
    *((podtemplate.ENGINE, _container("engine", **{f: None}), say) for f, say in ENGINE_FIELDS.items()),
    *((podtemplate.MASTER, _container("master", **{f: None}), say) for f, say in MASTER_FIELDS.items()),
    *((podtemplate.MASTER, _container("wiper", **{f: None}), say) for f, say in WIPER_FIELDS.items()),
    (podtemplate.ENGINE, {"metadata": {"labels": {"moontide.dev/deployment": "x"}}}, "metadata.labels holds moontide"),
    (podtemplate.ENGINE, {"metadata": {"labels": {"app.kubernetes.io/component": "x"}}}, "which Moontide sets itself"),
    (podtemplate.ENGINE, {"metadata": {"annotations": {"moontide.dev/admitted-container": "x"}}}, "annotations holds"),
    (podtemplate.ENGINE, {"spec": {"containers": None}}, "spec.containers is null"),
    (podtemplate.ENGINE, {"spec": {"volumes": None}}, "spec.volumes is null"),
    (podtemplate.ENGINE, _container("engine", **{"$patch": "delete"}), "container engine is Moontide's and cannot be"),
    (podtemplate.MASTER, _container("wiper", **{"$patch": "delete"}), "container wiper is Moontide's and cannot be"),
    (podtemplate.ENGINE, _container("engine", env=None), "sets env of container engine to null"),
    (podtemplate.ENGINE, _container("engine", env=[{"name": "PYTHONHASHSEED", "value": "1"}]), "PYTHONHASHSEED of"),
    (podtemplate.ENGINE, _container("engine", env=[{"name": "MOONTIDE_ENABLED", "$patch": "delete"}]), "MOONTIDE_EN"),
    (podtemplate.ENGINE, _container("engine", ports=[{"containerPort": 8001, "name": "x"}]), "write spec.service.port"),
    (
        podtemplate.ENGINE,
        _container("engine", volumeMounts=[{"mountPath": "/etc/moontide/admin", "name": "x"}]),
        "mounts over /etc/moontide/admin",
    ),
    (
        podtemplate.ENGINE,
        _container("engine", volumeMounts=[{"mountPath": "/etc/moontide/", "name": "x"}]),
        "mounts ov",
    ),
    (podtemplate.ENGINE, _container("engine", volumeMounts=[{"mountPath": "/models/", "name": "x"}]), "mounts over"),
    (podtemplate.ENGINE, _container("engine", volumeMounts=[{"mountPath": "/dev/shm", "name": "x"}]), "mounts over"),
    (podtemplate.ENGINE, {"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "volume shm is Moontide's"),
    (podtemplate.ENGINE, {"spec": {"volumes": [{"name": "models", "$patch": "delete"}]}}, "volume models is Moontide"),
    (podtemplate.MASTER, {"spec": {"volumes": [{"name": "wiper-token", "emptyDir": {}}]}}, "volume wiper-token is"),
    (podtemplate.MASTER, _container("wiper", env=[{"name": "MC_RPC_TIMEOUT_MS", "value": "1"}]), "MC_RPC_TIMEOUT_MS"),
    (
        podtemplate.ENGINE,
        {"metadata": {"annotations": {f"big-{n}": "x" * 16000 for n in range(5)}}},
        "65536 are the most",
    ),
    (podtemplate.ENGINE, _container("x", **{"$patch": "replace"}), "write delete"),
]


@pytest.mark.parametrize(("owned", "override", "said"), REFUSED)
def test_what_is_moontide_s_is_refused_with_what_to_write_instead(
    owned: podtemplate.Owned, override: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011  the message is looked at below
        _over(override, owned)
    assert said in str(refusal.value)


def test_scratch_volumes_and_their_mounts_are_free() -> None:
    template = _over(
        {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/cache", "name": "mine"}]}]}}
    )
    (engine_container,) = template["spec"]["containers"]
    assert {"name": "mine", "mountPath": "/cache"} in engine_container["volumeMounts"]


def test_the_rules_at_admission_name_every_volume_that_is_not_free() -> None:
    rules = InferenceDeploymentSpec.model_json_schema()["properties"]["podTemplate"]["x-kubernetes-validations"]
    (rule,) = [each["rule"] for each in rules if "volumes.exists" in each["rule"]]
    spec = _fleet().spec
    assert spec is not None
    assert spec.template.spec is not None
    for volume in spec.template.spec.volumes or ():
        assert (f"'{volume.name}'" in rule) != (volume.name in podtemplate.ENGINE.free_volumes)


async def test_a_refused_override_is_told_and_nothing_is_applied(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    model = {"source": "pvc://weights/a", "servedName": "tiny"}
    bad = _container("engine", **{"$patch": "delete"})
    cluster.kube.put("InferenceDeployment", "ns", "chat", {"model": model, "podTemplate": bad})
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    assert cluster.kube.applied == []
    said = cluster.kube.condition("InferenceDeployment", "ns", "chat", "Progressing")
    assert said[:2] == ("False", "PodTemplateRefused")
    assert ("InferenceDeployment", "ns", "chat", "PodTemplateRefused") in cluster.kube.events

    cluster.kube.put(
        "InferenceDeployment", "ns", "chat", {"model": model, "podTemplate": {"spec": {"hostNetwork": True}}}
    )
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    assert [each.kind for each in cluster.kube.applied] == ["Secret", "Service", "Deployment", "PodDisruptionBudget"]
    assert cluster.kube.applied[2].body["spec"]["template"]["spec"]["hostNetwork"] is True
    assert cluster.kube.deleted == []
    off = {"model": model, "rollout": {"disruptionBudget": "Off"}}
    cluster.kube.put("InferenceDeployment", "ns", "chat", off)
    await inferencedeployment.reconcile(cluster.ctx, "ns", "chat")
    assert [each.kind for each in cluster.kube.applied[4:]] == ["Secret", "Service", "Deployment"]
    assert cluster.kube.deleted == [("ns", "chat")]
    await cluster.http.close()
