"""Puts the plane together in the API server process: gate around the inference port, admin server beside it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from moontide_engine import fallback, tls
from moontide_engine import settings as settings_module
from moontide_engine.admin import AdminApp, Commands
from moontide_engine.asgi import App, Receive, Scope, Send
from moontide_engine.auth import TokenFile
from moontide_engine.engine import EngineFault, VllmEngine, store_connectors
from moontide_engine.gate import Gate
from moontide_engine.jsonlog import log
from moontide_engine.middleware import GateMiddleware
from moontide_engine.patches import weight_version
from moontide_engine.settings import Settings

ServeHttp = Callable[..., Coroutine[Any, Any, Any]]

# Longer than clients keep an idle connection (httpx: 5 s, as uvicorn by default): the client must be the one that
# closes, or a command that is sent at that moment is lost.
KEEP_ALIVE_SECONDS = 75
# How long a process that got its SIGTERM takes new requests yet, each the last of its connection.
PARTING_SECONDS = 1.0
# How long EngineCore may take to answer the first calls, once it has reported that it is up.
START_TIMEOUT = 60.0


class StartRefused(RuntimeError):
    """The engine is set up in a way in which the gate cannot keep its promise."""


class _Gated:
    """vLLM's FastAPI app with the gate around it; vLLM's launcher reads ``routes`` and ``state`` of what it serves."""

    def __init__(self, app: Any, gate: GateMiddleware) -> None:
        self.routes = app.routes
        self.state = app.state
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)


class _AdminServer(uvicorn.Server):
    """A second server in the same event loop. Signals are vLLM's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Quiet(logging.Filter):
    """Keeps probes and polls of the operator, several a second, out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).startswith("/moontide/v1/"))


async def serve(original: ServeHttp, app: Any, sock: socket.socket | None, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Stand-in for vLLM's ``serve_http``: the same, with the gate and the admin port.

    Returns, as the original does, an awaitable that finishes the shutdown once the engine is gone.
    """
    client = app.state.engine_client
    settings = settings_module.load()
    check_setup(client, settings, kwargs)
    certificate = tls.certificate(settings.admin_tls)
    from moontide_engine.plugin import PATCHES

    engine = VllmEngine(client, importlib.import_module("vllm.version").__version__)
    boot_id = secrets.token_hex(16)
    gate = Gate(boot_id, time.monotonic, settings.admit_ttl)
    weight_version.give_routes(app)
    inner: App = app
    root_path: str = app.root_path or ""
    middleware = GateMiddleware(inner, gate, settings.max_held, root_path)
    commands = Commands(gate, middleware, engine, settings.pod_uid, settings.key_namespace)

    async with asyncio.timeout(START_TIMEOUT):
        for table in await engine.patches():
            if table != dict(PATCHES.table):
                raise StartRefused(
                    f"an EngineCore process runs with the patches {table}, this one with {dict(PATCHES.table)}: "
                    "is the plugin installed and allowed (VLLM_PLUGINS) for all of them?"
                )
        await engine.set_weights_version(settings.weights_version)
        if (seen := await engine.weights_version()) != settings.weights_version:
            raise EngineFault(f"the weights version was set to {settings.weights_version!r} and reads {seen!r}")
        await engine.queues()
    commands.set_patches(PATCHES.table)

    logging.getLogger("uvicorn.access").addFilter(_Quiet())
    admin = AdminApp(commands, middleware, inner, TokenFile(settings.token_file), root_path)
    admin_sock = _listen(settings.admin_host, settings.admin_port)
    config = uvicorn.Config(
        admin,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = _AdminServer(config)
    tasks = [asyncio.ensure_future(server.serve(sockets=[admin_sock]))]
    if certificate is not None:
        tls.secure(config, certificate)
        tasks.append(asyncio.ensure_future(certificate.keep()))
    log(
        "started",
        boot=boot_id,
        podUid=settings.pod_uid,
        state=gate.state,
        admin=f"{settings.admin_host}:{settings.admin_port}",
        tls=certificate is not None,
        weightsVersion=settings.weights_version,
        fellBack=engine.fell_back,
        patches=dict(PATCHES.table),
    )

    async def stop() -> None:
        server.should_exit = True
        for task in tasks[1:]:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        admin_sock.close()
        log("stopped", boot=boot_id)

    # vLLM drains (``--shutdown-timeout``) inside this call and serves until it is done: from here on no newcomer may
    # start, and those who wait get their answer, but what runs may finish.
    # Before that it serves a moment longer, since clients keep connections: whoever uses one hears that it closes.
    loop, own_thread = asyncio.get_running_loop(), threading.get_ident()
    shutdown = client.shutdown

    def shutdown_engine(*a: Any, **k: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(middleware.leave)
            if threading.get_ident() != own_thread and not gate.terminating:
                time.sleep(PARTING_SECONDS)
            loop.call_soon_threadsafe(gate.terminate)
        return shutdown(*a, **k)

    client.shutdown = shutdown_engine
    try:
        rest = await original(_Gated(app, middleware), sock, *args, **kwargs)
    except BaseException:
        await stop()
        raise

    async def finish() -> None:
        try:
            await rest
        finally:
            await stop()

    return finish()


def check_setup(client: Any, settings: Settings, kwargs: Any) -> None:
    """Raise StartRefused for what a gate in one process cannot guard."""
    # Old releases do not hand over the load of the other servers, but the number of them is in the configuration.
    count = int(getattr(client.vllm_config.parallel_config, "_api_process_count", 1))
    if kwargs.get("peer_loads") is not None or count > 1:
        raise StartRefused("one API server process an engine, please: set --api-server-count 1; the gate lives in it")
    if importlib.import_module("vllm.envs").VLLM_ENABLE_RESPONSES_API_STORE:
        raise StartRefused(
            "VLLM_ENABLE_RESPONSES_API_STORE lets responses run on after their request has ended, past every barrier; "
            "unset it"
        )
    stores = store_connectors(client.vllm_config.kv_transfer_config)
    if stores and fallback.fell_back():
        raise StartRefused("the engine was to start without its store, and has one")
    for extra in stores:
        prefix = str(extra.get("cache_prefix", ""))
        if prefix != settings.key_namespace:
            raise StartRefused(
                f"MOONTIDE_KEY_NAMESPACE is {settings.key_namespace!r} and the connector's cache_prefix is {prefix!r}: "
                "a wipe of one would leave the keys of the other"
            )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.setblocking(False)
    return sock
