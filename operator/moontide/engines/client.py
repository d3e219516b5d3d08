"""HTTP client of one engine's admin plane and of one pool's wiper (docs/engine-admin-api.md).

What a peer answers is data, not an exception: every call ends with an :class:`EngineStatus` or a reason, or with a
:class:`Result`. A call succeeds only when the body is a JSON object whose ``success`` is ``true``; an empty body, a
page of HTML and a 200 without the field are failures.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from moontide.engines import tls
from moontide.engines.wire import Request, Session
from moontide.errors import Retry
from moontide.planning.model import Action, Collect, Command, EngineStatus, Fleet, Result, Step, Wipe

T = TypeVar("T")
R = TypeVar("R")

CALLS_AT_ONCE = 2048
"""A limit for the machine's sake: replicas that answer wait for none that does not."""
STATUS_SECONDS = 3.0
"""A healthy engine answers its status in milliseconds; one that needs longer is not reset, whatever it says later."""
_BOUNDED = frozenset({Step.QUIESCE, Step.DRAIN, Step.RESET, Step.RESUME, Step.FENCE, Step.LOAD})
"""Steps that take their bound; an admission takes one where it does more than to note something."""
Token = str | tuple[str, ...]
"""A bearer token, or several of which the peer may know only one: the next is tried where one is refused."""
OWN_FAULT = "TooManyFiles"
"""Why there was no answer: nobody was asked. It says nothing of the peer."""
OWN_FAULT_SECONDS = 5.0
"""Until it is tried again."""
MARGIN_SECONDS = 2.0
"""How much longer than the engine's own bound the client waits, so that the engine's reason arrives."""


@dataclass(frozen=True)
class Unanswered:
    """No usable answer, and why."""

    reason: str
    message: str


def new_http_client(authorities: str = "") -> Session:
    """A client for admin planes. Must be made where a loop runs. ``authorities``: see
    :class:`moontide.engines.tls.Trust`.
    """
    return Session(tls.Trust(authorities))


async def _json(
    http: Session,
    method: str,
    url: str,
    token: Token,
    seconds: float,
    body: dict[str, Any] | None = None,
    server_name: str = "",
) -> tuple[int, dict[str, Any]] | Unanswered:
    data = None if body is None else to_json(body)
    status, text = 0, b""
    try:
        async with asyncio.timeout(seconds):
            for each in (token,) if isinstance(token, str) else token:
                status, text = await http.ask(method, url, _headers(each, data), data, server_name)
                # What was refused for its token did nothing, so it may be sent again with the next one.
                if status != 401:
                    break
    except TimeoutError:
        return Unanswered("Timeout", f"no answer from {url} within {seconds:.1f} s")
    except (OSError, ValueError) as error:
        if (fault := _not_asked(error, url)) is not None:
            return fault
        distrusted = tls.refusal(error, url, server_name)
        if distrusted is not None:
            return Unanswered(tls.REASON, distrusted)
        return Unanswered("Unreachable", f"{url}: {type(error).__name__}: {error}")
    if not text:
        return Unanswered("EmptyBody", f"{url} answered {status} with an empty body")
    try:
        parsed = from_json(text)
    except ValueError:
        return Unanswered("NotJson", f"{url} answered {status}: {text[:200].decode(errors='replace')}")
    if not isinstance(parsed, dict):
        return Unanswered("NotJson", f"{url} answered {status} with a {type(parsed).__name__}")
    return status, parsed


