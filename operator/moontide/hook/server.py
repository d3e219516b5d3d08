"""The hook's HTTP server. Every replica of the operator has one: it reads and writes PolicyVersions and no more, so it
needs no leadership (docs/decisions/2026-11-28-trainer-hook.md)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp.web
from kubernetes.aio import client as k8s

from moontide.api.v1alpha1 import GROUP
from moontide.config import Config
from moontide.errors import InvalidSpec, Retry
from moontide.hook.carrier import Carrier
from moontide.hook.errors import BUSY_SECONDS, Refusal, refusal_of, unavailable
from moontide.hook.guard import CHANGE, Guard
from moontide.hook.requests import LONGEST_WAIT, VERBS, Wait, body_of, patch_of, shown, wait_of
from moontide.kube import tokens
from moontide.kube.client import Kube
from moontide.kube.kinds import POLICY
from moontide.kube.reviews import Reviews, Right, User
from moontide.naming import admin_secret
from moontide.planning import rotation
from moontide.trainer import verbs
from moontide.trainer.errors import CommitTimeout, MoontideError, PrepareTimeout, Superseded
from moontide.trainer.policy import Object, Policy
from moontide.trainer.steps import Steps, Target, change, look_again, read, until_current, until_prepared

logger = logging.getLogger(__name__)

BODY_BYTES = 16 * 1024
BODY_SECONDS = 10.0
CHANGE_SECONDS = 10.0
MOST_WAITING = 256
TLS_SECONDS = 30.0
"""How often a certificate is looked at: whoever renews it replaces the files."""

_AGES = 1e9

Count = Callable[[str, int], None]
Handler = Callable[[aiohttp.web.Request], Awaitable[aiohttp.web.StreamResponse]]


class Hook:
    """The routes, over an API server."""

    def __init__(
        self,
        api: k8s.ApiClient,
        guard: Guard,
        config: Config,
        count: Count = lambda verb, status: None,
    ) -> None:
        self._kube = Kube(api)
        self._guard = guard
        self._config = config
        self._count = count
        self._closing = asyncio.Event()
        self._carrier = Carrier(api, self._closing)
        self._tokens: tokens.Tokens | None = None
        self._waiting = 0

    def app(self) -> aiohttp.web.Application:
        """The application."""
        app = aiohttp.web.Application(client_max_size=BODY_BYTES, middlewares=[self._answered])
        path = "/hook/v1/namespaces/{namespace}/policies/{name}"
        app.router.add_get(path, self._get, allow_head=False)
        app.router.add_patch(path, self._patch)
        app.router.add_post(f"{path}/{{verb}}", self._post)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, _: aiohttp.web.Application) -> None:
        self._closing.set()

    @aiohttp.web.middleware
    async def _answered(self, request: aiohttp.web.Request, handler: Handler) -> aiohttp.web.StreamResponse:
        """Every answer is JSON, and is counted."""
        verb = request.match_info.get("verb", request.method.lower())
        known = verb in VERBS or verb in ("get", "patch")
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = _refused(refusal)
        except MoontideError as error:
            response = _refused(refusal_of(error, request.match_info.get("name", "")))
        except aiohttp.web.HTTPRequestEntityTooLarge:
            response = _refused(Refusal(413, "TooLarge", f"a body has {BODY_BYTES} bytes at most"))
        except aiohttp.web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}; the routes are in docs/trainers.md"
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = _refused(Refusal(error.status, error.reason.replace(" ", ""), text, allow))
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            text = "the hook has failed, and the operator's log says how; what was asked may have been done: look again"
            response = _refused(Refusal(500, "InternalError", text))
        self._count(verb if known else "other", response.status)
        response.headers["Cache-Control"] = "no-store"
        return response

    async def _get(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        target, wait = self._target(request), wait_of(request.query)
        await self._allow(request, target, "get")
        policy = await self._carrier.run(read(target, target.clock()))
        reached = True
        if wait.seconds > 0:
            if self._waiting >= MOST_WAITING:
                text = f"{MOST_WAITING} requests are waiting here already; ask again, or without wait"
                raise Refusal(429, "TooManyRequests", text, {"Retry-After": str(BUSY_SECONDS)})
            policy, reached = await self._waited(request, target, policy, wait)
        return await self._state(request, policy, reached)

    async def _patch(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        target = self._target(request)
        user = await self._allow(request, target, "get", ("patch", CHANGE))
        verb, body = patch_of(await _sent(request))
        revision = (body.get("metadata") or {}).get("resourceVersion")
        seen = Policy({"metadata": {"resourceVersion": revision}}) if revision is not None else None
        # One attempt: whoever sent it looks again and decides again.
        steps = change(target, body.get("spec") or {}, target.clock(), seen=seen)
        done = await self._carrier.run(steps, lambda spec: _log(target, user, verb, spec))
        if done is None:
            raise Refusal(409, "Conflict", f"{target} is no longer at resourceVersion {revision}; look at it again")
        return aiohttp.web.json_response(shown(done.body))

    async def _post(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        target, verb, wait = self._target(request), request.match_info["verb"], wait_of(request.query)
        user = await self._allow(request, target, "get", ("patch", CHANGE))
        body = body_of(verb, await _sent(request))
        steps = _steps(target, verb, body, target.clock() + CHANGE_SECONDS)
        await self._carrier.run(steps, lambda spec: _log(target, user, verb, spec))
        policy = await self._carrier.run(read(target, target.clock()))
        reached = wait.seconds == 0
        # The change is made; whoever cannot wait here is told that it is under way.
        if wait.seconds > 0 and self._waiting < MOST_WAITING:
            goal = Wait(wait.seconds, goal="prepared" if verb == "prepare" else "current")
            policy, reached = await self._waited(request, target, policy, goal)
        return await self._state(request, policy, reached)

    def _target(self, request: aiohttp.web.Request) -> Target:
        found = request.match_info
        return Target(found["namespace"], found["name"], clock=self._clock, patience=LONGEST_WAIT)

    def _clock(self) -> float:
        """Seconds; every wait is over once the process is about to end."""
        return time.monotonic() + (_AGES if self._closing.is_set() else 0.0)

    async def _allow(self, request: aiohttp.web.Request, target: Target, *wanted: str | tuple[str, ...]) -> User:
        """The user, who may do all of these to the policy; of several verbs in one, any. Raises Refusal."""
        header = request.headers.get("Authorization")

        def right(verb: str) -> Right:
            return Right(verb, GROUP, POLICY.plural, target.namespace, target.name)

        rights = (right(each) if isinstance(each, str) else tuple(map(right, each)) for each in wanted)
        user = await self._guard.require(header, *rights)
        only = self._config.watch_namespace
        if only and target.namespace != only:
            raise Refusal(404, "NotFound", f"this operator serves namespace {only}; name a policy of it")
        return user

    async def _waited(
        self, request: aiohttp.web.Request, target: Target, policy: Policy, wait: Wait
    ) -> tuple[Policy, bool]:
        """The policy when what is waited for has come, and True; or as it is when the time is over, and False."""
        self._waiting += 1
        try:
            found = await self._carrier.run(_until(target, policy, wait, target.clock() + wait.seconds))
        finally:
            self._waiting -= 1
        # What was allowed before the wait need not be so after it.
        await self._allow(request, target, "get")
        return found

    async def _state(self, request: aiohttp.web.Request, policy: Policy, reached: bool) -> aiohttp.web.Response:
        """The policy, with its engines' tokens when weights may be pushed. 202: what was waited for has not come."""
        found = shown(policy.body)
        if found["prepared"]:
            ready = policy.preparation.get("fleets") or ()
            fleets = [await self._with_token(request, policy.namespace, each) for each in ready]
            found["status"] = {**policy.status, "preparation": {**policy.preparation, "fleets": fleets}}
        return aiohttp.web.json_response(found, status=200 if reached else 202)

    async def _with_token(self, request: aiohttp.web.Request, namespace: str, fleet: Object) -> Object:
        """A fleet of a preparation with its ``token``, or with ``tokenRefused``. Raises Refusal."""
        where, name, secret = str(fleet.get("namespace") or namespace), str(fleet["name"]), str(fleet["tokenSecret"])
        why = await self._guard.refused(
            request.headers.get("Authorization"), Right("get", "", "secrets", where, secret)
        )
        if not why and secret != admin_secret(name):
            why = f"the operator did not make Secret {where}/{secret}, and may not read it; read it yourself"
        if why:
            return {**fleet, "tokenRefused": why}
        try:
            if self._tokens is None:
                self._tokens = await tokens.load(self._kube, self._config.namespace)
            if self._tokens is None:
                raise Retry(2.0, "there is no root key yet")
            found = await self._kube.get_deployment(where, name)
        except (Retry, InvalidSpec) as error:
            logger.warning("no token for fleet %s/%s: %s", where, name, error)
            raise unavailable(f"the token of fleet {where}/{name} cannot be had now; try again") from error
        if found is None:
            return {**fleet, "tokenRefused": f"there is no InferenceDeployment {where}/{name} any more"}
        state = found.model.status.admin_token if found.model.status is not None else None
        return {**fleet, "token": self._tokens.derive(found.meta.uid, rotation.used(state)[0])}


