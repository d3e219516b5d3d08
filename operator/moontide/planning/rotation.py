"""How the token of a fleet's engines, or of a pool's wipers, is rotated while it is in use. Pure.

They read their token file again for each request and accept every line of it, and the kubelet brings a changed Secret
to a running pod within about a minute. So a new token

- is *introduced*: the Secret holds it behind the old one, which is used until every one of them takes the new one;
- *overlaps*: the Secret holds it first and it is used; who has read the old one, a trainer for instance, may finish;
- the old one *retires*: the Secret holds the new one alone, until every one of them refuses the old one.

Nothing in between depends on when one of them sees the change: whoever asks tries both.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from moontide.api.v1alpha1 import AdminToken
from moontide.planning.model import Replica
from moontide.status import parse_timestamp, timestamp

FIRST = ""
"""The rotation of a token that was never rotated."""
PATIENCE_SECONDS = 600.0
"""For one that does not answer at all: by then a kubelet that works has brought it the Secret."""
LATE_SECONDS = 180.0
"""From here on a person should look at who does not take the new token."""
_LISTED = 5
_NAME_LENGTH = 63


@dataclass(frozen=True)
class Step:
    """What one look at a rotation amounts to."""

    token: AdminToken | None
    """What status is to say of it."""
    reason: str = ""
    """Of an Event; empty: none."""
    message: str = ""
    trouble: bool = False


@dataclass(frozen=True)
class Kind:
    """Whose token it is, in the words of messages."""

    token: str
    taker: str


ENGINES = Kind("admin token", "engine")
WIPERS = Kind("wiper token", "wiper")


@dataclass(frozen=True)
class Taker:
    """One who may take the token, and runs."""

    name: str
    reason: str = ""
    """Of what it answered to the token that is probed; empty where it took it."""
    terminating: bool = False
    may_wake: bool = False
    """No kubelet brings it the new token, and when it answers again it must take commands."""


def engine(replica: Replica, reason: str) -> Taker | None:
    """None for an engine that does not run: it starts with the Secret as it is then."""
    if not replica.url and replica.container_id is None:
        return None
    return Taker(replica.name, reason, replica.terminating, may_wake=bool(replica.url) and replica.may_have_served)


def used(token: AdminToken | None) -> tuple[str, ...]:
    """The rotations whose tokens may be taken, in the order in which they are tried."""
    if token is None:
        return (FIRST,)
    return (token.rotation,) if token.other is None else (token.rotation, token.other)


def in_secret(token: AdminToken | None) -> tuple[str, ...]:
    """The rotations whose tokens the Secret holds, a line each; who reads it takes the first."""
    if token is not None and token.phase == "Retiring":
        return (token.rotation,)
    return used(token)


def probed(token: AdminToken | None) -> str | None:
    """The rotation whose token each is to be asked with, and no other; None where nobody need be asked."""
    return token.other if token is not None and token.phase in ("Introducing", "Retiring") else None


def begin(kind: Kind, token: AdminToken | None, asked: str | None, now: dt.datetime) -> Step:
    """Begin a rotation where the annotation, None where there is none, has a value other than at the last one."""
    before = token or AdminToken()
    if asked is None or before.phase != "Current" or _name(asked) == before.rotation.partition("@")[0]:
        return Step(token)
    # With its time in the name, so that a value that was used before does not bring an old token back.
    other = f"{_name(asked)}@{now.astimezone(dt.UTC):%Y%m%dT%H%M%SZ}"
    text = f"a new {kind.token} is introduced; the old one is used until every {kind.taker} takes the new one"
    begun = AdminToken(rotation=before.rotation, other=other, phase="Introducing", since=timestamp(now))
    return Step(begun, "TokenRotating", text)


def advance(
    kind: Kind, token: AdminToken, takers: Iterable[Taker], held: str, overlap: float, now: dt.datetime
) -> Step:
    """The next step of a rotation under way.

    ``held``: what somebody does who may have read the old token; empty where nobody is at anything. ``overlap``: in
    seconds.
    """
    seconds = (now - parse_timestamp(token.since or timestamp(now))).total_seconds()
    if token.phase == "Overlapping":
        if seconds < overlap or held:
            late = held and seconds >= overlap
            return Step(_said(token, f"the old token is accepted until a change has ended: {held}" if late else ""))
        return Step(AdminToken(rotation=token.rotation, other=token.other, phase="Retiring", since=timestamp(now)))

    takers = sorted(takers, key=lambda each: each.name)
    waiting = [f"{each.name} ({each.reason or 'takes it'})" for each in takers if _holds_up(token, each, seconds)]
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
    refused = sum(each.reason == "Http401" for each in takers)
    proof = f"the old one is refused by each of the {refused} {kind.taker}s that answer"
    text = (
        f"the {kind.token} was rotated; {proof if refused else f'no {kind.taker} answers that could take the old one'}"
    )
    return Step(AdminToken(rotation=token.rotation, since=timestamp(now)), "TokenRotated", text)


def _holds_up(token: AdminToken, taker: Taker, seconds: float) -> bool:
    if token.phase == "Introducing" and (taker.terminating or not taker.reason):
        return False
    if token.phase == "Retiring" and taker.reason == "Http401":
        return False
    silent = taker.reason in ("Timeout", "Unreachable")
    return not silent or seconds < PATIENCE_SECONDS or (token.phase == "Introducing" and taker.may_wake)


def _said(token: AdminToken, message: str) -> AdminToken:
    return token.model_copy(update={"message": message[:1024]})


def _name(asked: str) -> str:
    """What a rotation is called: without an ``@``, and short."""
    name = quote(asked, safe=":+")
    return name if len(name) <= _NAME_LENGTH else hashlib.sha256(asked.encode()).hexdigest()[:32]