def _headers(token: str, data: bytes | None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {token}"}
    if data is not None:
        headers["content-type"] = "application/json"
    return headers


async def fetch(http: Session, url: str, seconds: float) -> tuple[int, str] | Unanswered:
    """Status and text of a page that needs no token, as a master's, within ``seconds``. Raises
    :class:`moontide.errors.Retry` where the operator may open no more files: that says nothing of a master."""
    try:
        async with asyncio.timeout(seconds):
            status, text = await http.ask("GET", url, {})
    except TimeoutError:
        return Unanswered("Timeout", f"no answer from {url} within {seconds:.1f} s")
    except (OSError, ValueError) as error:
        if (fault := _not_asked(error, url)) is not None:
            refuse_own_fault([fault])
        return Unanswered("Unreachable", f"{url}: {type(error).__name__}")
    return status, text.decode(errors="replace")


def base_url(address: str) -> str:
    """Of an admin plane: ``address`` is ``host:port``, or a URL already."""
    return address if "://" in address else f"http://{address}"


async def engine_status(
    http: Session, address: str, token: Token, seconds: float = STATUS_SECONDS, server_name: str = ""
) -> EngineStatus | Unanswered:
    """What the engine at ``address`` says of itself, within ``seconds``. ``server_name``: see
    :class:`moontide.planning.model.Replica`."""
    url = f"{base_url(address)}/moontide/v1/status"
    answer = await _json(http, "GET", url, token, seconds, server_name=server_name)
    if isinstance(answer, Unanswered):
        return answer
    return status_of(address, *answer)


def status_of(address: str, code: int, body: dict[str, Any]) -> EngineStatus | Unanswered:
    """What an answer to ``GET /moontide/v1/status`` says. ``address``: for people."""
    if code != 200:
        return Unanswered(f"Http{code}", f"{address} answered {code}: {str(body)[:200]}")
    try:
        return EngineStatus.model_validate(body)
    except ValidationError as error:
        return Unanswered("NotAStatus", f"{address}: {error.error_count()} fields are missing or wrong: {error}"[:500])


def _not_asked(error: Exception, url: str) -> Unanswered | None:
    """The operator's own fault, where it is one."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return Unanswered(OWN_FAULT, f"the operator may open no more files, so {url} was not asked")
    return None


def refuse_own_fault(answers: Iterable[EngineStatus | Unanswered]) -> None:
    """Raises :class:`moontide.errors.Retry` where somebody was not asked: an engine must not count as silent then."""
    for answer in answers:
        if isinstance(answer, Unanswered) and answer.reason == OWN_FAULT:
            raise Retry(
                OWN_FAULT_SECONDS, f"{answer.message}: give the operator's containers a higher limit of open files"
            )


async def wiper_refusal(
    http: Session, url: str, token: Token, seconds: float = STATUS_SECONDS, server_name: str = ""
) -> str:
    """Why the wiper at ``url`` did not take the token, as one word; empty where it took it.

    It is asked to count the keys of no namespace. To whoever has a token that is a bad request, in every release.
    """
    answer = await _json(http, "GET", f"{url}/moontide/v1/keys", token, seconds, server_name=server_name)
    if isinstance(answer, Unanswered):
        return answer.reason
    return "" if answer[0] == 400 else f"Http{answer[0]}"


def _said(body: dict[str, Any]) -> EngineStatus | None:
    """The status that comes with the answer to a command; wipers and engines with an older plugin send none."""
    try:
        return EngineStatus.model_validate(body["status"])
    except (KeyError, ValidationError):
        return None


def _result(action: Action, answer: tuple[int, dict[str, Any]] | Unanswered, started: float) -> Result:
    seconds = time.monotonic() - started
    if isinstance(answer, Unanswered):
        return Result(action, False, answer.reason, answer.message, seconds=seconds)
    code, body = answer
    success = code == 200 and body.get("success") is True
    reason = str(body.get("reason") or ("" if success else f"Http{code}"))
    message = str(body.get("message") or ("" if success else str(body)[:200]))
    removed = body.get("removed")
    status = _said(body) if success else None
    return Result(action, success, reason, message, removed if isinstance(removed, int) else 0, seconds, status)


def _call(command: Command, term: int) -> tuple[str, dict[str, Any]] | None:
    """URL and body of a command; None where its engine said nothing of itself."""
    engine = command.replica.status
    if engine is None or command.replica.address is None:
        return None
    body: dict[str, Any] = {"term": term, "epoch": command.epoch, "bootId": engine.boot_id, **command.body}
    if command.step in _BOUNDED or command.body.keys() & {"salt", "resume"}:
        body["timeoutSeconds"] = command.timeout_seconds
    return f"{base_url(command.replica.address)}/moontide/v1/{command.step.value}", body


def _request(command: Command, token: Token, term: int) -> Request | None:
    """What :func:`send` asks first."""
    call = _call(command, term)
    if call is None:
        return None
    data = to_json(call[1])
    return Request("POST", call[0], _headers(token if isinstance(token, str) else token[0], data), data)


def prepare(http: Session, commands: Sequence[Command], token: Token, term: int) -> None:
    """Send the engine of ``commands`` what it will probably be told, one after the other, but for the last byte of each
    (see :meth:`moontide.engines.wire.Session.prepare`). It does none of it before :func:`send` is called with it, which
    also says why something cannot be sent."""
    requests = [request for each in commands if (request := _request(each, token, term)) is not None]
    if len(requests) == len(commands):
        with suppress(OSError, ValueError):
            http.prepare(*requests, server_name=commands[0].replica.server_name)


def begin(http: Session, command: Command, token: Token, term: int) -> None:
    """Have the engine do ``command`` at once, if it was prepared; :func:`send` has to follow, with the same."""
    request = _request(command, token, term)
    if request is not None:
        with suppress(OSError, ValueError):
            http.begin(request, command.replica.server_name)


async def send(http: Session, command: Command, token: Token, term: int) -> Result:
    """One command to one engine, from the leader of ``term``.

    It takes at most ``timeout_seconds`` in the engine and :data:`MARGIN_SECONDS` around it.
    """
    started = time.monotonic()
    call = _call(command, term)
    if call is None:
        return Result(command, False, "Unreachable", "the engine did not answer its status")
    seconds = command.timeout_seconds + MARGIN_SECONDS
    answer = await _json(http, "POST", call[0], token, seconds, call[1], command.replica.server_name)
    return _result(command, answer, started)


async def wipe(http: Session, action: Wipe, url: str, token: Token, term: int) -> Result:
    """Remove the fleet's keys, then verify: only a second removal that finds nothing proves it.

    ``url`` is the wiper's base, ``term`` this leader's: the wiper refuses lower ones. ``removed`` counts the keys of
    the first removal.
    """
    started = time.monotonic()
    body = {"term": term, "namespace": action.fleet.uid, "timeoutSeconds": action.timeout_seconds}
    seconds = action.timeout_seconds + MARGIN_SECONDS
    return await _twice(http, action, f"{url}/moontide/v1/wipe", token, seconds, body, started)


async def collect(http: Session, action: Collect, url: str, token: Token, term: int) -> Result:
    """Remove the fleet's keys of epochs that are over, then verify: a collection must find none.

    ``url`` and ``term``: see :func:`wipe`. ``removed`` counts the keys of the first. Keys in use, and those that a call
    has no time for, are ``KeysLeft``: try again. The wiper goes on where that call stopped, so a first collection that
    finds none is the second of one that had no time left.
    """
    started = time.monotonic()
    body = {
        "term": term,
        "namespace": action.fleet.uid,
        "keep": list(action.keep),
        "timeoutSeconds": action.timeout_seconds,
    }
    seconds = action.timeout_seconds + MARGIN_SECONDS
    return await _twice(http, action, f"{url}/moontide/v1/collect", token, seconds, body, started, once_if_none=True)


async def _twice(
    http: Session,
    action: Wipe | Collect,
    url: str,
    token: Token,
    seconds: float,
    body: dict[str, Any],
    started: float,
    *,
    once_if_none: bool = False,
) -> Result:
    answer = await _json(http, "POST", url, token, seconds, body)
    first = _result(action, answer, started)
    if not first.success:
        return first
    if not (once_if_none and _removed(answer) == 0):
        answer = await _json(http, "POST", url, token, seconds, body)
    second = _result(action, answer, started)
    if not second.success:
        return replace(second, removed=first.removed)
    left = _removed(answer)
    if left != 0:
        text = f"a second removal still found {left} keys"
        return Result(action, False, "KeysLeft", text, first.removed, second.seconds)
    return Result(action, True, "Verified", "", first.removed, second.seconds)


def _removed(answer: tuple[int, dict[str, Any]] | Unanswered) -> int | None:
    """How many keys a removal took; None where it does not say."""
    removed = None if isinstance(answer, Unanswered) else answer[1].get("removed")
    return removed if type(removed) is int else None


async def fan_out(items: list[T], call: Callable[[T], Awaitable[R]], limit: int = CALLS_AT_ONCE) -> list[R]:
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


async def settled(tasks: Sequence[asyncio.Future[R]], patience: float) -> None:
    """Wait for ``tasks``: until all have ended, or, once a first has, until none has for ``patience`` seconds.

    Ends none of them, and raises nothing of theirs.
    """
    left = sum(not task.done() for task in tasks)
    if not left:
        return
    loop = asyncio.get_running_loop()
    over, last = asyncio.Event(), loop.time() if left < len(tasks) else None

    def ended(_: object) -> None:
        nonlocal left, last
        left, last = left - 1, loop.time()
        over.set()

    waited = [task for task in tasks if not task.done()]
    for task in waited:
        task.add_done_callback(ended)
    try:
        while left:
            over.clear()
            remaining = None if last is None else last + patience - loop.time()
            if remaining is not None and remaining <= 0:
                return
            try:
                async with asyncio.timeout(remaining):
                    await over.wait()
                    # One look serves many ends.
                    await asyncio.sleep(0)
            except TimeoutError:
                continue
    finally:
        for task in waited:
            task.remove_done_callback(ended)


async def impatient(
    items: list[T],
    call: Callable[[T], Awaitable[R]],
    late: Callable[[T], R | None],
    patience: float,
    begin: AbstractContextManager[None] | None = None,
) -> list[R]:
    """``call`` on each item side by side; results in the order of ``items``. All of them begin within ``begin``.

    Once none of the calls has ended for ``patience`` seconds after another, each of those left is cancelled and has the
    result ``late(item)``, or is waited for all the same where that is None. What a peer was told it goes on with: every
    call must be one that may be repeated. The first exception of any call, in that order, is raised when all have
    ended.
    """
    tasks = [asyncio.ensure_future(call(item)) for item in items]
    try:
        with begin or nullcontext():
            await asyncio.sleep(0)
        await settled(tasks, patience)
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
