"""Applies the memory nodes of a pool, says before some go what becomes of their keys, and watches them go."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.api.v1alpha1 import KVCachePool
from moontide.api.v1alpha1.kvcachepool import StoreNodesStatus
from moontide.engines.client import Unanswered, fetch
from moontide.engines.wire import Session
from moontide.errors import InvalidSpec
from moontide.kube.client import Resource
from moontide.planning import storenodes as planning
from moontide.planning.storenodes import Leaving, Segment
from moontide.reconcile.context import Context
from moontide.resources import storenodes as resources
from moontide.resources.masters import election
from moontide.status import Verdict

ASK_SECONDS = 2.0
EXPECTED = ("Starting", "Draining")


@dataclass(frozen=True)
class Nodes:
    """One look at the memory nodes of a pool that has, or had, some."""

    wanted: int
    lending: int
    total: int
    leaving: tuple[Leaving, ...]

    @property
    def verdict(self) -> Verdict:
        """The condition."""
        return planning.ready(self.wanted, self.lending, self.leaving)

    @property
    def status(self) -> StoreNodesStatus:
        """The part of the pool's status."""
        leaving = tuple(planning.said(each) for each in self.leaving[:16])
        return StoreNodesStatus(replicas=self.total, ready=self.lending, leaving=leaving)


async def concerned(ctx: Context, pool: Resource[KVCachePool]) -> bool:
    """Whether the pool has memory nodes, or had some that are still there."""
    if pool.model.spec.memory.store_nodes is not None:
        return True
    return await _live(ctx, pool) is not None


async def prepare(ctx: Context, pool: Resource[KVCachePool]) -> k8s.V1Deployment | None:
    """The Deployment of the memory nodes to apply; None where there never were any.

    Where it lets nodes go, an Event has said so before this returns. Raises :class:`InvalidSpec` for a size that is
    none.
    """
    meta, spec = pool.meta, pool.model.spec
    live = await _live(ctx, pool)
    if spec.memory.store_nodes is None and live is None:
        return None
    image, owner = ctx.config.mooncake_image, pool.owner_reference()
    try:
        elected = election(meta.name, meta.namespace, meta.uid, spec)
        wanted = resources.deployment(meta.name, meta.namespace, owner, spec, image, elected)
    except ValueError as error:
        raise InvalidSpec("SizeInvalid", f"memory.storeNodes.segmentSize: {error}") from error
    before = (live.spec.replicas or 0) if live is not None and live.spec is not None else 0
    after = (wanted.spec.replicas or 0) if wanted.spec is not None else 0
    if after < before:
        drain = spec.memory.store_nodes.drain_seconds if spec.memory.store_nodes is not None else 0
        if spec.memory.store_nodes is None and live is not None:
            drain = _drain_of(live)
        pods = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.store_node_labels(meta.name)))
        hosts = frozenset(pod.status.pod_ip for pod in pods if pod.status is not None and pod.status.pod_ip)
        keys = (pool.model.status.keys if pool.model.status is not None else None) or 0
        text = planning.going(before, after, hosts, await segments(ctx, pool), keys, drain)
        await ctx.kube.event(pool, "StoreNodesScaledDown", text, "Warning" if "dropped" in text else "Normal")
    return wanted


def _drain_of(live: k8s.V1Deployment) -> int:
    """The seconds that running nodes were given: those of a spec that is gone."""
    template = live.spec.template.spec if live.spec is not None else None
    grace = (template.termination_grace_period_seconds if template is not None else None) or 0
    return max(0, grace - resources.EXIT_SECONDS)


async def _live(ctx: Context, pool: Resource[KVCachePool]) -> k8s.V1Deployment | None:
    """The Deployment of the pool's memory nodes; None, too, where the name is another's."""
    live = await ctx.kube.get_child_deployment(pool.meta.namespace, naming.store_nodes(pool.meta.name))
    references = live.metadata.owner_references if live is not None and live.metadata is not None else None
    ours = any(each.controller and each.uid == pool.meta.uid for each in references or ())
    return live if ours else None


async def look(ctx: Context, pool: Resource[KVCachePool]) -> Nodes | None:
    """The memory nodes as they are; None where there never were any. An Event tells of each that goes."""
    meta, spec = pool.meta, pool.model.spec
    live = await _live(ctx, pool)
    if live is None:
        return None
    pods = await ctx.kube.list_pods(meta.namespace, labels.selector(labels.store_node_labels(meta.name)))
    going = [pod for pod in pods if pod.metadata is not None and pod.metadata.deletion_timestamp is not None]
    leaving = tuple(await asyncio.gather(*(_ask(ctx.http, pod) for pod in going)))
    for each in leaving:
        if each.ended:
            dropped = each.dropped_bytes > 0
            await ctx.kube.event(pool, "StoreNodeLeft", planning.said(each), "Warning" if dropped else "Normal")
        else:
            await ctx.kube.event(pool, "StoreNodeLeaving", f"memory node {each.pod} is going and moves its keys")
    wanted = spec.memory.store_nodes.replicas if spec.memory.store_nodes is not None else 0
    if not wanted and not pods:
        return None
    counts = live.status
    return Nodes(
        wanted=wanted,
        lending=(counts.ready_replicas if counts is not None else None) or 0,
        total=(counts.replicas if counts is not None else None) or 0,
        leaving=leaving,
    )


async def _ask(http: Session, pod: k8s.V1Pod) -> Leaving:
    """How far a node is that goes."""
    name = str(pod.metadata.name if pod.metadata is not None else "")
    address = pod.status.pod_ip if pod.status is not None else None
    if not address:
        return Leaving(name)
    host = f"[{address}]" if ":" in address else address
    answer = await fetch(http, f"http://{host}:{naming.STORE_NODE_PORT}/moontide/v1/status", ASK_SECONDS)
    if isinstance(answer, Unanswered):
        return Leaving(name)
    try:
        said = json.loads(answer[1])["drain"]
        return Leaving(
            name,
            str(said["reason"]),
            int(said["held_bytes"]),
            int(said["moved_keys"]),
            int(said["moved_bytes"]),
            bool(said["ended"]),
        )
    except (ValueError, KeyError, TypeError):
        return Leaving(name)


async def segments(ctx: Context, pool: Resource[KVCachePool]) -> tuple[Segment, ...] | None:
    """The segments that the master lists; None where it does not answer."""
    host = naming.service_host(naming.master(pool.meta.name), pool.meta.namespace)
    url = f"http://{host}:{naming.MASTER_METRICS_PORT}/get_segments_detail"
    answer = await fetch(ctx.http, url, ASK_SECONDS)
    if isinstance(answer, Unanswered):
        return None
    try:
        return tuple(
            Segment(
                host=str(each["segment_name"]).rpartition(":")[0].strip("[]"),
                used_bytes=int(each["allocator_used_bytes"]),
                capacity_bytes=int(each["allocator_capacity_bytes"]),
                usable=each.get("status") == "OK",
            )
            for each in json.loads(answer[1])["segments"]
        )
    except (ValueError, KeyError, TypeError):
        return None
