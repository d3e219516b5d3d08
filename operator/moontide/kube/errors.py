"""What the API server's refusals mean to a reconcile."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
from kubernetes.aio.client.exceptions import ApiException

from moontide.errors import InvalidSpec, Retry

T = TypeVar("T")

CONFLICT_SECONDS = 1.0
UNAVAILABLE_SECONDS = 2.0
FORBIDDEN_SECONDS = 5.0
"""An API server that has just started forbids for a moment what it will allow."""


_NO_SUCH_FIELD = "failed to create typed patch object"
"""How server-side apply refuses an unknown field or a wrong type; it answers 500, and for ever."""

_NO_SUCH_NAME = "Name parameter invalid"
"""How the API server refuses to look for a name with a slash or a percent sign."""


def message_of(error: ApiException) -> str:
    """The sentence of the API server's Status object, or the HTTP reason where there is none."""
    try:
        body = json.loads(error.body or "")
    except ValueError:
        return str(error.reason)
    return str(body.get("message") or error.reason) if isinstance(body, dict) else str(error.reason)


def _retry_after(error: ApiException) -> float:
    raw = (error.headers or {}).get("Retry-After", "")
    return float(raw) if raw.isdigit() and int(raw) > 0 else UNAVAILABLE_SECONDS


@contextmanager
def mapped(what: str) -> Iterator[None]:
    """Turn a failed request into :class:`Retry` or :class:`InvalidSpec`; ``what`` begins the reason.

    400 and 422 mean that the spec asks for an object the API server does not take: waiting does not help. So does 500
    for a patch that is no object of its kind.
    Everything else may pass: 409 after a second, 429 after what the server asks, 401 and 403 after a
    few seconds (a quota, a namespace that is being deleted, missing rights), server and connection errors soon.
    """
    try:
        yield
    except ApiException as error:
        reason = f"{what}: {error.status} {message_of(error)}"
        if error.status in (400, 422) or (error.status == 500 and _NO_SUCH_FIELD in reason):
            raise InvalidSpec("RefusedByApiServer", reason) from error
        if error.status == 409:
            raise Retry(CONFLICT_SECONDS, reason) from error
        if error.status in (401, 403):
            raise Retry(FORBIDDEN_SECONDS, reason) from error
        raise Retry(_retry_after(error), reason) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Retry(UNAVAILABLE_SECONDS, f"{what}: {type(error).__name__} {error}".rstrip()) from error


async def found_or_none(what: str, asked: Awaitable[T]) -> T | None:
    """What a request about one object answers, or None when there is no such object, or can be none of that name; else
    as :func:`mapped`."""
    with mapped(what):
        try:
            return await asked
        except ApiException as error:
            if error.status == 404 or (error.status == 400 and _NO_SUCH_NAME in message_of(error)):
                return None
            raise
