"""What a model's source adds to a pod, and what the status says when it cannot be had."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1.model import Model
from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile import needs
from moontide.reconcile.fleets import hindrance
from moontide.resources import sources
from tests.unit.operator.doubles import Cluster


def _model(source: str, **more: Any) -> Model:
    return Model.model_validate({"source": source, "servedName": "m", **more})


def _wire(parts: Any) -> Any:
    return k8s.ApiClient().sanitize_for_serialization(parts)


HF = {"revision": "v1.0", "tokenSecretRef": {"name": "hub", "key": "token"}}
S3 = {"endpoint": "http://store:9000", "region": "eu-1", "credentialsSecretRef": {"name": "s3"}}


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (_model("pvc://weights/a/b"), ["--model", "/models/a/b"]),
        (_model("file:///opt/weights"), ["--model", "/opt/weights"]),
        (_model("hf://org/name"), ["--model", "org/name"]),
        (_model("hf://org/name", **HF), ["--model", "org/name", "--revision", "v1.0"]),
        (_model("s3://bucket/a/b"), ["--model", "/model-cache/s3/bucket/a/b"]),
    ],
    ids=lambda given: given.source if isinstance(given, Model) else "",
)
def test_arguments(model: Model, arguments: list[str]) -> None:
    assert sources.arguments(model) == arguments


def test_only_an_object_store_needs_a_container_that_fetches() -> None:
    for source in ("pvc://weights/a", "file:///a", "hf://org/name"):
        assert sources.fetchers(_model(source), "rclone:1") is None
    for source in ("file:///a", "hf://org/name"):
        assert (sources.mounts(_model(source)), sources.volumes(_model(source))) == ([], [])


def test_a_token_comes_from_its_secret_and_a_cache_has_a_place() -> None:
    plain = _model("hf://org/name", **HF)
    assert _wire(sources.environment(plain)) == [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    ]
    assert sources.secrets(plain) == ["hub"]
    kept = _model("hf://org/name", cache={"claim": "cache"})
    assert _wire(sources.environment(kept)) == [{"name": "HF_HOME", "value": "/model-cache/huggingface"}]
    assert _wire(sources.mounts(kept)) == [{"name": "model-cache", "mountPath": "/model-cache"}]
    assert _wire(sources.volumes(kept)) == [{"name": "model-cache", "persistentVolumeClaim": {"claimName": "cache"}}]
    assert sources.claims(kept) == ["cache"]
    limited = _model("hf://org/name", cache={"size": "100Gi"})
    assert _wire(sources.volumes(limited)) == [{"name": "model-cache", "emptyDir": {"sizeLimit": "100Gi"}}]


def test_an_object_store_is_fetched_from_with_credentials_that_the_engine_does_not_get() -> None:
    model = _model("s3://bucket/a", **S3)
    (fetch,) = _wire(sources.fetchers(model, "rclone:1"))
    assert fetch["image"] == "rclone:1"
    assert fetch["command"][:2] == ["sh", "-c"]
    assert fetch["command"][3:] == ["source:bucket/a", "/model-cache/s3/bucket/a"]
    assert fetch["envFrom"] == [{"secretRef": {"name": "s3"}}]
    env = {each["name"]: each["value"] for each in fetch["env"]}
    assert env == {
        "HOME": "/tmp",
        "RCLONE_CONFIG_SOURCE_TYPE": "s3",
        "RCLONE_CONFIG_SOURCE_PROVIDER": "Other",
        "RCLONE_CONFIG_SOURCE_ENV_AUTH": "true",
        "RCLONE_CONFIG_SOURCE_ENDPOINT": "http://store:9000",
        "RCLONE_CONFIG_SOURCE_REGION": "eu-1",
    }
    assert fetch["securityContext"]["readOnlyRootFilesystem"] is True
    assert sources.environment(model) == []
    assert _wire(sources.mounts(model)) == [{"name": "model-cache", "mountPath": "/model-cache", "readOnly": True}]
    assert _wire(sources.volumes(model)) == [{"name": "model-cache", "emptyDir": {}}]
    assert sources.secrets(model) == ["s3"]
    (own,) = _wire(sources.fetchers(_model("s3://bucket/a"), "rclone:1"))
    assert "envFrom" not in own
    assert {each["name"]: each["value"] for each in own["env"]}["RCLONE_CONFIG_SOURCE_PROVIDER"] == "AWS"


@pytest.mark.parametrize(("copied", "status"), [("x", 0), ("", 4)], ids=["something", "nothing"])
def test_a_prefix_without_anything_is_an_error(tmp_path: Path, copied: str, status: int) -> None:
    """The script, with a stand-in for rclone that copies one file, or none."""
    (container,) = sources.fetchers(_model("s3://bucket/a"), "rclone:1") or []
    script = tmp_path / "rclone"
    script.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "copy source:bucket/a" ] || exit 9\n[ -z "{copied}" ] || mkdir "$3" "$3/x"\n'
    )
    script.chmod(0o755)
    command = [*(container.command or [])[:-1], str(tmp_path / "target")]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("there is nothing at source:bucket/a" in done.stderr) == (status != 0)


@pytest.mark.parametrize(
    ("missing", "reason", "model"),
    [
        (("Secret", "ns", "hub"), "SecretMissing", HF),
        (("Secret", "ns", "s3"), "SecretMissing", {"source": "s3://bucket/a", **S3}),
        (("PersistentVolumeClaim", "ns", "w"), "ClaimMissing", {"source": "pvc://w/a"}),
        (("PersistentVolumeClaim", "ns", "c"), "ClaimMissing", {"cache": {"claim": "c"}}),
    ],
)
async def test_what_is_missing_is_named_and_nothing_is_applied(
    tmp_path: Path, missing: tuple[str, str, str], reason: str, model: dict[str, Any]
) -> None:
    world = Cluster(tmp_path)
    kube = world.kube
    kube.put("InferenceDeployment", "ns", "chat", {"model": {"source": "hf://org/name", "servedName": "m", **model}})
    kube.missing.add(missing)
    seconds = await ifd.reconcile(world.ctx, "ns", "chat")
    status, why, message = kube.condition("InferenceDeployment", "ns", "chat", "Progressing")
    assert (status, why) == ("False", reason)
    assert f"{missing[0]} {missing[2]} of spec.model does not exist in namespace ns: create it" in message
    assert kube.applied == []
    assert seconds <= needs.AGAIN_SECONDS
    kube.missing.clear()
    await ifd.reconcile(world.ctx, "ns", "chat")
    assert kube.applied != []
    assert kube.condition("InferenceDeployment", "ns", "chat", "Progressing")[1] == "Updating"


@pytest.mark.parametrize("source", ["pvc://w/../../etc", "pvc://../x", "s3://b/../other", "file:///a/.."])
async def test_a_source_that_climbs_and_is_stored_already_changes_nothing_and_its_engines_are_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    world, looked = Cluster(tmp_path), list[str]()

    async def admit(_: Any, resource: Any) -> float:
        looked.append(resource.meta.name)
        return 1.0

    monkeypatch.setattr(ifd, "reconcile_unmanaged", admit)
    world.kube.put("InferenceDeployment", "ns", "chat", {"model": {"source": source, "servedName": "m"}})
    await ifd.reconcile(world.ctx, "ns", "chat")
    status, why, message = world.kube.condition("InferenceDeployment", "ns", "chat", "Progressing")
    assert (status, why) == ("False", "SourceInvalid")
    assert "write the path that you mean, without it; nothing that runs is changed" in message
    assert world.kube.applied == []
    assert looked == ["chat"]


def test_dots_within_a_name_do_not_climb() -> None:
    sources.check(_model("pvc://weights/a..b/..c/..."))


async def test_what_is_there_is_asked_for_again_when_the_spec_changes_and_after_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Cluster(tmp_path)
    kube, asked = world.kube, list[str]()

    async def there(namespace: str, name: str) -> bool:
        asked.append(name)
        return name != "nowhere"

    monkeypatch.setattr(kube, "secret_exists", there)
    model = {"source": "hf://org/name", "servedName": "m", **HF}
    kube.put("InferenceDeployment", "ns", "chat", {"model": model})
    for _ in range(3):
        await ifd.reconcile(world.ctx, "ns", "chat")
    assert asked == ["hub"]
    world.now += needs.GOOD_FOR
    await ifd.reconcile(world.ctx, "ns", "chat")
    assert asked == ["hub", "hub"]
    nowhere = {**model, "tokenSecretRef": {"name": "nowhere", "key": "token"}}
    kube.put("InferenceDeployment", "ns", "chat", {"model": nowhere})
    for _ in range(2):
        await ifd.reconcile(world.ctx, "ns", "chat")
        assert kube.condition("InferenceDeployment", "ns", "chat", "Progressing")[1] == "SecretMissing"
    assert asked == ["hub", "hub", "nowhere", "nowhere"]
    kube.put("InferenceDeployment", "ns", "other", {"model": model})
    await ifd.reconcile(world.ctx, "ns", "other")
    assert asked[4:] == ["hub"]
    assert len(world.ctx.needs_met) == 2
    world.now += needs.GOOD_FOR
    await ifd.reconcile(world.ctx, "ns", "other")
    assert len(world.ctx.needs_met) == 1


def _waiting(reason: str, message: str | None = None) -> k8s.V1ContainerState:
    return k8s.V1ContainerState(waiting=k8s.V1ContainerStateWaiting(reason=reason, message=message))


def _status(name: str, state: k8s.V1ContainerState, last: k8s.V1ContainerState | None = None) -> k8s.V1ContainerStatus:
    return k8s.V1ContainerStatus(
        name=name, image="x", image_id="x", ready=False, restart_count=0, state=state, last_state=last
    )


def _ended(code: int, message: str) -> k8s.V1ContainerState:
    return k8s.V1ContainerState(terminated=k8s.V1ContainerStateTerminated(exit_code=code, message=message))


def test_a_pod_says_what_keeps_it_from_running() -> None:
    def said(**status: Any) -> str:
        return hindrance(k8s.V1Pod(status=k8s.V1PodStatus(**status)))

    unscheduled = k8s.V1PodCondition(
        type="PodScheduled", status="False", reason="Unschedulable", message='persistentvolumeclaim "w" not found'
    )
    assert hindrance(k8s.V1Pod()) == ""
    assert said(container_statuses=[_status("engine", _waiting("ContainerCreating"))]) == ""
    assert said(conditions=[unscheduled]) == 'Unschedulable: persistentvolumeclaim "w" not found'
    lacking = _waiting("CreateContainerConfigError", "couldn't find key token in Secret ns/hub")
    assert said(container_statuses=[_status("engine", lacking)]) == (
        "CreateContainerConfigError: couldn't find key token in Secret ns/hub"
    )
    failed = _status("fetch", _waiting("CrashLoopBackOff", "back-off"), _ended(3, "ERROR\n directory not found"))
    waits = _status("engine", _waiting("PodInitializing"))
    assert said(init_container_statuses=[failed], container_statuses=[waits]) == (
        "FetchFailed: the model could not be fetched (exit status 3): ERROR directory not found"
    )
    fetched = _status("fetch", _ended(0, ""))
    assert said(init_container_statuses=[fetched], container_statuses=[waits]) == ""
