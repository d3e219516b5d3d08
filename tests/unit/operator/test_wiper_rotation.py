"""The token of a pool's wipers is rotated: what is written, who is asked with what, and what removals are sent with."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import httpx
import pytest
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.planning.model import Collect, Wipe
from moontide.reconcile import kvcachepool, policyversion
from moontide.reconcile.fleets import observe
from moontide.resources import admintls
from tests.unit.operator.doubles import TOKENS as CLUSTERS
from tests.unit.operator.doubles import Cluster
from tests.unit.operator.poolworld import NOW, TOKENS, World
from tests.unit.operator.test_admintls import secured

OLD = TOKENS.derive("u-1")
MODEL = {"source": "pvc://weights/a", "servedName": "m", "version": "7"}


def master(name: str, address: str | None, phase: str = "Running", goes: bool = False, tls: bool = False) -> k8s.V1Pod:
    metadata = k8s.V1ObjectMeta(name=name, deletion_timestamp=NOW if goes else None)
    pod = k8s.V1Pod(metadata=metadata, status=k8s.V1PodStatus(phase=phase, pod_ip=address))
    if tls:
        secured(pod, admintls.WIPER)
    return pod


def asked(world: World, value: str = "november") -> None:
    world.body["metadata"]["annotations"] = {labels.ROTATE_TOKEN: value}


def phase(world: World) -> str:
    found = world.status.wiper_token
    return "" if found is None else str(found.phase)


def told(world: World) -> list[tuple[str, ...]]:
    return [each[1:] for each in world.said if each[0] == "event" and each[1].startswith("Token")]


async def test_a_pool_that_nobody_asks_to_rotate_says_nothing_of_it_and_asks_no_wiper() -> None:
    world = World(None, None)
    world.masters = [master("a", "10.0.0.1")]
    assert await world.reconcile() == kvcachepool.SERVING_SECONDS
    assert world.status.wiper_token is None
    assert (world.token, world.asked) == (OLD, [])


async def test_a_token_goes_through_its_phases_and_ends_refused() -> None:
    world = World(None, None)
    world.masters = [master("a", "10.0.0.1")]
    world.taken["10.0.0.1"] = {OLD}
    asked(world)
    assert await world.reconcile() == kvcachepool.STARTING_SECONDS
    assert (phase(world), world.token) == ("Introducing", OLD)
    new = TOKENS.derive("u-1", world.status.wiper_token.other)
    assert new != OLD

    # The kubelet has not brought it yet. A spec that is refused meanwhile forgets nothing.
    await world.reconcile()
    assert world.token.split() == [OLD, new]
    assert world.status.wiper_token.message == "these do not take the new token yet: a (Http401)"
    world.body["spec"]["master"] = {"wiperTlsSecretRef": {"name": "none"}}
    before = world.status.wiper_token
    await world.reconcile()
    assert world.condition("Ready")[1] == "SecretMissing"
    assert world.status.wiper_token == before
    del world.body["spec"]["master"]

    world.taken["10.0.0.1"] = {OLD, new}
    await world.reconcile()
    assert phase(world) == "Overlapping"
    await world.reconcile()
    assert (phase(world), world.token.split()) == ("Overlapping", [new, OLD])
    world.now += dt.timedelta(seconds=601)
    await world.reconcile()
    assert phase(world) == "Retiring"
    await world.reconcile()
    assert (phase(world), world.token) == ("Retiring", new)
    assert world.status.wiper_token.message == "these do not refuse the old token yet: a (takes it)"
    world.taken["10.0.0.1"] = {new}
    assert await world.reconcile() == kvcachepool.SERVING_SECONDS
    assert (phase(world), world.token) == ("Current", new)
    assert [each[0] for each in told(world)] == ["TokenRotating", "TokenRotated"]
    assert told(world)[-1][1].endswith("the old one is refused by each of the 1 wipers that answer")
    # The same value again asks for nothing.
    await world.reconcile()
    assert phase(world) == "Current"
    asked(world, "december")
    await world.reconcile()
    assert (phase(world), world.status.wiper_token.rotation.partition("@")[0]) == ("Introducing", "november")


async def test_who_does_not_take_it_for_minutes_is_told_of() -> None:
    world = World(None, None)
    world.masters = [master("a", "10.0.0.1")]
    world.taken["10.0.0.1"] = {OLD}
    asked(world)
    await world.reconcile()
    world.now += dt.timedelta(seconds=181)
    await world.reconcile()
    await world.reconcile()
    (*_, (reason, message, kind)) = told(world)
    assert (reason, kind, len(told(world))) == ("TokenRotationWaits", "Warning", 2)
    assert message.startswith("these do not take the new token yet: a (Http401)")


async def test_each_wiper_that_runs_is_asked_at_its_own_address_and_as_it_was_made() -> None:
    world = World(None, None)
    world.masters = [
        master("a", "10.0.0.1"),
        master("b", "fd00::2", tls=True),
        master("starting", None, "Pending"),
        master("ended", "10.0.0.3", "Failed"),
        master("goes", "10.0.0.4", goes=True),
    ]
    asked(world)
    await world.reconcile()
    new = TOKENS.derive("u-1", world.status.wiper_token.other)
    world.taken = {"10.0.0.1": {new}, "fd00::2": {OLD}, "10.0.0.4": {OLD}}
    await world.reconcile()
    assert world.status.wiper_token.message == "these do not take the new token yet: b (Http401)"
    # Nobody was sent the old token to find out about the new one.
    assert sorted(world.asked) == [
        "http://10.0.0.1:9004/moontide/v1/keys",
        "http://10.0.0.4:9004/moontide/v1/keys",
        "https://[fd00::2]:9004/moontide/v1/keys kv-master.ns.svc",
    ]


@pytest.mark.parametrize(
    ("state", "rotations"),
    [
        (None, [""]),
        ({"rotation": "", "other": "n", "phase": "Introducing"}, ["", "n"]),
        ({"rotation": "n", "other": "", "phase": "Overlapping"}, ["n", ""]),
        # One that started with what its node remembered takes the old one a while longer.
        ({"rotation": "n", "other": "", "phase": "Retiring"}, ["n", ""]),
        ({"rotation": "n", "phase": "Current"}, ["n"]),
    ],
)
@pytest.mark.parametrize(
    ("action", "calls"),
    [
        pytest.param(Wipe, 2, id="wipe"),
        # One that finds nothing is its own proof.
        pytest.param(lambda fleet: Collect(fleet, ("salt",)), 1, id="collect"),
    ],
)
async def test_removals_are_sent_with_each_token_that_may_be_taken_in_turn(
    tmp_path: Path, action: Any, calls: int, state: dict[str, Any] | None, rotations: list[str]
) -> None:
    world, sent = Cluster(tmp_path), list[str]()

    async def wiper(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"].removeprefix("Bearer "))
        taken = sent[-1] == CLUSTERS.derive("uid-rl-kv", rotations[-1])
        return httpx.Response(200 if taken else 401, json={"success": taken, "removed": 0}, request=request)

    world.network.handle_async_request = wiper  # type: ignore[method-assign]
    since = {"since": "2026-01-02T00:00:00Z"}
    world.kube.put("KVCachePool", "rl", "kv", {})["status"] = {"wiperToken": {**since, **state}} if state else None
    world.kube.put("InferenceDeployment", "rl", "chat", {"model": MODEL, "kvCache": {"poolRef": {"name": "kv"}}})
    deployment = await world.ctx.kube.get_deployment("rl", "chat")
    assert deployment is not None
    result = await policyversion.perform(world.ctx, action(await observe(world.ctx, deployment)))
    assert (result.success, result.reason) == (True, "Verified")
    assert sent == list(CLUSTERS.each("uid-rl-kv", rotations)) * calls
