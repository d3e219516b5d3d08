"""The token of a pool's wipers is rotated under load: real processes of the wiper, whose token files change late.

As in a cluster each has a kubelet of its own and a master beside it; another master leads all the time, and the
operator is killed and followed all the time. The masters are fakes, and so is the store's native client (``CLIENT``):
the store is a folder with a file a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as k8s

from moontide import labels, naming
from moontide.engines.client import new_http_client, wiper_refusal
from moontide.planning.model import Collect, Wipe
from moontide.reconcile import kvcachepool, policyversion
from moontide.reconcile.fleets import observe
from tests.component.operator import rotating
from tests.component.operator.rotating import LAGS, OVERLAP_SECONDS
from tests.integration.pages import serve_pages
from tests.integration.stage import ROOT, address
from tests.unit.operator.doubles import TOKENS

UID = "uid-rl-kv"
FLEETS = 3
KEYS = 4
"""That a fleet puts before each removal."""

CLIENT = """
import os, pathlib, re
class MooncakeDistributedStore:
    def setup(self, *_):
        self.keys = pathlib.Path(os.environ["KEYS"])
        return 0
    def remove_by_regex(self, pattern, force):
        found = [each for each in self.keys.iterdir() if re.match(pattern, each.name)]
        for each in found:
            each.unlink()
        return len(found)
    def batch_remove(self, keys, force):
        for each in keys:
            (self.keys / each).unlink()
        return [0] * len(keys)
"""


def serve_master(world: World, host: str) -> ThreadingHTTPServer:
    """What operator and wiper ask of one master."""

    def page(path: str) -> str:
        keys = world.keys()
        gauges = {"active_clients": 0, "key_count": len(keys), "allocated_bytes": 0, "total_capacity_bytes": 1}
        pages = {
            "/health": json.dumps({"service_ready": True, "view_version": int(world.leader == host)}),
            "/metrics": "".join(f"master_{name} {value}\n" for name, value in gauges.items()),
            "/get_all_keys": "\n".join(keys),
        }
        return pages[path]

    return serve_pages(host, naming.MASTER_METRICS_PORT, page)


class World(rotating.World):
    """Three masters' pods of one pool, each with a wiper; fleets that use it."""

    kind, name, uid, field = "KVCachePool", "kv", UID, "wiperToken"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = [address() for _ in LAGS]
        self.leader = self.hosts[0]
        self.removals = self.operators = 0
        (folder / "keys").mkdir()
        (folder / "mooncake").mkdir()
        (folder / "mooncake" / "store.py").write_text(CLIENT)
        self.kube.put("KVCachePool", "rl", "kv", {"master": {"replicas": 3}})
        for number in range(FLEETS):
            model = {"source": "pvc://w/a", "servedName": "m"}
            self.kube.put(
                "InferenceDeployment", "rl", f"f{number}", {"model": model, "kvCache": {"poolRef": {"name": "kv"}}}
            )
        for host in self.hosts:
            metadata = k8s.V1ObjectMeta(name=f"m-{host}", namespace="rl", uid=host, labels=labels.store_labels("kv"))
            self.kube.pods.append(k8s.V1Pod(metadata=metadata, status=k8s.V1PodStatus(phase="Running", pod_ip=host)))
            self.path(host).write_text(TOKENS.derive(UID))

    def keys(self) -> list[str]:
        return sorted(each.name for each in (self.folder / "keys").iterdir())

    def wiper(self, host: str) -> subprocess.Popen[bytes]:
        place = f"{host}:{naming.MASTER_METRICS_PORT}"
        environ = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHONPATH": f"{ROOT / 'engine_patches'}:{self.folder}",
            "KEYS": str(self.folder / "keys"),
            "MOONTIDE_WIPER_HOST": host,
            "MOONTIDE_WIPER_TOKEN_FILE": str(self.path(host)),
            "MOONTIDE_MASTER_ADDRESS": place,
            "MOONTIDE_MASTER_METRICS": f"http://{place}",
        }
        with (self.folder / f"wiper-{host}.log").open("wb") as log:
            command = [sys.executable, "-m", "moontide_engine.wiper"]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    async def operator(self) -> None:
        """Operators, one after the other: each is killed in the middle of its second look or so."""
        while not self.over:
            self.operators += 1
            async with new_http_client() as http:
                ctx = replace(self.ctx, http=http, needs_met={}, pods={}, late={})
                await kvcachepool.reconcile(ctx, "rl", "kv")
                said = self.kube.condition("KVCachePool", "rl", "kv", "Ready")
                if said[:2] != ("True", "Serving"):
                    self.failures.append(str(said))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(random.uniform(0.005, 0.2)):
                        while True:
                            await asyncio.sleep(0.01)
                            await kvcachepool.reconcile(ctx, "rl", "kv")

    async def election(self) -> None:
        while not self.over:
            self.leader = random.choice(self.hosts)
            await asyncio.sleep(0.2)

    async def removals_of(self, fleet: str) -> None:
        """Puts keys and has them removed as changes of policy do, sometimes a while after it looked at the pool."""
        namespace = f"uid-rl-{fleet}"
        while not self.over:
            for number in range(KEYS):
                (self.folder / "keys" / f"{namespace}@m@{number:064x}").touch()
            deployment = await self.ctx.kube.get_deployment("rl", fleet)
            assert deployment is not None
            seen = await observe(self.ctx, deployment)
            await asyncio.sleep(random.choice((0, 0, OVERLAP_SECONDS / 4)))
            async with new_http_client() as http:
                action = random.choice((Wipe(seen, 60.0), Collect(seen, ("now",), 60.0)))
                result = await policyversion.perform(replace(self.ctx, http=http), action)
            self.removals += 1
            if (result.success, result.removed) != (True, KEYS):
                self.failures.append(f"{self.token}: {result}")

    async def told(self, token: str) -> list[str]:
        async with new_http_client() as http:
            urls = [f"http://{host}:{naming.WIPER_PORT}" for host in self.hosts]
            return [await wiper_refusal(http, url, token, 30.0) for url in urls]


@pytest.fixture(name="world")
def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path)
    resolve = socket.getaddrinfo

    def resolve_service(host: Any, *arguments: Any, **more: Any) -> Any:
        return resolve(world.leader if str(host).endswith(".svc") else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_service)
    masters = [serve_master(world, host) for host in world.hosts]
    wipers = [world.wiper(host) for host in world.hosts]
    yield world
    for process in wipers:
        process.terminate()
        process.wait(30)
    for master in masters:
        master.shutdown()
        master.server_close()


async def test_no_removal_fails_while_the_token_is_rotated_under_load(world: World) -> None:
    while await world.told(TOKENS.derive(UID)) != [""] * 3:  # noqa: ASYNC110  processes that start
        await asyncio.sleep(0.1)
    await world.rotate_twice(
        *(world.kubelet(host, lag) for host, lag in zip(world.hosts, LAGS, strict=True)),
        *(world.removals_of(f"f{number}") for number in range(FLEETS)),
        world.operator(),
        world.election(),
    )
    assert (world.removals > 30, world.operators > 10) == (True, True)
