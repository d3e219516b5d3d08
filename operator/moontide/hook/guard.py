"""Who may do what through the hook: the API server decides, and what it allows is remembered for seconds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moontide.errors import InvalidSpec, Retry
from moontide.hook.errors import Refusal, unavailable
from moontide.kube.reviews import Right, User

logger = logging.getLogger(__name__)

CHANGE = "bump"
"""A verb of the hook's own on PolicyVersions: whoever has it may change what the hook changes, and nothing else of a
spec."""
KEEP_SECONDS = 5.0
_MEMORY = 1024
_AT_ONCE = 16
"""Reviews under way: strangers may send tokens as fast as they like."""


class Asked(Protocol):
    """:class:`moontide.kube.reviews.Reviews`."""

    async def whose(self, token: str, audience: str) -> User | str: ...

    async def may(self, user: User, right: Right) -> bool: ...


@dataclass
class _Known:
    """One token's user and rights, each with the end of its time."""

    user: User
    until: float
    rights: dict[Right, float] = field(default_factory=dict)


class Guard:
    """Lets requests pass, or raises :class:`Refusal`.

    What is allowed is remembered for seconds; a refusal is not, and forgets all that its token was allowed.
    """

    def __init__(
        self,
        reviews: Asked,
        audience: str,
        keep_seconds: float = KEEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reviews = reviews
        self._audience = audience
        self._keep = keep_seconds
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)

    async def user(self, header: str | None) -> User:
        """Whose the request with this Authorization header is. Raises Refusal: 401, 503."""
        token = _token(header)
        advice = f"make one with: kubectl create token SERVICEACCOUNT -n NAMESPACE --audience {self._audience}"
        challenge = f'Bearer realm="{self._audience}"'
        if not token:
            text = f"a bearer token is missing: send `Authorization: Bearer TOKEN`; {advice}"
            raise Refusal(401, "Unauthorized", text, {"WWW-Authenticate": challenge})
        key = _key(token)
        known = self._known.get(key)
        if known is not None and self._clock() < known.until:
            return known.user
        self._known.pop(key, None)
        try:
            async with self._turn:
                found = await self._reviews.whose(token, self._audience)
        except (Retry, InvalidSpec) as error:
            raise _unasked(error) from error
        if isinstance(found, str):
            said = f" ({found})" if found else ""
            text = f"the token is not one for {self._audience}, or has expired{said}; {advice}"
            raise Refusal(401, "Unauthorized", text, {"WWW-Authenticate": f'{challenge}, error="invalid_token"'})
        if len(self._known) >= _MEMORY:
            self._known.pop(next(iter(self._known)))
        self._known[key] = _Known(found, self._clock() + self._keep)
        return found

    async def refused(self, header: str | None, *rights: Right) -> str:
        """Why the request's user has none of these rights, and what to write; empty: one is theirs. Raises Refusal.

        They are verbs on one object, the narrowest last.
        """
        user = await self.user(header)
        key = _key(_token(header))
        known = self._known.get(key)
        if known is not None and any(self._clock() < known.rights.get(right, 0.0) for right in rights):
            return ""
        for right in rights:
            try:
                async with self._turn:
                    allowed = await self._reviews.may(user, right)
            except (Retry, InvalidSpec) as error:
                raise _unasked(error) from error
            if allowed:
                if known is not None and known is self._known.get(key):
                    known.rights[right] = self._clock() + self._keep
                return ""
        self._known.pop(key, None)
        nor = "".join(f", nor {right.verb} it" for right in rights[1:])
        return f"{user.name} may not {rights[0]}{nor}; {_role(user, rights[-1])}"

    async def require(self, header: str | None, *wanted: Right | tuple[Right, ...]) -> User:
        """The request's user, who has all of these rights; of several in one, any. Raises Refusal: 401, 403, 503."""
        user = await self.user(header)
        for each in wanted:
            rights = each if isinstance(each, tuple) else (each,)
            right, why = rights[-1], await self.refused(header, *rights)
            if why:
                resource = f"{right.resource}/{right.namespace}/{right.name}"
                logger.info("refused", extra={"user": user.name, "verb": right.verb, "resource": resource})
                raise Refusal(403, "Forbidden", why)
        return user


def _token(header: str | None) -> str:
    kind, _, token = (header or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _unasked(error: Retry | InvalidSpec) -> Refusal:
    logger.warning("the API server cannot be asked who may do what: %s", error)
    seconds = error.after if isinstance(error, Retry) else 10.0
    return unavailable("the API server cannot be asked who you are and what you may; try again", seconds)


def _role(user: User, right: Right) -> str:
    """The commands that give the right."""
    where = f"-n {right.namespace}"
    resource = f"{right.resource}.{right.group}" if right.group else right.resource
    verbs = "get" if right.resource == "secrets" else f"get,{'patch' if right.verb == 'patch' else CHANGE}"
    name = f"moontide-trainer-{right.resource}"
    role = f"kubectl create role {name} {where} --verb={verbs} --resource={resource} --resource-name={right.name}"
    parts: Sequence[str] = user.name.split(":")
    account = len(parts) == 4 and parts[:2] == ["system", "serviceaccount"]
    subject = f"--serviceaccount={parts[2]}:{parts[3]}" if account else f"--user={shlex.quote(user.name)}"
    return f"write a Role and bind it: {role} && kubectl create rolebinding {name} {where} --role={name} {subject}"
