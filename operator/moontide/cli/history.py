"""`history`: the changes that the policy remembers, and what Events say of them. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from moontide.api.v1alpha1 import Update
from moontide.cli.gather import PolicySight
from moontide.cli.screen import BAD, BUSY, FAINT, table
from moontide.status import parse_timestamp
from moontide.trainer.policy import Object

STAGES = (
    ("quiesced_at", "quiesced"),
    ("drained_at", "drained"),
    ("loaded_at", "weights loaded"),
    ("invalidated_at", "invalidated"),
    ("wiped_at", "old keys removed"),
    ("resumed_at", "resumed"),
)


def updates(seen: PolicySight) -> list[Update]:
    """Newest first: the change at hand, and those before it."""
    status = seen.status
    known = {each.epoch: each for each in status.history}
    if status.last_update is not None:
        known[status.last_update.epoch] = status.last_update
    return [known[epoch] for epoch in sorted(known, reverse=True)]


def after(update: Update, stage: str) -> float | None:
    """Seconds from the beginning of a change until a stage; None where it has not come."""
    moment = getattr(update, stage)
    if moment is None:
        return None
    return (parse_timestamp(moment) - parse_timestamp(update.started_at)).total_seconds()


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def render(seen: PolicySight, events: Iterable[Object], unseen: Iterable[str] = ()) -> RenderableType:
    """A line a change; then Events of the policy, oldest first."""
    made = table("VERSION", "EPOCH", "BEGAN", "TOOK", "PAUSED", "REPLICAS", "KEYS REMOVED", "OUTCOME")
    for each in updates(seen):
        done = each.resumed_at is not None
        word = Text("done") if done else Text("not finished", BUSY)
        made.add_row(
            each.version,
            str(each.epoch),
            each.started_at[:19] + "Z",
            _seconds(after(each, "resumed_at")),
            _seconds(each.pause_seconds),
            "-" if each.replicas is None else str(each.replicas),
            "-" if each.keys_removed is None else str(each.keys_removed),
            word,
        )
    parts: list[RenderableType] = [Text(f"{seen.full_name}, newest first"), made]
    if not updates(seen):
        parts = [Text(f"{seen.full_name} has seen no change yet")]
    told = list(events)
    if told:
        found = table("TIME", "EVENT", "SAYS")
        for event in told:
            style = BAD if event.get("type") == "Warning" else ""
            reason = Text(str(event.get("reason", "")), style)
            found.add_row(moment(event)[:19] + "Z", reason, str(event.get("message", "")))
        parts += [Text(), found]
    parts += [Text(f"not seen: {each}", FAINT) for each in unseen]
    return Group(*parts)


def moment(event: Object) -> str:
    """When an Event was last so."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def in_order(events: Iterable[Object]) -> list[Object]:
    """Events, oldest first."""
    return sorted(
        events, key=lambda each: (moment(each)[:19], str(each["metadata"].get("resourceVersion", "")).zfill(20))
    )


def wire(seen: PolicySight, events: Iterable[Object]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "policy": seen.full_name,
        "changes": [each.to_wire() for each in updates(seen)],
        "events": [
            {key: each.get(key) for key in ("type", "reason", "message", "count")} | {"time": moment(each)}
            for each in events
        ],
    }


def started(update: Update) -> dt.datetime:
    """When a change began."""
    return parse_timestamp(update.started_at)