def _steps(target: Target, verb: str, body: Object, until: float) -> Steps[object]:
    version = body.get("version")
    if verb == "bump":
        return verbs.bump(target, body["version"], until)
    if verb == "prepare":
        return verbs.prepare(target, body["version"], until)
    if verb == "commit":
        return verbs.commit(target, until, version)
    if verb == "abort":
        return verbs.abort(target, until, version)
    return verbs.reset(target, body.get("nonce") or verbs.new_nonce(), until)


def _until(target: Target, policy: Policy, wait: Wait, until: float) -> Steps[tuple[Policy, bool]]:
    """The policy, and whether what is waited for has come."""
    try:
        if wait.goal == "prepared":
            return (yield from until_prepared(target, verbs.preparing(target, policy), until)), True
        if wait.goal == "current":
            return (yield from until_current(target, str(policy.version), until)), True
    except (PrepareTimeout, CommitTimeout, Superseded):
        return (yield from read(target, target.clock())), False
    after = wait.after or policy.resource_version
    while policy.resource_version == after and target.clock() < until:
        policy = yield from look_again(target, policy, until)
    return policy, policy.resource_version != after


def _log(target: Target, user: User, verb: str, spec: Object) -> None:
    said = ", ".join(f"spec.{key} is {'empty' if value is None else value}" for key, value in spec.items())
    resource = f"{POLICY.kind}/{target.namespace}/{target.name}"
    logger.info("changed: %s", said, extra={"resource": resource, "user": user.name, "verb": verb})


