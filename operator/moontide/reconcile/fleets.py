"""Looks at fleets: pods, what their engines say, and the pool behind them. Shared by two reconciles."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import InferenceDeployment
from moontide.engines.client import Unanswered, engine_status, fan_out
from moontide.kube.client import Meta, Resource
from moontide.planning.model import EngineStatus, Fleet, Replica
from moontide.reconcile import adopted, tokens
from moontide.reconcile.context import Context
from moontide.reconcile.stalls import facts
from moontide.resources import groups
from moontide.resources.sources import FETCH_CONTAINER

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
    return Replica(
        name=naming.qualified(metadata.name, of.namespace, home),
        namespace=of.namespace,
        fleet_name=of.name,
        pod=metadata.name,
        pod_uid=metadata.uid,
        fleet=of.uid,
        address=f"{ip}:{naming.ADMIN_PORT}" if ip else None,
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


async def observe(ctx: Context, deployment: Resource[InferenceDeployment], home: str | None = None) -> Fleet:
    """One look at a fleet: its pods, terminating ones included, or the engines that it adopted, and what they answered.

    ``home``: the namespace of who looks; names from another one have the namespace in front.
    """
    meta, spec = deployment.meta, deployment.model.spec
    home = home or meta.namespace
    replicas = await (
        _pods(ctx, deployment, home) if spec.endpoints is None else adopted.observe(ctx, deployment, home)
    )
    pool_name = spec.kv_cache.pool_ref.name if spec.kv_cache is not None else None
    pool = await ctx.kube.get_pool(meta.namespace, pool_name) if pool_name is not None else None
    return Fleet(
        name=naming.qualified(meta.name, meta.namespace, home),
        namespace=meta.namespace,
        uid=meta.uid,
        pool=pool_name,
        pool_uid=pool.meta.uid if pool is not None else None,
        token_secret=naming.admin_secret(meta.name),
        replicas=tuple(replicas),
    )


def lingering(pod: k8s.V1Pod, of: Meta, home: str) -> Replica:
    """A worker whose leader is gone, as a replica that does not answer: its puts may still be on their way."""
    return replace(unasked(pod, of, home), address=None, may_have_served=True, terminating=True)


async def _pods(ctx: Context, deployment: Resource[InferenceDeployment], home: str) -> list[Replica]:
    meta, nodes, rotations = deployment.meta, deployment.model.spec.nodes, tokens.rotations(deployment)
    pods = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.engine_labels(meta.name)))
    known = ctx.tokens.each(meta.uid, rotations)

    async def ask(found: Replica) -> Replica:
        replica = replace(found, tokens=rotations)
        if replica.address is None:
            return _with(replica, Unanswered("NoAddress", "the pod has no address yet"))
        return _with(replica, await engine_status(ctx.http, replica.address, known))

    found: list[Replica] = await fan_out([unasked(pod, meta, home) for pod in pods if owned(pod)], ask)
    if nodes > 1:
        workers = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.worker_labels(meta.name)))
        found += (lingering(pod, meta, home) for pod in groups.left_behind(pods, workers) if running_container(pod))
    return found


def _with(replica: Replica, answer: EngineStatus | Unanswered) -> Replica:
    if isinstance(answer, Unanswered):
        return replace(replica, error=f"{answer.reason}: {answer.message}")
    return replace(replica, status=answer)
