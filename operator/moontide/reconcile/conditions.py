"""Tells people when a condition changes: one log line and one Event each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from moontide.api.v1alpha1 import Condition
from moontide.kube.client import Resource
from moontide.reconcile.context import Context

logger = logging.getLogger(__name__)


def log_name(resource: Resource[Any]) -> str:
    """How logs name a resource."""
    return f"{resource.kind}/{resource.meta.namespace}/{resource.meta.name}"


async def announce(
    ctx: Context,
    resource: Resource[Any],
    before: Iterable[Condition],
    now: Iterable[Condition],
    *,
    expected: Collection[str] = (),
) -> None:
    """Log, and leave an Event for, each condition of ``now`` whose status or reason is new.

    A condition that is False is a warning unless its reason is ``expected``: a part of normal life. ``Degraded`` is one
    while it is True.
    """
    previous = {each.type: (each.status, each.reason) for each in before}
    for condition in now:
        if previous.get(condition.type) == (condition.status, condition.reason):
            continue
        text = f"{condition.type} is {condition.status}: {condition.message or condition.reason}"
        bad = "True" if condition.type == "Degraded" else "False"
        trouble = condition.status == bad and condition.reason not in expected
        logger.log(
            logging.WARNING if trouble else logging.INFO,
            text,
            extra={"resource": log_name(resource), "reason": condition.reason},
        )
        await ctx.kube.event(resource, condition.reason, text, "Warning" if trouble else "Normal")
