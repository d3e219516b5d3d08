"""Restarts engines that fell back, one at a time, once their pool is there: see :mod:`moontide.planning.reattach`."""

from __future__ import annotations

import datetime as dt
import logging

from moontide.api.v1alpha1 import InferenceDeployment, KVCachePool, PolicyVersion
from moontide.kube.client import Resource
from moontide.planning import reattach
from moontide.planning.model import Fleet
from moontide.planning.reattach import Look, Reattach
from moontide.reconcile.conditions import log_name
from moontide.reconcile.context import Context
from moontide.status import parse_timestamp

logger = logging.getLogger(__name__)


def ready_since(pool: Resource[KVCachePool] | None) -> dt.datetime | None:
    """Since when engines that start find the pool's master; None while it is not ready.

    A master that was away too shortly for a condition to say so counts from its start.
    """
    status = pool.model.status if pool is not None else None
    if status is None:
        return None
    ready = next((each for each in status.conditions if each.type == "Ready" and each.status == "True"), None)
    if ready is None:
        return None
    started = [parse_timestamp(status.master_started_at)] if status.master_started_at else []
    return max([parse_timestamp(ready.last_transition_time), *started])


def judge(
    ctx: Context,
    resource: Resource[InferenceDeployment],
    fleet: Fleet,
    pool: Resource[KVCachePool] | None,
    policy: Resource[PolicyVersion] | None,
    *,
    complete: bool,
) -> Reattach:
    """What is to be done about the fleet's replicas that fell back. ``complete``: no pod is being made or replaced."""
    spec = resource.model.spec
    if not reattach.fallen(fleet.replicas):
        return Reattach()
    settled = spec.policy_ref is None
    if policy is not None:
        settled = reattach.is_settled(policy.model.spec, policy.meta.generation, policy.model.status)
    loads = policy is not None and policy.model.spec.weights == "Load"
    return reattach.decide(
        Look(
            replicas=fleet.replicas,
            wanted=spec.wanted,
            max_unavailable=spec.rollout.max_unavailable,
            ready_since=ready_since(pool),
            complete=complete,
            settled=settled,
            comes_with=None if loads or spec.model is None else spec.model.version,
            now=ctx.now(),
        )
    )


async def act(ctx: Context, resource: Resource[InferenceDeployment], found: Reattach) -> None:
    """Delete the pod that is to be made anew, with its own time to drain, and say so."""
    replica = found.replica
    if replica is None:
        return
    ctx.term()  # Whoever leads no more ends here.
    if not await ctx.kube.delete_pod(replica.namespace, replica.pod, replica.pod_uid):
        return
    text = f"pod {replica.pod} is made anew: its engine started without the pool, and the pool is ready now"
    logger.info(text, extra={"resource": log_name(resource), "reason": "Reattaching"})
    await ctx.kube.event(resource, "Reattaching", text)
