"""Conditions, pure: build them, and keep ``lastTransitionTime`` still until the status flips."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from moontide.api.v1alpha1 import Condition, ConditionStatus


@dataclass(frozen=True)
class Verdict:
    """A condition before it has a time: what is decided without a clock."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def timestamp(now: dt.datetime) -> str:
    """``now`` (aware) as RFC 3339 with microseconds, in UTC."""
    return now.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_timestamp(text: str) -> dt.datetime:
    """The inverse of :func:`timestamp`; takes whole seconds too. Raises ValueError."""
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))


def merge(
    old: Iterable[Condition], verdicts: Iterable[Verdict], generation: int | None, now: dt.datetime
) -> tuple[Condition, ...]:
    """New conditions, in the order of ``verdicts``; conditions of other types in ``old`` are dropped."""
    previous = {condition.type: condition for condition in old}
    second = now.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    merged = []
    for verdict in verdicts:
        before = previous.get(verdict.type)
        same = before is not None and before.status == verdict.status
        merged.append(
            Condition(
                type=verdict.type,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message,
                last_transition_time=before.last_transition_time if same and before is not None else second,
                observed_generation=generation,
            )
        )
    return tuple(merged)
