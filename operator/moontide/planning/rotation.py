"""How a fleet's admin token is rotated while it is in use. Pure.

Engines read their token file again for each request and accept every line of it, and the kubelet brings a changed
Secret to a running pod within about a minute. So a new token

- is *introduced*: the Secret holds it behind the old one, which is used until every engine takes the new one;
- *overlaps*: the Secret holds it first and it is used; who has read the old one, a trainer for instance, may finish;
- the old one *retires*: the Secret holds the new one alone, until every engine refuses the old one.

Nothing in between depends on when an engine sees the change: whoever asks an engine tries both.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from moontide.api.v1alpha1 import AdminToken
from moontide.planning.model import Replica
from moontide.status import parse_timestamp, timestamp

FIRST = ""
"""The rotation of a fleet whose token was never rotated."""
PATIENCE_SECONDS = 600.0
"""For an engine that does not answer at all: by then a kubelet that works has brought it the Secret."""
LATE_SECONDS = 180.0
"""From here on a person should look at who does not take the new token."""
_LISTED = 5
_NAME_LENGTH = 63


@dataclass(frozen=True)
class Step:
    """What one look at a rotation amounts to."""

    token: AdminToken | None
    """The new ``status.adminToken``."""
    reason: str = ""
    """Of an Event; empty: none."""
    message: str = ""
    trouble: bool = False


def used(token: AdminToken | None) -> tuple[str, ...]:
    """The rotations whose tokens an engine may take, in the order in which they are tried."""
    if token is None:
        return (FIRST,)
    return (token.rotation,) if token.other is None else (token.rotation, token.other)


def in_secret(token: AdminToken | None) -> tuple[str, ...]:
    """The rotations whose tokens the Secret holds, a line each; who reads it takes the first."""
    if token is not None and token.phase == "Retiring":
        return (token.rotation,)
    return used(token)


def probed(token: AdminToken | None) -> str | None:
    """The rotation whose token every engine is to be asked with, and no other; None while nothing is rotated."""
    return token.other if token is not None and token.phase in ("Introducing", "Retiring") else None


def begin(token: AdminToken | None, asked: str | None, now: dt.datetime) -> Step:
    """Begin a rotation where the annotation, None where there is none, has a value other than at the last one."""
    before = token or AdminToken()
    if asked is None or before.phase != "Current" or _name(asked) == before.rotation.partition("@")[0]:
        return Step(token)
    # With its time in the name, so that a value that was used before does not bring an old token back.
    other = f"{_name(asked)}@{now.astimezone(dt.UTC):%Y%m%dT%H%M%SZ}"
    text = "a new admin token is introduced; the old one is used until every engine takes the new one"
    begun = AdminToken(rotation=before.rotation, other=other, phase="Introducing", since=timestamp(now))
    return Step(begun, "TokenRotating", text)


def advance(
    token: AdminToken,
    answers: Mapping[str, str],
    replicas: Iterable[Replica],
    preparing: bool,
    overlap: float,
    now: dt.datetime,
) -> Step:
    """The next step of a rotation under way.

    ``answers``: by the replica's name, the reason of what it answered to the token that is probed; empty where it took
    it. ``preparing``: a trainer that may have read the old token is pushing weights. ``overlap``: in seconds.
    """
    seconds = (now - parse_timestamp(token.since or timestamp(now))).total_seconds()
    if token.phase == "Overlapping":
        if seconds < overlap or preparing:
            text = "a trainer pushes weights" if preparing and seconds >= overlap else ""
            return Step(_said(token, f"the old token is accepted until a change has ended: {text}" if text else ""))
        return Step(AdminToken(rotation=token.rotation, other=token.other, phase="Retiring", since=timestamp(now)))

    waiting = sorted(
        f"{replica.name} ({reason})"
        for replica in replicas
        if (reason := _holds_up(token, replica, answers.get(replica.name, "Unreachable"), seconds)) is not None
    )
    if waiting:
        verb = "take the new token" if token.phase == "Introducing" else "refuse the old token"
        more = f" and {len(waiting) - _LISTED} more" if len(waiting) > _LISTED else ""
        text = f"these do not {verb} yet: {', '.join(waiting[:_LISTED])}{more}"
        later = _said(token, text)
        if seconds < LATE_SECONDS or later == token:
            return Step(later)
        return Step(later, "TokenRotationWaits", f"{text}; each must see Secret's new content in its token file", True)
    if token.phase == "Introducing":
        assert token.other is not None
        return Step(AdminToken(rotation=token.other, other=token.rotation, phase="Overlapping", since=timestamp(now)))
    asked = sorted(name for name, reason in answers.items() if reason == "Http401")
    text = f"the admin token was rotated; the old one is refused by each of the {len(asked)} engines that answer"
    return Step(AdminToken(rotation=token.rotation, since=timestamp(now)), "TokenRotated", text)


def _holds_up(token: AdminToken, replica: Replica, reason: str, seconds: float) -> str | None:
    """Why the replica holds the rotation up; None where it does not."""
    if not replica.url and replica.container_id is None:
        return None  # It starts with the Secret as it is then.
    if token.phase == "Introducing" and (replica.terminating or not reason):
        return None
    if token.phase == "Retiring" and reason == "Http401":
        return None
    silent = reason in ("Timeout", "Unreachable")
    may_wake = bool(replica.url) and replica.may_have_served
    if silent and seconds >= PATIENCE_SECONDS and not (token.phase == "Introducing" and may_wake):
        return None
    return reason or "takes it"


def _said(token: AdminToken, message: str) -> AdminToken:
    return token.model_copy(update={"message": message[:1024]})


def _name(asked: str) -> str:
    """What a rotation is called: without an ``@``, and short."""
    name = quote(asked, safe=":+")
    return name if len(name) <= _NAME_LENGTH else hashlib.sha256(asked.encode()).hexdigest()[:32]