def _refused(refusal: Refusal) -> aiohttp.web.Response:
    return aiohttp.web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers)


async def _sent(request: aiohttp.web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise Refusal(408, "Timeout", f"the body did not come within {BODY_SECONDS:.0f} s") from error


class Certificate:
    """A server's certificate, read again when its files have changed."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError where it cannot be used."""
        self._files = folder / "tls.crt", folder / "tls.key"
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._digest = b""
        self.look()

    def look(self) -> bool:
        """Read it where it is another one. Whether it was. Raises ValueError."""
        try:
            digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in self._files)).digest()
            if digest == self._digest:
                return False
            # A context whose load fails midway has lost what it had.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*self._files)
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{self._files[0]} and tls.key are no certificate and key: {error}") from error
        self._digest = digest
        return True

    async def keep(self) -> None:
        """Look at it again and again."""
        while True:
            await asyncio.sleep(TLS_SECONDS)
            try:
                if self.look():
                    logger.info("the hook's certificate was replaced")
            except ValueError as error:
                logger.warning("the hook goes on with its old certificate: %s", error)


@contextlib.asynccontextmanager
async def serving(config: Config, count: Count) -> AsyncIterator[None]:
    """Serve the hook, where the configuration says so. Raises ValueError for a certificate that cannot be used."""
    if not config.hook_port:
        yield
        return
    certificate = Certificate(Path(config.hook_tls)) if config.hook_tls else None
    async with k8s.ApiClient() as api:
        hook = Hook(api, Guard(Reviews(api), config.hook_audience), config, count)
        runner = aiohttp.web.AppRunner(hook.app(), handle_signals=False, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        watching = asyncio.create_task(certificate.keep()) if certificate else None
        try:
            context = certificate.context if certificate else None
            await aiohttp.web.TCPSite(runner, "0.0.0.0", config.hook_port, ssl_context=context).start()
            yield
        finally:
            if watching is not None:
                watching.cancel()
            await runner.cleanup()
