"""A proxy before the API server that answers 429, 503 or 409, drops connections or loses answers, on command."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import aiohttp.web
import yaml

DROP, LOSE = "drop", "lose"
"""Not let through; let through, and the connection dropped before the answer."""
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})

Wanted = Callable[[str, str], bool]


def everything(method: str, path: str) -> bool:
    """Every request."""
    return True


@dataclass
class Fault:
    """What becomes of requests that are ``wanted``: of ``times`` of them, after ``after`` that go through."""

    kind: int | str
    wanted: Wanted = everything
    after: int = 0
    times: int = 1_000_000_000
    hits: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if not self.wanted(method, path):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.hits >= self.times:
            return False
        self.hits += 1
        return True


class FlakyApi:
    """The proxy. ``fault`` may be set at any time."""

    def __init__(self, kubeconfig: Path) -> None:
        self.fault: Fault | None = None
        self.url = ""
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self._server = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        self._streams: set[asyncio.BaseTransport] = set()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()

    @contextmanager
    def serving(self) -> Iterator[FlakyApi]:
        """Serve in a thread."""
        ready = threading.Event()
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(ready),))
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join(60)
            self._loop.close()

    def kubeconfig(self, of: Path) -> Path:
        """A copy of the kubeconfig that goes through here."""
        config = yaml.safe_load(of.read_text())
        for cluster in config["clusters"]:
            cluster["cluster"] = {"server": self.url}
        path = of.with_name("flaky-kubeconfig")
        path.write_text(yaml.safe_dump(config))
        return path

    def cut(self) -> None:
        """Drop the connections of all watches."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for transport in list(self._streams):
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()

    async def _serve(self, ready: threading.Event) -> None:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

            async def handle(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
                return await self._handle(session, request)

            app = aiohttp.web.Application(client_max_size=8 * 2**20)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = aiohttp.web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            await self._stopped.wait()
            self._cut()
            await runner.cleanup()

    async def _handle(self, session: aiohttp.ClientSession, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        fault, transport = self.fault, request.transport
        kind = fault.kind if fault is not None and fault.strikes(request.method, request.path) else ""
        assert isinstance(transport, asyncio.WriteTransport)
        if isinstance(kind, int):
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": kind, "message": "on command"}
            headers = {"Retry-After": "1"} if kind in (429, 503) else {}
            return aiohttp.web.json_response(status, status=kind, headers=headers)
        if kind == DROP:
            transport.abort()
            return aiohttp.web.Response()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url, body = f"{self._server}{request.raw_path}", await request.read() or None
        async with session.request(request.method, url, data=body, headers=headers) as upstream:
            said = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
            if kind == LOSE:
                await upstream.read()
                transport.abort()
                return aiohttp.web.Response()
            if "watch=true" not in request.raw_path:
                return aiohttp.web.Response(body=await upstream.read(), status=upstream.status, headers=said)
            answer = aiohttp.web.StreamResponse(status=upstream.status, headers=said)
            await answer.prepare(request)
            self._streams.add(transport)
            try:
                async for part in upstream.content.iter_any():
                    await answer.write(part)
            except (aiohttp.ClientError, ConnectionError):
                pass
            finally:
                self._streams.discard(transport)
            return answer
