"""A look at a policy that is at rest, which asks the API server for nothing.

It decides one thing: whether there is nothing to do. Engines are asked as always; pods, fleets and the policy are read
as the watches brought them. Where that leaves any doubt, :mod:`moontide.reconcile.policyversion` looks for itself.
"""

from __future__ import annotations

from moontide.engines.client import fan_out
from moontide.errors import InvalidSpec, Retry
from moontide.planning import protocol
from moontide.planning.model import Fleet, Observed
from moontide.reconcile.context import Context
from moontide.reconcile.fleets import observe
from moontide.reconcile.rounds import following


async def at(ctx: Context, namespace: str, name: str) -> float | None:
    """The seconds until the next look, where the policy is current, and the plan is to do and to write nothing.

    None where it must be reconciled.
    """
    try:
        return await _at(ctx, namespace, name)
    except (Retry, InvalidSpec):
        return None


async def _at(ctx: Context, namespace: str, name: str) -> float | None:
    policy = await ctx.kube.get_policy(namespace, name)
    if policy is None or policy.meta.deletion_timestamp is not None:
        return None
    meta, status = policy.meta, policy.model.status
    if status is None or status.observed_generation != meta.generation:
        return None
    if not any(each.type == "Current" and each.status == "True" for each in status.conditions):
        return None
    if status.preparation is not None and not status.preparation.outcome:
        return None
    followers = await following(ctx, policy)
    # Which engines of others may serve is in their fleets' status, which a watch may bring late.
    if any(each.model.spec.endpoints is not None for each in followers):
        return None
    fleets: list[Fleet] = await fan_out(followers, lambda each: observe(ctx, each, meta.namespace), limit=16)
    plan = protocol.plan(policy.model.spec, meta.generation, status, Observed(tuple(fleets), ctx.now(), meta.uid))
    if plan.actions or plan.notes or plan.status != status or plan.requeue_after <= 0.0:
        return None
    # Who has just begun to lead has not counted what there is.
    ctx.metrics.policy(namespace, name, status, status)
    return plan.requeue_after
