"""The composition root: waits for the Lease, then makes the clients and the loops and runs them until told to stop.

A standby answers its probes and writes nothing. A leader that lost its Lease ends the process at once: what it had in
hand belongs to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import aiohttp.web
import kopf
from kopf._cogs.structs.references import Insights
from kubernetes.aio import client as k8s
from kubernetes.aio import config as kube_config
from prometheus_client import generate_latest

from moontide.config import Config
from moontide.engines.client import new_http_client
from moontide.errors import InvalidSpec, Retry
from moontide.handlers import observe
from moontide.handlers.loops import Key, Loops
from moontide.handlers.routes import Routes
from moontide.hook import server as hook
from moontide.kube import tokens
from moontide.kube.client import GuardedClient, Kube
from moontide.kube.kinds import DEPLOYMENT, KINDS, POLICY, POOL
from moontide.kube.lease import KubeLease
from moontide.kube.sight import Key as ObjectKey
from moontide.kube.sight import Seen, Sight
from moontide.kube.watched import WatchedKube
from moontide.leader import Identity, Leader
from moontide.metrics import Metrics
from moontide.reconcile import glance, inferencedeployment, kvcachepool, policyversion
from moontide.reconcile.context import Context

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_LOST = 3
"""Exit status of a leader that lost its Lease."""

REPAIR_RESYNCS = 5
"""Resyncs after which what is not watched, such as a Secret, is applied again: who runs has what it needs of it, and
for who starts it is applied at once."""

Reconcile = Callable[[Context, str, str], Awaitable[float]]

RECONCILES: dict[str, Reconcile] = {
    POOL.kind: kvcachepool.reconcile,
    DEPLOYMENT.kind: inferencedeployment.reconcile,
    POLICY.kind: policyversion.reconcile,
}


@dataclass
class Health:
    """What the probes read."""

    leader: Leader
    watching: asyncio.Event = field(default_factory=asyncio.Event)
    loops: Loops | None = None
    """None on standby."""

    def stuck(self) -> str:
        """What does not move, in words; empty while all is well."""
        found = self.loops.stuck() if self.loops is not None else []
        return ", ".join(f"{key} has not moved for {seconds:.0f} s" for key, seconds in found)

    def not_ready(self) -> str:
        """Why it is not ready; empty when it is. A standby is, once it has seen the Lease or that there is none."""
        if self.leader.leading:
            return "" if self.watching.is_set() else "the watches have not begun"
        return "" if self.leader.seen else "the API server has not answered"


async def run(config: Config) -> None:
    """Run the operator until SIGTERM or SIGINT: on standby first, then as the leader.

    Raises what ends it otherwise: a process that does not watch any more must not look alive. A leader that lost its
    Lease does not return: the process ends with :data:`EXIT_LOST`.
    """
    stop = asyncio.Event()
    listen(stop)
    await load_kubeconfig()
    metrics = Metrics()
    identity = Identity(config.pod_name or socket.gethostname(), config.pod_uid, secrets.token_hex(4))
    # The Lease has connections of its own: nothing else may keep a renewal waiting.
    async with k8s.ApiClient() as api:
        lease = KubeLease(api, config.namespace, config.lease_name, config.lease_seconds / 5)
        name = f"Lease/{config.namespace}/{config.lease_name}"
        leader = Leader(lease, identity, config.lease_seconds, lost, name)
        metrics.leader.set_function(lambda: float(leader.leading))
        async with (
            serving(config, metrics, health := Health(leader)),
            hook.serving(config, lambda verb, status: metrics.hook.labels(verb, str(status)).inc()),
        ):
            try:
                if await first(stop, leader.acquire()) is not None:
                    await lead(config, metrics, health, stop)
            finally:
                await leader.release()


def lost(reason: str) -> NoReturn:
    """End this process now, whatever it is doing: it must not act any more."""
    logger.error("leads no more, so this process ends: %s", reason, extra={"step": "lost"})
    os._exit(EXIT_LOST)


async def lead(config: Config, metrics: Metrics, health: Health, stop: asyncio.Event) -> None:
    """Watch and reconcile until ``stop``. When this returns or raises, no reconcile runs any more."""
    term = health.leader.term
    # Policies have connections of their own: a thousand fleets that are looked at must not keep a change waiting.
    async with (
        GuardedClient(term, metrics.asked) as api,
        GuardedClient(term, metrics.asked) as many,
        new_http_client(config.admin_authorities) as http,
    ):
        sight = Sight()
        kube = Kube(api, sight.saw)
        root = await first(stop, root_tokens(kube, config.namespace))
        if root is None:
            return
        context = Context(kube=kube, http=http, tokens=root, term=term, config=config, metrics=metrics)
        watched = WatchedKube(many, sight, config.resync_seconds * REPAIR_RESYNCS)
        looking = replace(context, kube=watched)

        loops = Loops(lambda key: run_one(context, looking, watched.begun, key), resync=config.resync_seconds)
        metrics.loops.set_function(lambda: len(loops))
        metrics.woken.set_function(loops.queue_age)
        metrics.running.set_function(loops.running_age)
        health.loops = loops
        handing = asyncio.create_task(hand_over(stop, loops, health.leader), name="hand over")
        try:
            await watch(config, loops, looking, watched, health.watching, stop)
        finally:
            stop.set()
            await handing


async def run_one(context: Context, looking: Context, begun: asyncio.Event, key: Key) -> float:
    """One run of a loop. ``looking`` reads what the watches brought, from the moment ``begun`` is set."""
    if key.kind != POLICY.kind:
        await begun.wait()
        await context.quiet.wait()
        return await reconcile(looking, key)
    # What engines serve depends on a policy's reconcile: it reads from the API server itself, and never waits.
    rest = await glance.at(looking, key.namespace, key.name) if begun.is_set() else None
    return await reconcile(context, key) if rest is None else rest


async def hand_over(stop: asyncio.Event, loops: Loops, leader: Leader) -> None:
    """At ``stop``, end all reconciles and let the next leader begin. kopf takes seconds longer to end."""
    await stop.wait()
    await loops.stop()
    await leader.release()


async def watch(
    config: Config, loops: Loops, context: Context, kube: WatchedKube, ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """Run kopf until ``stop``; ``kube`` is told what it sees. Raises when a watch has ended."""
    before = asyncio.all_tasks()
    insights, routes = Insights(), Routes(loops)

    def gone(key: ObjectKey, seen: Seen) -> None:
        kind = next((each.kind for each in KINDS if each.plural == key[0]), None)
        if kind is None:
            routes.child(key[1], seen.labels)
        else:
            routes.resource(kind, key[1], key[2], seen.body or {}, deleted=True)

    tasks = await kopf.spawn_tasks(
        registry=observe.registry(routes, kube.sight),
        settings=observe.settings(cluster_wide=not config.watch_namespace),
        memo=context,
        clusterwide=not config.watch_namespace,
        namespaces=[config.watch_namespace] if config.watch_namespace else [],
        insights=insights,
        ready_flag=ready,
        stop_flag=stop,
    )
    listen(stop)  # kopf has put its own handlers in place of ours.
    guarding = asyncio.create_task(observe.guard(insights, stop), name="guard of the watches")
    honest = kube.keep_honest(config.watch_namespace, gone)
    comparing = asyncio.create_task(honest, name="comparison of the watches")
    await kopf.run_tasks([*tasks, guarding, comparing], ignored=before)


def listen(stop: asyncio.Event) -> None:
    """Set ``stop`` at SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def first(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns, or raises; None, and ``work`` is cancelled, when ``stop`` comes first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def load_kubeconfig() -> None:
    """Use the pod's service account, or the kubeconfig where there is no pod."""
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        kube_config.load_incluster_config()  # type: ignore[no-untyped-call]
    else:
        await kube_config.load_kube_config()  # type: ignore[no-untyped-call]


async def root_tokens(kube: Kube, namespace: str) -> tokens.Tokens:
    """The tokens of the root key; waits for the API server as long as it takes."""
    while True:
        try:
            return await tokens.load_or_create(kube, namespace)
        except Retry as error:
            logger.warning("no root key yet, again in %.0f s: %s", error.after, error.reason)
            await asyncio.sleep(error.after)


async def reconcile(context: Context, key: Key) -> float:
    """One run of the reconcile of ``key``, counted."""
    started = time.monotonic()
    outcome = "error"
    try:
        requeue = await RECONCILES[key.kind](context, key.namespace, key.name)
        outcome = "done"
        return requeue
    except Retry:
        outcome = "retry"
        raise
    except InvalidSpec:
        outcome = "invalid"
        raise
    finally:
        context.metrics.runs.labels(key.kind, outcome).inc()
        context.metrics.seconds.labels(key.kind).observe(time.monotonic() - started)


@contextlib.asynccontextmanager
async def serving(config: Config, metrics: Metrics, health: Health) -> AsyncIterator[None]:
    """Serve ``/healthz`` on one port, ``/readyz`` and ``/metrics`` on the other."""

    def answer(trouble: str, status: int) -> aiohttp.web.Response:
        body = {"ok": not trouble, "leader": health.leader.leading, **({"reason": trouble} if trouble else {})}
        return aiohttp.web.json_response(body, status=status if trouble else 200)

    async def alive(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return answer(health.stuck(), 500)

    async def ready(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return answer(health.not_ready(), 503)

    async def scrape(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    ports = {
        config.liveness_port: [aiohttp.web.get("/healthz", alive)],
        config.metrics_port: [aiohttp.web.get("/readyz", ready), aiohttp.web.get("/metrics", scrape)],
    }
    async with contextlib.AsyncExitStack() as stack:
        for port, routes in ports.items():
            app = aiohttp.web.Application()
            app.add_routes(routes)
            runner = aiohttp.web.AppRunner(app, handle_signals=False, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await aiohttp.web.TCPSite(runner, "0.0.0.0", port).start()
        yield
