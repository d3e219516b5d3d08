"""HTTP client of one engine's admin plane and of one pool's wiper (docs/engine-admin-api.md).

What a peer answers is data, not an exception: every call ends with an :class:`EngineStatus` or a reason, or with a
:class:`Result`. A call succeeds only when the body is a JSON object whose ``success`` is ``true``; an empty body, a
page of HTML and a 200 without the field are failures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from moontide.planning.model import Action, Collect, Command, EngineStatus, Fleet, Result, Wipe

T = TypeVar("T")
R = TypeVar("R")

STATUS_SECONDS = 3.0
"""A healthy engine answers its status in milliseconds; one that needs longer is not reset, whatever it says later."""
Token = str | tuple[str, ...]
"""A bearer token, or several of which the peer may know only one: the next is tried where one is refused."""
MARGIN_SECONDS = 2.0
"""How much longer than the engine's own bound the client waits, so that the engine's reason arrives."""


@dataclass(frozen=True)
class Unanswered:
    """No usable answer, and why."""

    reason: str
    message: str


def new_http_client() -> httpx.AsyncClient:
    """A client for admin planes: no proxies, no redirects, no retries (the next look decides), many connections."""
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        limits=httpx.Limits(max_connections=256, max_keepalive_connections=256),
    )


async def _json(
    http: httpx.AsyncClient, method: str, url: str, token: Token, seconds: float, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]] | Unanswered:
    try:
        async with asyncio.timeout(seconds):
            for each in (token,) if isinstance(token, str) else token:
                headers = {"authorization": f"Bearer {each}"}
                response = await http.request(method, url, json=body, headers=headers, timeout=seconds)
                # What was refused for its token did nothing, so it may be sent again with the next one.
                if response.status_code != 401:
                    break
    except (TimeoutError, httpx.TimeoutException):
        return Unanswered("Timeout", f"no answer from {url} within {seconds:.1f} s")
    except httpx.HTTPError as error:
        return Unanswered("Unreachable", f"{url}: {type(error).__name__}: {error}")
    if not response.content:
        return Unanswered("EmptyBody", f"{url} answered {response.status_code} with an empty body")
    try:
        parsed = response.json()
    except ValueError:
        return Unanswered("NotJson", f"{url} answered {response.status_code}: {response.text[:200]}")
    if not isinstance(parsed, dict):
        return Unanswered("NotJson", f"{url} answered {response.status_code} with a {type(parsed).__name__}")
    return response.status_code, parsed


def base_url(address: str) -> str:
    """Of an admin plane: ``address`` is ``host:port``, or a URL already."""
    return address if "://" in address else f"http://{address}"


async def engine_status(
    http: httpx.AsyncClient, address: str, token: Token, seconds: float = STATUS_SECONDS
) -> EngineStatus | Unanswered:
    """What the engine at ``address`` says of itself, within ``seconds``."""
    answer = await _json(http, "GET", f"{base_url(address)}/moontide/v1/status", token, seconds)
    if isinstance(answer, Unanswered):
        return answer
    code, body = answer
    if code != 200:
        return Unanswered(f"Http{code}", f"{address} answered {code}: {str(body)[:200]}")
    try:
        return EngineStatus.model_validate(body)
    except ValidationError as error:
        return Unanswered("NotAStatus", f"{address}: {error.error_count()} fields are missing or wrong: {error}"[:500])


def _result(action: Action, answer: tuple[int, dict[str, Any]] | Unanswered, started: float) -> Result:
    seconds = time.monotonic() - started
    if isinstance(answer, Unanswered):
        return Result(action, False, answer.reason, answer.message, seconds=seconds)
    code, body = answer
    success = code == 200 and body.get("success") is True
    reason = str(body.get("reason") or ("" if success else f"Http{code}"))
    message = str(body.get("message") or ("" if success else str(body)[:200]))
    removed = body.get("removed")
    return Result(action, success, reason, message, removed if isinstance(removed, int) else 0, seconds)


async def send(http: httpx.AsyncClient, command: Command, token: Token, term: int) -> Result:
    """One command to one engine, from the leader of ``term``.

    It takes at most ``timeout_seconds`` in the engine and :data:`MARGIN_SECONDS` around it.
    """
    started = time.monotonic()
    engine = command.replica.status
    if engine is None or command.replica.address is None:
        return Result(command, False, "Unreachable", "the engine did not answer its status")
    body: dict[str, Any] = {"term": term, "epoch": command.epoch, "bootId": engine.boot_id, **command.body}
    if command.step.value in ("quiesce", "drain", "reset", "resume", "fence", "load") or "salt" in command.body:
        body["timeoutSeconds"] = command.timeout_seconds
    url = f"{base_url(command.replica.address)}/moontide/v1/{command.step.value}"
    answer = await _json(http, "POST", url, token, command.timeout_seconds + MARGIN_SECONDS, body)
    return _result(command, answer, started)


async def wipe(http: httpx.AsyncClient, action: Wipe, url: str, token: str, term: int) -> Result:
    """Remove the fleet's keys, then verify: only a second removal that finds nothing proves it.

    ``url`` is the wiper's base, ``term`` this leader's: the wiper refuses lower ones. ``removed`` counts the keys of
    the first removal.
    """
    started = time.monotonic()
    body = {"term": term, "namespace": action.fleet.uid, "timeoutSeconds": action.timeout_seconds}
    seconds = action.timeout_seconds + MARGIN_SECONDS
    return await _twice(http, action, f"{url}/moontide/v1/wipe", token, seconds, body, started)


async def collect(http: httpx.AsyncClient, action: Collect, url: str, token: str, term: int) -> Result:
    """Remove the fleet's keys of epochs that are over, then verify: a second collection must find none.

    ``url`` and ``term``: see :func:`wipe`. ``removed`` counts the keys of the first. Keys in use are ``KeysLeft``: try
    again.
    """
    started = time.monotonic()
    body = {
        "term": term,
        "namespace": action.fleet.uid,
        "keep": list(action.keep),
        "timeoutSeconds": action.timeout_seconds,
    }
    seconds = action.timeout_seconds + MARGIN_SECONDS
    return await _twice(http, action, f"{url}/moontide/v1/collect", token, seconds, body, started)


async def _twice(
    http: httpx.AsyncClient,
    action: Wipe | Collect,
    url: str,
    token: str,
    seconds: float,
    body: dict[str, Any],
    started: float,
) -> Result:
    first = _result(action, await _json(http, "POST", url, token, seconds, body), started)
    if not first.success:
        return first
    answer = await _json(http, "POST", url, token, seconds, body)
    second = _result(action, answer, started)
    if not second.success:
        return replace(second, removed=first.removed)
    left = None if isinstance(answer, Unanswered) else answer[1].get("removed")
    if type(left) is not int or left != 0:
        text = f"a second removal still found {left} keys"
        return Result(action, False, "KeysLeft", text, first.removed, second.seconds)
    return Result(action, True, "Verified", "", first.removed, second.seconds)


async def fan_out(items: list[T], call: Callable[[T], Awaitable[R]], limit: int = 64) -> list[R]:
    """``call`` on each item, at most ``limit`` at once; results in the order of ``items``.

    Every call ends before this returns; then the first exception of any, in that order, is raised as it is. Cancelling
    it cancels every call in flight. No TaskGroup: one whose parent is cancelled while a child fails can leave a
    cancellation behind on Python 3.11, which then ends whatever the caller awaits next.
    """
    gate = asyncio.Semaphore(limit)

    async def one(item: T) -> R:
        async with gate:
            return await call(item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    good: list[R] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good


async def impatient(
    items: list[T], call: Callable[[T], Awaitable[R]], late: Callable[[T], R | None], patience: float
) -> list[R]:
    """``call`` on each item side by side; results in the order of ``items``.

    Once a first call has ended, the others have ``patience`` seconds left; then each is cancelled and has the result
    ``late(item)``, or is waited for all the same where that is None. What a peer was told it goes on with: every call
    must be one that may be repeated. The first exception of any call, in that order, is raised when all have ended.
    """
    tasks = [asyncio.ensure_future(call(item)) for item in items]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=patience)
        instead = {task: late(item) for item, task in zip(items, tasks, strict=True) if not task.done()}
        for task, result in instead.items():
            if result is not None:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    good: list[R] = []
    for task, outcome in zip(tasks, results, strict=True):
        substitute = instead.get(task)
        if isinstance(outcome, asyncio.CancelledError) and substitute is not None:
            good.append(substitute)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            good.append(outcome)
    return good


def wipe_without_store(action: Wipe | Collect, fleet: Fleet) -> Result:
    """The result for a fleet whose removal needs no call: it has no pool, or the pool it names is missing."""
    if fleet.pool is None:
        return Result(action, True, "NoStore", "the fleet keeps local caches only")
    return Result(action, False, "PoolNotFound", f"KVCachePool {fleet.pool} does not exist, so nothing can be verified")
