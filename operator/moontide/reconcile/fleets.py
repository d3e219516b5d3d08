"""Looks at fleets: pods, what their engines say, and the pool behind them. Shared by two reconciles."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import InferenceDeployment
from moontide.engines.client import Unanswered, engine_status, refuse_own_fault, settled
from moontide.kube.client import Meta, Resource
from moontide.planning.model import EngineStatus, Fleet, Replica
from moontide.reconcile import adopted, tokens, wipers
from moontide.reconcile.context import Context
from moontide.reconcile.stalls import facts
from moontide.resources import admintls, groups
from moontide.resources.sources import FETCH_CONTAINER

PATIENCE_SECONDS = 1.0
"""How long a look waits for a next answer, once it has one, before those that are left count as silent."""
REMEMBERED_FLEETS = 2048
_USUAL = (None, "ContainerCreating", "PodInitializing")
"""What the kubelet says of containers that wait for their turn."""


def running_container(pod: k8s.V1Pod) -> str | None:
    """The id of the engine container that the kubelet says runs in ``pod``, or None."""
    statuses = (pod.status.container_statuses or []) if pod.status is not None else []
    for status in statuses:
        if status.name == naming.ENGINE_CONTAINER and status.state is not None and status.state.running is not None:
            return status.container_id or None
    return None


def started_at(pod: k8s.V1Pod) -> dt.datetime | None:
    """When the engine container that runs in ``pod`` started, or None."""
    for status in (pod.status.container_statuses or []) if pod.status is not None else []:
        if status.name == naming.ENGINE_CONTAINER and status.state is not None and status.state.running is not None:
            moment: dt.datetime | None = status.state.running.started_at
            return moment
    return None


def hindrance(pod: k8s.V1Pod) -> str:
    """``REASON: message`` of what keeps the pod's containers from running; empty if nothing is known to.

    Also tells of a Secret or claim that is missing, as scheduler and kubelet say it.
    """
    status = pod.status
    if status is None:
        return ""
    for said in status.conditions or []:
        if said.type == "PodScheduled" and said.status == "False":
            return f"{said.reason or 'Unscheduled'}: {said.message or 'the pod has no node'}"
    for init, each in (
        *((True, one) for one in status.init_container_statuses or []),
        *((False, one) for one in status.container_statuses or []),
    ):
        states = (each.state, each.last_state)
        ended = next((s.terminated for s in states if s is not None and s.terminated is not None), None)
        if init and each.name == FETCH_CONTAINER and ended is not None and ended.exit_code:
            last = " ".join((ended.message or "").split())[-500:]
            return f"FetchFailed: the model could not be fetched (exit status {ended.exit_code}): {last}"
        waiting = each.state.waiting if each.state is not None else None
        if waiting is not None and waiting.reason not in _USUAL:
            return f"{waiting.reason}: {waiting.message or 'the kubelet gives no message'}"
    return ""


def unasked(pod: k8s.V1Pod, of: Meta, home: str) -> Replica:
    """The replica of a fleet that ``pod`` is, before its engine was asked, as it is called in namespace ``home``."""
    metadata = pod.metadata
    if metadata is None or not metadata.name or not metadata.uid:
        raise ValueError("a pod without a name or uid was never stored by an API server")
    container = running_container(pod)
    admitted = (metadata.annotations or {}).get(labels.ADMITTED_CONTAINER)
    ip = pod.status.pod_ip if pod.status is not None else None
    secured = admintls.serves(pod, admintls.ENGINE)
    return Replica(
        name=naming.qualified(metadata.name, of.namespace, home),
        namespace=of.namespace,
        fleet_name=of.name,
        pod=metadata.name,
        pod_uid=metadata.uid,
        fleet=of.uid,
        address=f"{'https://' if secured else ''}{ip}:{naming.ADMIN_PORT}" if ip else None,
        server_name=naming.service_host(of.name, of.namespace) if secured else "",
        container_id=container,
        may_have_served=container is not None and container == admitted,
        terminating=metadata.deletion_timestamp is not None,
        pod_state=facts(pod),
        container_started=started_at(pod),
        hindrance="" if container is not None else hindrance(pod),
    )


def owned(pod: k8s.V1Pod) -> bool:
    """Whether the pod still stands for an engine: a finished pod does not."""
    return pod.status is None or pod.status.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True)
class Roster:
    """A fleet as the API server knows it: before its engines were asked."""

    fleet: Fleet
    """Its replicas have no status yet; of an adopting fleet there are none."""
    adopting: Resource[InferenceDeployment] | None = None
    """Of a fleet of URLs, which are asked to find out what is there."""
    lingering: tuple[Replica, ...] = ()
    """Not to be asked."""


async def roster(ctx: Context, deployment: Resource[InferenceDeployment], home: str | None = None) -> Roster:
    """The fleet's pods, terminating ones included, and its pool, as the API server has them now.

    ``home``: the namespace of who looks; names from another one have the namespace in front.
    """
    meta, spec = deployment.meta, deployment.model.spec
    home = home or meta.namespace
    pool_name = spec.kv_cache.pool_ref.name if spec.kv_cache is not None else None
    found, left, pool = await asyncio.gather(
        _pods(ctx, deployment, home),
        _left_behind(ctx, deployment, home),
        ctx.kube.get_pool(meta.namespace, pool_name) if pool_name is not None else _nothing(),
    )
    fleet = Fleet(
        name=naming.qualified(meta.name, meta.namespace, home),
        namespace=meta.namespace,
        uid=meta.uid,
        pool=pool_name,
        pool_uid=pool.meta.uid if pool is not None else None,
        token_secret=naming.admin_secret(meta.name),
        replicas=tuple(found),
        wiper_tls=pool is not None and wipers.may_serve_tls(pool),
        wiper_tokens=tokens.rotations(pool) if pool is not None else ("",),
    )
    return Roster(fleet, deployment if spec.endpoints is not None else None, tuple(left))


async def observe(ctx: Context, deployment: Resource[InferenceDeployment], home: str | None = None) -> Fleet:
    """One look at a fleet: its pods, terminating ones included, or the engines that it adopted, and what they answered.

    ``home``: see :func:`roster`.
    """
    return await ask(ctx, await roster(ctx, deployment, home), home or deployment.meta.namespace)


async def ask(ctx: Context, listed: Roster, home: str, known: Mapping[str, EngineStatus] | None = None) -> Fleet:
    """The fleet with what its engines answer. Those in ``known`` (by pod uid) have said it just now and are not asked.

    Once none has answered for :data:`PATIENCE_SECONDS` after another, those that have not are silent. They have the
    rest of :data:`STATUS_SECONDS`, and later looks do not wait for them until they have answered.
    """
    known, uid = known or {}, listed.fleet.uid
    if listed.adopting is not None:
        return replace(listed.fleet, replicas=tuple(await adopted.observe(ctx, listed.adopting, home, known)))
    late = ctx.late.pop(uid, {})
    asked: dict[str, asyncio.Task[EngineStatus | Unanswered]] = {}
    heard: dict[str, EngineStatus | Unanswered] = {}
    for replica in listed.fleet.replicas:
        said = known.get(replica.pod_uid)
        before = late.pop(replica.pod_uid, None)
        if said is not None:
            heard[replica.pod_uid] = said
        elif replica.address is None:
            heard[replica.pod_uid] = Unanswered("NoAddress", "the pod has no address yet")
        elif before is not None and (not before.done() or isinstance(before.result(), Unanswered)):
            # Still silent. It is asked all the time, and waited for no longer.
            heard[replica.pod_uid] = _late(replica)
            again = _status(ctx, replica) if before.done() else before
            ctx.late.setdefault(uid, {})[replica.pod_uid] = again
            continue
        else:
            asked[replica.pod_uid] = _status(ctx, replica)
        if before is not None:
            before.cancel()
    for task in late.values():
        task.cancel()
    try:
        await settled(list(asked.values()), PATIENCE_SECONDS)
    except asyncio.CancelledError:
        for task in asked.values():
            task.cancel()
        raise
    for replica in listed.fleet.replicas:
        question = asked.get(replica.pod_uid)
        if question is None:
            continue
        if question.done():
            heard[replica.pod_uid] = question.result()
        else:
            heard[replica.pod_uid] = _late(replica)
            ctx.late.setdefault(uid, {})[replica.pod_uid] = question
    refuse_own_fault(heard.values())
    replicas = (_with(replica, heard[replica.pod_uid]) for replica in listed.fleet.replicas)
    return replace(listed.fleet, replicas=(*replicas, *listed.lingering))


def _status(ctx: Context, replica: Replica) -> asyncio.Task[EngineStatus | Unanswered]:
    assert replica.address is not None
    tokens = ctx.tokens.each(replica.fleet, replica.tokens)
    return asyncio.ensure_future(engine_status(ctx.http, replica.address, tokens, server_name=replica.server_name))


def _late(replica: Replica) -> Unanswered:
    return Unanswered("Timeout", f"no answer from {replica.address} while others have answered")


def lingering(pod: k8s.V1Pod, of: Meta, home: str) -> Replica:
    """A worker whose leader is gone, as a replica that does not answer: its puts may still be on their way."""
    return replace(unasked(pod, of, home), address=None, may_have_served=True, terminating=True)


async def _pods(ctx: Context, deployment: Resource[InferenceDeployment], home: str) -> list[Replica]:
    """The replicas that are pods. Only pods that have changed since the last look are read anew."""
    meta = deployment.meta
    if deployment.model.spec.endpoints is not None:
        return []

    def convert(pod: k8s.V1Pod) -> Replica | None:
        return unasked(pod, meta, home) if owned(pod) else None

    selector = labels.selector(labels.engine_labels(meta.name))
    if len(ctx.pods) > REMEMBERED_FLEETS:
        # Those that were deleted are among them.
        ctx.pods.clear()
    seen = ctx.pods.setdefault((meta.uid, home), {})
    found: list[Replica | None] = await ctx.kube.read_pods(meta.namespace, selector, convert, seen)
    rotations = tokens.rotations(deployment)
    return [
        replica if replica.tokens == rotations else replace(replica, tokens=rotations)
        for replica in found
        if replica is not None
    ]


async def _left_behind(ctx: Context, deployment: Resource[InferenceDeployment], home: str) -> list[Replica]:
    """Workers of replicas of several pods whose leader is gone."""
    meta = deployment.meta
    if deployment.model.spec.nodes <= 1:
        return []
    pods = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.engine_labels(meta.name)))
    workers = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.worker_labels(meta.name)))
    return [
        replace(lingering(pod, meta, home), error="NoAddress: its leader is gone")
        for pod in groups.left_behind(pods, workers)
        if running_container(pod)
    ]


async def _nothing() -> None:
    return None


def _with(replica: Replica, answer: EngineStatus | Unanswered) -> Replica:
    if isinstance(answer, Unanswered):
        return replace(replica, error=f"{answer.reason}: {answer.message}")
    return replace(replica, status=answer)
