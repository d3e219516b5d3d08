"""TLS on admin ports and wipers: what pods get, and that each pod is spoken to as it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile import needs, policyversion
from moontide.resources import admintls
from tests.unit.operator.doubles import Cluster

MODEL = {"source": "pvc://weights/a", "servedName": "m", "version": "7"}
TLS = {"adminTlsSecretRef": {"name": "chat-tls"}}


def secured(pod: k8s.V1Pod, served: admintls.Served) -> None:
    """Have the pod be of a template with TLS."""
    variables = [k8s.V1EnvVar(name=served.variable, value=admintls.FOLDER)]
    pod.spec = k8s.V1PodSpec(containers=[k8s.V1Container(name=served.container, env=variables)])


def applied(world: Cluster, name: str) -> dict[str, Any]:
    """The pod template that was last applied."""
    found = [each for each in world.kube.applied if isinstance(each, k8s.V1Deployment) and each.metadata.name == name]
    body: dict[str, Any] = found[-1].spec.template.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body


def container(template: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in template["spec"]["containers"] if each["name"] == name)
    return found


async def test_an_engine_gets_its_certificate_and_changes_in_nothing_else(tmp_path: Path) -> None:
    world = Cluster(tmp_path)
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL})
    await ifd.reconcile(world.ctx, "rl", "chat")
    plain = applied(world, "chat")
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "engine": TLS})
    await ifd.reconcile(world.ctx, "rl", "chat")
    made = applied(world, "chat")
    engine = container(made, "engine")
    assert engine["env"].pop() == {"name": "MOONTIDE_ADMIN_TLS", "value": "/etc/moontide/admin-tls"}
    mount = engine["volumeMounts"].pop()
    assert mount == {"name": "admin-tls", "mountPath": "/etc/moontide/admin-tls", "readOnly": True}
    volume = made["spec"]["volumes"].pop()
    assert volume == {"name": "admin-tls", "secret": {"secretName": "chat-tls", "defaultMode": 0o440}}
    assert made == plain


async def test_a_certificate_that_is_missing_is_asked_for_and_nothing_is_changed(tmp_path: Path) -> None:
    world = Cluster(tmp_path)
    kube = world.kube
    kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "engine": TLS})
    kube.missing.add(("Secret", "rl", "chat-tls"))
    assert await ifd.reconcile(world.ctx, "rl", "chat") <= needs.AGAIN_SECONDS
    status, reason, message = kube.condition("InferenceDeployment", "rl", "chat", "Progressing")
    assert (status, reason) == ("False", "SecretMissing")
    assert "Secret chat-tls of spec.engine.adminTlsSecretRef does not exist in namespace rl: make it" in message
    assert "for the DNS name chat.rl.svc (kubectl create secret tls chat-tls -n rl " in message
    assert kube.applied == []
    kube.missing.clear()
    await ifd.reconcile(world.ctx, "rl", "chat")
    assert kube.condition("InferenceDeployment", "rl", "chat", "Progressing")[1] == "Updating"


def test_a_pod_says_how_it_was_made() -> None:
    pod = k8s.V1Pod()
    assert not admintls.serves(pod, admintls.ENGINE)
    secured(pod, admintls.ENGINE)
    assert admintls.serves(pod, admintls.ENGINE)
    assert not admintls.serves(pod, admintls.WIPER)


@pytest.mark.parametrize("engine", [{}, TLS], ids=["being turned off", "being turned on"])
async def test_during_a_rollout_each_pod_is_spoken_to_as_it_was_made(tmp_path: Path, engine: dict[str, Any]) -> None:
    world = Cluster(tmp_path)
    fleet = world.kube.put(
        "InferenceDeployment",
        "rl",
        "chat",
        {"model": MODEL, "replicas": 2, "engine": engine, "policyRef": {"name": "p"}},
    )
    engines = [world.pod(fleet, "old", "10.0.0.1"), world.pod(fleet, "new", "10.0.0.2")]
    secured(world.kube.pods[1], admintls.ENGINE)
    world.kube.put("PolicyVersion", "rl", "p", {"version": 7})
    for _ in range(8):
        await policyversion.reconcile(world.ctx, "rl", "p")
    assert [each.state for each in engines] == [("open", 1)] * 2
    assert world.network.asked == {"http://10.0.0.1:8001", "https://10.0.0.2:8001"}
    assert world.network.names == {"10.0.0.1": {""}, "10.0.0.2": {"chat.rl.svc"}}
    engines[1].silent = True
    world.network.distrusted = "10.0.0.2"
    await ifd.reconcile(world.ctx, "rl", "chat")
    (closed,) = world.kube.status("InferenceDeployment", "rl", "chat")["closed"]
    assert (closed["name"], closed["reason"], closed["address"]) == ("new", "TLSHandshake", "https://10.0.0.2:8001")
    assert "speaks plain HTTP" in closed["message"]
    # Nothing was tried in the clear.
    assert world.network.asked == {"http://10.0.0.1:8001", "https://10.0.0.2:8001"}
