"""Rotates the token of a fleet's admin ports, or of a pool's wipers: see :mod:`moontide.planning.rotation`."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Awaitable, Callable

from moontide import labels
from moontide.api.v1alpha1 import AdminToken, InferenceDeployment, KVCachePool, KVCachePoolStatus, PolicyVersion
from moontide.engines.client import Unanswered, engine_status, fan_out
from moontide.kube.client import Resource
from moontide.planning import rotation
from moontide.planning.model import Fleet, Replica
from moontide.planning.rotation import Kind, Step, Taker
from moontide.reconcile import wipers
from moontide.reconcile.conditions import log_name
from moontide.reconcile.context import Context
from moontide.status import parse_timestamp, timestamp

Owner = Resource[InferenceDeployment] | Resource[KVCachePool]

logger = logging.getLogger(__name__)

READ_LATE = dt.timedelta(seconds=60)
"""Until the Secret is written, who reads it still finds the old token first."""


def state(owner: Owner) -> AdminToken | None:
    """What status says of its token."""
    status = owner.model.status
    if isinstance(status, KVCachePoolStatus):
        return status.wiper_token
    return status.admin_token if status is not None else None


def rotations(owner: Owner) -> tuple[str, ...]:
    """The rotations whose tokens its engines or wipers may take, in the order in which they are tried."""
    return rotation.used(state(owner))


def secret_text(ctx: Context, owner: Owner) -> str:
    """What the Secret holds under ``token``: a token a line, first the one to use."""
    return "\n".join(ctx.tokens.each(owner.meta.uid, rotation.in_secret(state(owner))))


async def look(
    ctx: Context, deployment: Resource[InferenceDeployment], fleet: Fleet, policy: Resource[PolicyVersion] | None
) -> Step:
    """One look at a fleet's token. The Secret holds what ``status.adminToken`` says; the step is not yet written."""

    async def ask(single: str) -> list[Taker]:
        async def one(replica: Replica) -> Taker | None:
            if replica.address is None:
                return rotation.engine(replica, "Unreachable")
            answer = await engine_status(ctx.http, replica.address, single, server_name=replica.server_name)
            return rotation.engine(replica, answer.reason if isinstance(answer, Unanswered) else "")

        found: list[Taker | None] = await fan_out(list(fleet.replicas), one)
        return [each for each in found if each is not None]

    token = state(deployment)
    status = policy.model.status if policy is not None else None
    preparation = status.preparation if status is not None else None
    preparing = (
        token is not None
        and preparation is not None
        and not preparation.outcome
        # A later one begins with the new token.
        and parse_timestamp(preparation.started_at) < parse_timestamp(token.since or timestamp(ctx.now())) + READ_LATE
    )
    return await _look(ctx, deployment, rotation.ENGINES, ask, "a trainer pushes weights" if preparing else "")


async def look_at_wipers(ctx: Context, pool: Resource[KVCachePool]) -> Step:
    """As :func:`look`, at the token of a pool's wipers. The overlap is for people: the operator tries both."""

    async def ask(single: str) -> list[Taker]:
        return await wipers.ask_each(ctx, pool, single)

    return await _look(ctx, pool, rotation.WIPERS, ask, "")


async def _look(
    ctx: Context, owner: Owner, kind: Kind, ask: Callable[[str], Awaitable[list[Taker]]], held: str
) -> Step:
    """``ask``: what each of its engines or wipers answers to one token."""
    token = state(owner)
    if token is None or token.phase == "Current":
        return rotation.begin(kind, token, owner.meta.annotations.get(labels.ROTATE_TOKEN), ctx.now())
    probed = rotation.probed(token)
    takers = await ask(ctx.tokens.derive(owner.meta.uid, probed)) if probed is not None else []
    return rotation.advance(kind, token, takers, held, ctx.config.token_overlap_seconds, ctx.now())


def under_way(step: Step) -> bool:
    """Whether the next look should come soon."""
    return step.token is not None and step.token.phase != "Current"


async def announce(ctx: Context, owner: Owner, step: Step) -> None:
    """Log the step, and leave an Event, once it is written."""
    if not step.reason:
        return
    fields = {"resource": log_name(owner), "reason": step.reason}
    logger.log(logging.WARNING if step.trouble else logging.INFO, step.message, extra=fields)
    await ctx.kube.event(owner, step.reason, step.message, "Warning" if step.trouble else "Normal")
