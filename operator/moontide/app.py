"""The composition root: makes the clients and the loops, and runs them until the process is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

import aiohttp.web
import kopf
from kubernetes.aio import client as k8s
from kubernetes.aio import config as kube_config
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moontide.config import Config
from moontide.engines.client import new_http_client
from moontide.errors import InvalidSpec, Retry
from moontide.handlers import observe
from moontide.handlers.loops import Key, Loops
from moontide.handlers.routes import Routes
from moontide.kube import tokens
from moontide.kube.client import Kube
from moontide.kube.kinds import DEPLOYMENT, POLICY, POOL
from moontide.reconcile import inferencedeployment, kvcachepool, policyversion
from moontide.reconcile.context import Context

logger = logging.getLogger(__name__)

Reconcile = Callable[[Context, str, str], Awaitable[float]]

RECONCILES: dict[str, Reconcile] = {
    POOL.kind: kvcachepool.reconcile,
    DEPLOYMENT.kind: inferencedeployment.reconcile,
    POLICY.kind: policyversion.reconcile,
}


class Metrics:
    """What the operator tells Prometheus of itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.runs = Counter(
            "moontide_reconcile", "Reconciles by kind and outcome.", ["kind", "outcome"], registry=self.registry
        )
        self.seconds = Histogram(
            "moontide_reconcile_seconds", "How long a reconcile took.", ["kind"], registry=self.registry
        )
        self.loops = Gauge("moontide_resources", "Resources that have a loop.", registry=self.registry)


async def run(config: Config) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises what ends it otherwise: a process that does not watch any more must not look alive.
    """
    await load_kubeconfig()
    async with k8s.ApiClient() as api, new_http_client() as http:
        kube = Kube(api)
        context = Context(kube=kube, http=http, tokens=await root_tokens(kube, config.namespace), config=config)
        metrics = Metrics()
        loops = Loops(lambda key: reconcile(context, metrics, key), resync=config.resync_seconds)
        metrics.loops.set_function(lambda: len(loops))
        watching = asyncio.Event()
        runner = await serve(config.metrics_port, metrics, watching)
        try:
            await kopf.operator(
                registry=observe.registry(Routes(loops), loops),
                settings=observe.settings(cluster_wide=not config.watch_namespace),
                memo=context,
                clusterwide=not config.watch_namespace,
                namespaces=[config.watch_namespace] if config.watch_namespace else [],
                ready_flag=watching,
                liveness_endpoint=f"http://0.0.0.0:{config.liveness_port}/healthz",
            )
        finally:
            await loops.stop()
            await runner.cleanup()


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


async def reconcile(context: Context, metrics: Metrics, key: Key) -> float:
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
        metrics.runs.labels(key.kind, outcome).inc()
        metrics.seconds.labels(key.kind).observe(time.monotonic() - started)


async def serve(port: int, metrics: Metrics, watching: asyncio.Event) -> aiohttp.web.AppRunner:
    """Serve ``/readyz`` and ``/metrics`` on ``port``; the caller cleans the runner up."""

    async def ready(_: aiohttp.web.Request) -> aiohttp.web.Response:
        if watching.is_set():
            return aiohttp.web.json_response({"ready": True})
        return aiohttp.web.json_response({"ready": False, "reason": "the watches have not begun"}, status=503)

    async def scrape(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    app = aiohttp.web.Application()
    app.add_routes([aiohttp.web.get("/readyz", ready), aiohttp.web.get("/metrics", scrape)])
    runner = aiohttp.web.AppRunner(app, handle_signals=False, access_log=None)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
