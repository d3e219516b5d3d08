"""The hook over an API server's double with the real planner, and reviews that a test decides on."""

from __future__ import annotations

import asyncio
import base64
import collections
import threading
from collections.abc import Callable
from typing import Any

import aiohttp.web
import httpx
from kubernetes.aio import client as k8s

from moontide.config import Config
from moontide.errors import Retry
from moontide.hook.guard import Guard
from moontide.hook.server import Hook
from moontide.kube.reviews import Right, User
from tests.unit.trainer.cluster import Cluster, Fault

POLICY = "/hook/v1/namespaces/rl/policies/policy"
ROOT_KEY = b"k" * 32
FLEET = {
    "metadata": {"name": "tiny", "namespace": "rl", "uid": "uid-of-tiny"},
    "spec": {"model": {"source": "pvc://weights/a", "servedName": "tiny"}},
}


class HookCluster(Cluster):
    """With the fleet's object, and the operator's root key."""

    def answer(self, method: str, path: str, sent: bytes) -> tuple[int, dict[str, Any]]:
        path = path.partition("?")[0]
        if path.endswith("/secrets/moontide-root-key"):
            return 200, {"data": {"key": base64.b64encode(ROOT_KEY).decode()}}
        if path.endswith("/inferencedeployments/tiny"):
            return 200, FLEET
        return super().answer(method, path, sent)


class Reviews:
    """Knows the token ``good`` and says yes, unless told otherwise."""

    def __init__(self) -> None:
        self.users = {"good": User("system:serviceaccount:rl:trainer", "u", ("g",), {"k": ["v"]})}
        self.refused: set[str] = set()
        """Verb and resource, for example ``get secrets``."""
        self.away = False
        self.asked: collections.Counter[str] = collections.Counter()

    async def whose(self, token: str, audience: str) -> User | str:
        self.asked["whose"] += 1
        if self.away:
            raise Retry(3.0, "away")
        return self.users.get(token, "unknown")

    async def may(self, user: User, right: Right) -> bool:
        self.asked[f"{right.verb} {right.resource}"] += 1
        if self.away:
            raise Retry(3.0, "away")
        return f"{right.verb} {right.resource}" not in self.refused


class Running:
    """A hook that serves on a port of 127.0.0.1 from a thread of its own."""

    def __init__(self, server: str, reviews: Reviews, config: Config) -> None:
        self.reviews = reviews
        self.counted: list[tuple[str, int]] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        began: threading.Event = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(server, config, began),), daemon=True
        )
        self._thread.start()
        assert began.wait(60)
        self.http = httpx.Client(base_url=self.url, headers={"authorization": "Bearer good"}, trust_env=False)

    async def _serve(self, server: str, config: Config, began: threading.Event) -> None:
        async with k8s.ApiClient(k8s.Configuration(host=server)) as api:
            guard = Guard(self.reviews, "moontide", keep_seconds=0.0)
            hook = Hook(api, guard, config, lambda verb, status: self.counted.append((verb, status)))
            runner = aiohttp.web.AppRunner(hook.app(), handle_signals=False, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            began.set()
            await self._stop.wait()
            await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def end(self) -> None:
        """Stop it, as SIGTERM does."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def close(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.end()
        self._loop.close()


Made = tuple[HookCluster, Running]
Make = Callable[..., Made]
__all__ = ["FLEET", "POLICY", "ROOT_KEY", "Fault", "HookCluster", "Made", "Make", "Reviews", "Running"]
