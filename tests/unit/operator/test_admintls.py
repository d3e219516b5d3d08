"""TLS on admin ports and wipers: what pods get, and that each pod is spoken to as it was made."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.api.v1alpha1 import KVCachePoolSpec
from moontide.planning.model import Fleet, Wipe
from moontide.reconcile import inferencedeployment as ifd
from moontide.reconcile import needs, policyversion
from moontide.reconcile.fleets import observe
from moontide.resources import admintls, masters, store
from tests.unit.operator import poolworld
from tests.unit.operator.doubles import Cluster

OWNER = k8s.V1OwnerReference(api_version="moontide.dev/v1alpha1", kind="KVCachePool", name="kv", uid="uid")
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


def test_a_wiper_gets_its_certificate_and_probes_over_tls_and_the_master_does_not() -> None:
    plain, made = (
        admintls.dress(store.deployment("kv", "rl", OWNER, KVCachePoolSpec(), "moon:1"), admintls.WIPER, secret)
        for secret in (None, "kv-tls")
    )
    before, after = (
        each.spec.template.model_dump(mode="json", by_alias=True, exclude_none=True) for each in (plain, made)
    )
    wiper = container(after, "wiper")
    assert wiper["env"].pop() == {"name": "MOONTIDE_WIPER_TLS", "value": "/etc/moontide/admin-tls"}
    assert wiper["volumeMounts"].pop()["name"] == "admin-tls"
    assert after["spec"]["volumes"].pop()["secret"]["secretName"] == "kv-tls"
    for probe in ("readinessProbe", "livenessProbe"):
        assert wiper[probe]["httpGet"].pop("scheme") == "HTTPS"
    assert after == before


def test_three_masters_have_it_too() -> None:
    election = masters.Election(("etcd:2379",), "uid", own=True)
    three = masters.replicate(store.deployment("kv", "rl", OWNER, KVCachePoolSpec(), "moon:1"), election)
    made = admintls.dress(three, admintls.WIPER, "kv-tls").spec.template
    assert admintls.serves(k8s.V1Pod(spec=made.spec), admintls.WIPER)


async def test_a_pool_whose_certificate_is_missing_says_so_and_remembers_what_its_pods_serve() -> None:
    world = poolworld.World(None, None)
    world.body["spec"]["master"] = {"wiperTlsSecretRef": {"name": "kv-tls"}}
    assert await world.reconcile() <= needs.AGAIN_SECONDS
    assert world.condition("Ready") == ("False", "SecretMissing")
    (ready,) = (each for each in world.status.conditions if each.type == "Ready")
    assert "Secret kv-tls of spec.master.wiperTlsSecretRef does not exist in namespace ns: make it" in ready.message
    assert "for the DNS name kv-master.ns.svc (kubectl create secret tls kv-tls -n ns " in ready.message
    assert [each for each in world.said if each[0] == "apply"] == []
    assert world.status.wiper_tls is None
    world.secrets.add("kv-tls")
    await world.reconcile()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status.wiper_tls is True
    # It is turned off: until the last such pod is gone, whoever removes keys has to look.
    del world.body["spec"]["master"]
    world.masters = [k8s.V1Pod(metadata=k8s.V1ObjectMeta(name="m"))]
    secured(world.masters[0], admintls.WIPER)
    await world.reconcile()
    assert world.status.wiper_tls is True
    world.masters = [k8s.V1Pod(metadata=k8s.V1ObjectMeta(name="m2"))]
    await world.reconcile()
    assert world.status.wiper_tls is None


def master(name: str, *, tls: bool, leads: bool = False, goes: bool = False) -> k8s.V1Pod:
    own = {**labels.store_labels("kv"), **({labels.LEADER: "true"} if leads else {})}
    gone = dt.datetime(2026, 1, 2, tzinfo=dt.UTC) if goes else None
    pod = k8s.V1Pod(metadata=k8s.V1ObjectMeta(name=name, namespace="rl", labels=own, deletion_timestamp=gone))
    if tls:
        secured(pod, admintls.WIPER)
    return pod


@pytest.mark.parametrize(
    ("pods", "scheme"),
    [
        ([], "https"),
        ([master("a", tls=False)], "http"),
        ([master("a", tls=True)], "https"),
        ([master("a", tls=False, goes=True)], "http"),
        ([master("a", tls=False, goes=True), master("b", tls=True)], "https"),
        ([master("a", tls=True), master("b", tls=False, leads=True)], "http"),
        ([master("a", tls=False), master("b", tls=True, leads=True)], "https"),
    ],
)
async def test_a_wiper_is_spoken_to_as_its_pod_was_made(tmp_path: Path, pods: list[k8s.V1Pod], scheme: str) -> None:
    world = Cluster(tmp_path)
    world.kube.pods = pods
    place = "://kv-master.rl.svc:9004"
    for may, wanted in ((True, scheme), (False, "http")):
        world.network.asked.clear()
        fleet = Fleet("chat", "uid", "kv", "pool-uid", namespace="rl", wiper_tls=may)
        result = await policyversion.perform(world.ctx, Wipe(fleet))
        assert result.success
        assert world.network.asked == {wanted + place}


@pytest.mark.parametrize(
    ("master", "status", "may"),
    [({}, None, False), ({"wiperTlsSecretRef": {"name": "t"}}, None, True), ({}, {"wiperTls": True}, True)],
)
async def test_pods_are_looked_at_only_where_tls_is_or_was_asked_for(
    tmp_path: Path, master: dict[str, Any], status: dict[str, Any] | None, may: bool
) -> None:
    world = Cluster(tmp_path)
    world.kube.put("KVCachePool", "rl", "kv", {"master": master})["status"] = status
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}})
    deployment = await world.ctx.kube.get_deployment("rl", "chat")
    assert deployment is not None
    assert (await observe(world.ctx, deployment)).wiper_tls is may


async def test_a_volume_of_the_users_may_not_take_the_certificates_name(tmp_path: Path) -> None:
    world = Cluster(tmp_path)
    over = {"spec": {"volumes": [{"name": "admin-tls", "emptyDir": {}}]}}
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "podTemplate": over})
    await ifd.reconcile(world.ctx, "rl", "chat")
    assert world.kube.condition("InferenceDeployment", "rl", "chat", "Progressing")[1] == "Updating"
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "podTemplate": over, "engine": TLS})
    await ifd.reconcile(world.ctx, "rl", "chat")
    _, reason, message = world.kube.condition("InferenceDeployment", "rl", "chat", "Progressing")
    assert (reason, "volume admin-tls is Moontide's" in message) == ("PodTemplateRefused", True)


async def test_an_adopted_engine_that_cannot_prove_its_name_is_left_alone_with_the_reason(tmp_path: Path) -> None:
    world = Cluster(tmp_path)
    url = "https://10.0.0.7:8001"
    fleet = world.kube.put("InferenceDeployment", "rl", "ours", {"endpoints": {"urls": [url]}})
    engine = world.engine("10.0.0.7:8001", "b1", fleet, key_namespace=fleet["metadata"]["uid"])
    world.network.distrusted = "10.0.0.7"
    await ifd.reconcile(world.ctx, "rl", "ours")
    (closed,) = world.kube.status("InferenceDeployment", "rl", "ours")["closed"]
    assert closed["reason"] == "TLSHandshake"
    assert closed["message"].startswith("what answers at https://10.0.0.7:8001")
    assert engine.heard == []
    world.network.distrusted = ""
    await ifd.reconcile(world.ctx, "rl", "ours")
    assert engine.state == ("open", 0)
    assert world.network.asked == {url}
    assert world.network.names == {"10.0.0.7": {""}}
