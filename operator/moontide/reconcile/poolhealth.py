"""Gathers what :mod:`moontide.planning.poolhealth` judges: whose segments there should be, when the master started."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from kubernetes.aio import client as k8s

from moontide import labels, status
from moontide.api.v1alpha1 import InferenceDeployment, KVCachePool, KVCachePoolStatus, quantity_bytes
from moontide.kube.client import Resource
from moontide.planning import poolhealth
from moontide.planning.poolhealth import Lender, Seen
from moontide.reconcile import isolation
from moontide.reconcile.context import Context
from moontide.resources import memory
from moontide.resources.store import MASTER_CONTAINER

SETTLED = "Complete"
"""Reason of a fleet's ``Progressing`` when no pod is being made or replaced: only then its segments can be counted."""


@dataclass(frozen=True)
class Health:
    """The figures of one look; None where the master did not say."""

    segments: int | None
    keys: int | None
    allocated_bytes: int | None
    capacity_bytes: int | None
    nodes: int


@dataclass(frozen=True)
class Judged:
    """What the status takes over."""

    verdict: status.Verdict
    started_at: str | None
    restarts: int | None


async def master_started(ctx: Context, pool: Resource[KVCachePool]) -> dt.datetime | None:
    """When the master's container that runs now started; None while none does, or several do."""
    pods = await ctx.kube.list_pods(pool.meta.namespace, labels.selector(labels.store_labels(pool.meta.name)))
    running = [moment for pod in pods if (moment := _started(pod)) is not None]
    return running[0] if len(running) == 1 else None


def _started(pod: k8s.V1Pod) -> dt.datetime | None:
    if pod.metadata is not None and pod.metadata.deletion_timestamp is not None:
        return None
    for each in (pod.status.container_statuses if pod.status is not None else None) or ():
        if each.name == MASTER_CONTAINER and each.state is not None and each.state.running is not None:
            moment: dt.datetime | None = each.state.running.started_at
            return moment
    return None


def lenders(pool: Resource[KVCachePool], fleets: Iterable[Resource[InferenceDeployment]], nodes: int) -> list[Lender]:
    """Whose segments must be mounted now, as far as that is certain. Raises ValueError for a size that is none."""
    found = [Lender("memory nodes", nodes)] if nodes else []
    if not quantity_bytes(pool.model.spec.memory.per_replica):
        return found
    for fleet in fleets:
        if isolation.refusal(pool, fleet) is not None:
            continue
        said = fleet.model.status
        settled = said is not None and any(
            each.type == "Progressing" and each.reason == SETTLED for each in said.conditions
        )
        if said is not None and settled and said.ready_replicas:
            each = (
                1
                if fleet.model.spec.endpoints is not None
                else memory.pod_ranks(fleet.model.spec) * fleet.model.spec.nodes
            )
            found.append(Lender(f"fleet {fleet.meta.name}", said.ready_replicas * each))
    return found


def judge(
    ctx: Context,
    pool: Resource[KVCachePool],
    health: Health,
    fleets: Iterable[Resource[InferenceDeployment]],
    started: dt.datetime | None,
    *,
    serving: bool,
) -> Judged:
    """The condition ``Degraded``, and what of the master has to be remembered for the next look."""
    before, spec = pool.model.status or KVCachePoolStatus(), pool.model.spec
    known = status.parse_timestamp(before.master_started_at) if before.master_started_at else None
    again = poolhealth.restarted(known, started)
    restarts = (before.master_restarts or 0) + again
    kept = started if started is not None and (known is None or again) else known
    seen = None
    if serving and health.keys is not None and health.allocated_bytes is not None and health.capacity_bytes is not None:
        seen = Seen(
            segments=health.segments,
            lenders=tuple(lenders(pool, fleets, health.nodes)),
            keys=health.keys,
            allocated_bytes=health.allocated_bytes,
            capacity_bytes=health.capacity_bytes,
            watermark_percent=spec.master.eviction_high_watermark_percent,
            eviction_percent=spec.master.eviction_ratio_percent,
            master_age=(ctx.now() - kept).total_seconds() if kept is not None else None,
            restarts=restarts,
        )
    return Judged(
        verdict=poolhealth.degraded(seen, before.conditions),
        started_at=status.timestamp(kept) if kept is not None else None,
        restarts=restarts or None,
    )


async def announce_restart(
    ctx: Context, pool: Resource[KVCachePool], before: KVCachePoolStatus, now: KVCachePoolStatus
) -> None:
    """An Event for a restart of the master, with what it cost."""
    if (now.master_restarts or 0) <= (before.master_restarts or 0):
        return
    lost = f"{before.keys} keys were lost" if before.keys is not None else "what it knew was lost"
    text = f"the master restarted at {now.master_started_at}: {lost}; engines mount their memory again by themselves"
    await ctx.kube.event(pool, "MasterRestarted", text, "Warning")
