"""What ``kubectl moontide status`` prints. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from moontide.trainer.policy import Object, Policy

_STAGES = (
    ("quiescedAt", "quiesced"),
    ("drainedAt", "drained"),
    ("invalidatedAt", "invalidated"),
    ("wipedAt", "old keys removed"),
    ("resumedAt", "resumed"),
)


def status(policy: Policy) -> list[str]:
    """Everything that a person wants to know of a policy, as lines."""
    spec, found = policy.spec, policy.status
    head = [f"{policy.namespace}/{policy.name}", f"strategy {spec.get('strategy')}", f"weights {spec.get('weights')}"]
    lines = [", ".join([*head, *(["suspended"] if spec.get("suspend") else [])])]
    served, replicas = policy.served or "none", found.get("replicas") or {}
    rows = [
        ("version", served if served == policy.version else f"{served} (asked for: {policy.version})"),
        ("epoch", str(found.get("epoch", 0))),
        ("replicas", f"{replicas.get('summary', '0/0')} current, {replicas.get('closed', 0)} closed"),
    ]
    if policy.preparation or policy.preparing is not None:
        rows.append(("preparing", _preparing(policy)))
    for kind in ("Current", "Progressing", "Degraded", "Prepared"):
        condition = policy.condition(kind)
        if condition.status != "Unknown" or kind == "Current":
            rows.append((kind, f"{condition.status}  {condition.reason}  {condition.message}".rstrip()))
    lines += [f"  {name:<12} {text}" for name, text in rows]
    if not policy.condition("Current").fresh:
        lines.append(f"  this is of an older spec: the operator has not looked at generation {policy.generation} yet")
    for failure in found.get("failures") or ():
        text = f"{failure['replica']}, {failure['step']}: {failure['reason']} {failure.get('message', '')}".rstrip()
        lines.append(f"  failing since {failure['since']}: {text}")
    if found.get("failuresOmitted"):
        lines.append(f"  and {found['failuresOmitted']} more")
    if found.get("lastUpdate"):
        lines += ["", *_timeline(found["lastUpdate"])]
    if found.get("history"):
        lines += ["", "history, newest first", *_history(found["history"])]
    return lines


def _preparing(policy: Policy) -> str:
    found = policy.preparation
    if not found:
        return f"{policy.preparing}, not begun"
    how = found.get("outcome") or ("ready for weights" if found.get("preparedAt") else "getting ready")
    engines = sum(len(fleet.get("addresses") or ()) for fleet in found.get("fleets") or ())
    return f"{found['version']} in epoch {found['epoch']}, since {found['startedAt']}: {how}, {engines} engines"


def _timeline(update: Object) -> list[str]:
    lines = [f"last change: version {update['version']}, epoch {update['epoch']}, began {update['startedAt']}"]
    reached = sorted((_seconds(update, key), name) for key, name in _STAGES if update.get(key))
    lines += [f"  {seconds:+9.3f} s  {name}" for seconds, name in reached]
    if update.get("resumedAt"):
        removed = "unknown" if update.get("keysRemoved") is None else update["keysRemoved"]
        text = f"paused {_pause(update)}, {update.get('replicas', 0)} replicas, keys removed: {removed}"
        return [*lines, f"  {text}"]
    return [*lines, "  not finished"]


def _history(updates: Sequence[Object]) -> list[str]:
    rows = [("VERSION", "EPOCH", "BEGAN", "TOOK", "PAUSED", "REPLICAS", "KEYS REMOVED")]
    for each in updates:
        took = f"{_seconds(each, 'resumedAt'):.3f} s" if each.get("resumedAt") else "-"
        removed = "-" if each.get("keysRemoved") is None else str(each["keysRemoved"])
        began = str(each["startedAt"])
        rows.append(
            (
                str(each["version"]),
                str(each["epoch"]),
                began,
                took,
                _pause(each),
                str(each.get("replicas", "-")),
                removed,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _pause(update: Object) -> str:
    pause = update.get("pauseSeconds")
    return "-" if pause is None else f"{pause:.3f} s"


def _seconds(update: Object, key: str) -> float:
    """From the beginning of a change until one of its times."""
    return (_moment(update[key]) - _moment(update["startedAt"])).total_seconds()


def _moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
