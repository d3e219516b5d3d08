"""Rotates the token of a fleet's admin ports: see :mod:`moontide.planning.rotation`."""

from __future__ import annotations

import datetime as dt
import logging

from moontide import labels
from moontide.api.v1alpha1 import AdminToken, InferenceDeployment, PolicyVersion
from moontide.engines.client import Unanswered, engine_status, fan_out
from moontide.kube.client import Resource
from moontide.planning import rotation
from moontide.planning.model import Fleet, Replica
from moontide.planning.rotation import Step
from moontide.reconcile.conditions import log_name
from moontide.reconcile.context import Context
from moontide.status import parse_timestamp, timestamp

logger = logging.getLogger(__name__)

READ_LATE = dt.timedelta(seconds=60)
"""Until the Secret is written, who reads it still finds the old token first."""


def state(deployment: Resource[InferenceDeployment]) -> AdminToken | None:
    """``status.adminToken``."""
    return deployment.model.status.admin_token if deployment.model.status is not None else None


def rotations(deployment: Resource[InferenceDeployment]) -> tuple[str, ...]:
    """The rotations whose tokens its engines may take, in the order in which they are tried."""
    return rotation.used(state(deployment))


def secret_text(ctx: Context, deployment: Resource[InferenceDeployment]) -> str:
    """What the Secret holds under ``token``: a token a line, first the one to use."""
    return "\n".join(ctx.tokens.each(deployment.meta.uid, rotation.in_secret(state(deployment))))


async def look(
    ctx: Context, deployment: Resource[InferenceDeployment], fleet: Fleet, policy: Resource[PolicyVersion] | None
) -> Step:
    """One look at a fleet's token. The Secret holds what ``status.adminToken`` says; the step is not yet written."""
    meta, token = deployment.meta, state(deployment)
    if token is None or token.phase == "Current":
        return rotation.begin(token, meta.annotations.get(labels.ROTATE_TOKEN), ctx.now())
    answers, probed = {}, rotation.probed(token)
    if probed is not None:
        single = ctx.tokens.derive(meta.uid, probed)

        async def ask(replica: Replica) -> str:
            if replica.address is None:
                return "Unreachable"
            answer = await engine_status(ctx.http, replica.address, single, server_name=replica.server_name)
            return answer.reason if isinstance(answer, Unanswered) else ""

        found: list[str] = await fan_out(list(fleet.replicas), ask)
        answers = dict(zip((each.name for each in fleet.replicas), found, strict=True))
    status = policy.model.status if policy is not None else None
    preparation = status.preparation if status is not None else None
    preparing = (
        preparation is not None
        and not preparation.outcome
        # A later one begins with the new token.
        and parse_timestamp(preparation.started_at) < parse_timestamp(token.since or timestamp(ctx.now())) + READ_LATE
    )
    overlap = ctx.config.token_overlap_seconds
    return rotation.advance(token, answers, fleet.replicas, preparing, overlap, ctx.now())


def under_way(step: Step) -> bool:
    """Whether the fleet is to be looked at again soon."""
    return step.token is not None and step.token.phase != "Current"


async def announce(ctx: Context, deployment: Resource[InferenceDeployment], step: Step) -> None:
    """Log the step, and leave an Event, once it is written."""
    if not step.reason:
        return
    fields = {"resource": log_name(deployment), "reason": step.reason}
    logger.log(logging.WARNING if step.trouble else logging.INFO, step.message, extra=fields)
    await ctx.kube.event(deployment, step.reason, step.message, "Warning" if step.trouble else "Normal")
