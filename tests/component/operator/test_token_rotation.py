"""A fleet's admin token is rotated under load: real gates over HTTP, whose token files change late, as by a kubelet."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from kubernetes.aio import client as k8s

from moontide import labels
from moontide.engines.client import EngineStatus, Unanswered, engine_status, new_http_client
from moontide.reconcile import inferencedeployment, policyversion
from tests.unit.operator.doubles import TOKENS, Cluster, Engine

UID = "uid-rl-chat"
OVERLAP_SECONDS = 0.8
LAGS = (0.05, 0.3, 0.6)
"""Seconds after which an engine's token file is what the Secret is."""
Port = int


def first_of(text: str) -> str:
    """As trainers read the Secret."""
    return text.split()[0]


class World(Cluster):
    """Engines on ports of this machine, adopted by a fleet that follows a policy; one Secret, as last applied."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client = new_http_client()
        config = replace(self.ctx.config, token_overlap_seconds=OVERLAP_SECONDS)
        self.ctx = replace(self.ctx, http=self.client, now=lambda: dt.datetime.now(dt.UTC), config=config)
        self.engines: dict[Port, Engine] = {}
        self.failures: list[str] = []
        self.answered = 0
        self.over = False

    @property
    def secret(self) -> str:
        found = [each for each in self.kube.applied if isinstance(each, k8s.V1Secret)]
        return base64.b64decode((found[-1].data or {})["token"]).decode() if found else TOKENS.derive(UID)

    @property
    def token(self) -> dict[str, Any]:
        return dict(self.kube.status("InferenceDeployment", "rl", "chat").get("adminToken") or {})

    @property
    def events(self) -> list[str]:
        return [reason for *_, reason in self.kube.events if reason.startswith("Token")]

    def fleet(self) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in self.engines]
        self.kube.put("PolicyVersion", "rl", "policy", {"version": 1, "weights": "Unchecked"})
        spec = {"policyRef": {"name": "policy"}, "endpoints": {"urls": urls}}
        self.kube.put("InferenceDeployment", "rl", "chat", spec)

    def ask(self, value: str) -> None:
        metadata = self.kube.objects["InferenceDeployment", "rl", "chat"]["metadata"]
        metadata["annotations"] = {labels.ROTATE_TOKEN: value}

    def path(self, engine: Engine) -> Path:
        return self.folder / f"token-{engine.gate.boot_id}"

    async def operator(self) -> None:
        """The fleet's loop."""
        while not self.over:
            await inferencedeployment.reconcile(self.ctx, "rl", "chat")
            await asyncio.sleep(0.05)

    async def changes(self) -> None:
        version = 1
        while not self.over:
            version += 1
            self.kube.put("PolicyVersion", "rl", "policy", {"version": version, "weights": "Unchecked"})
            await policyversion.reconcile(self.ctx, "rl", "policy")
            await asyncio.sleep(0.05)
        self.version = version

    async def kubelet(self, engine: Engine, lag: float) -> None:
        while not self.over:
            text = self.secret
            await asyncio.sleep(lag)
            late = self.path(engine).with_suffix(".late")
            late.write_text(text)
            os.replace(late, self.path(engine))
            await asyncio.sleep(0.02)

    async def trainer(self) -> None:
        """Reads the Secret, and goes on with what it read for a while, as a trainer does that pushes weights."""
        while not self.over:
            token, until = first_of(self.secret), time.monotonic() + OVERLAP_SECONDS / 4
            while time.monotonic() < until and not self.over:
                for port in self.engines:
                    answer = await engine_status(self.client, f"127.0.0.1:{port}", token, 30.0)
                    if isinstance(answer, Unanswered):
                        self.failures.append(f"{self.token}: {answer.reason}")
                    self.answered += 1
                await asyncio.sleep(0.02)

    async def told(self, port: Port, token: str) -> str:
        answer = await engine_status(self.client, f"127.0.0.1:{port}", token, 30.0)
        return "" if isinstance(answer, EngineStatus) else answer.reason

    async def until(self, phase: str, seconds: float = 60.0) -> None:
        ends = time.monotonic() + seconds
        while self.token.get("phase", "Current") != phase:
            assert time.monotonic() < ends, (phase, self.token)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(world: World, boot: str) -> AsyncIterator[None]:
    engine = Engine(world.folder, boot, TOKENS.derive(UID), key_namespace=UID)
    server = uvicorn.Server(uvicorn.Config(engine.app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    world.engines[server.servers[0].sockets[0].getsockname()[1]] = engine
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def test_no_request_fails_while_the_token_is_rotated_under_load(tmp_path: Path) -> None:
    world = World(tmp_path)
    old = TOKENS.derive(UID)
    async with world.client, serving(world, "a"), serving(world, "b"), serving(world, "c"):
        world.fleet()
        work = [
            *(world.kubelet(engine, lag) for engine, lag in zip(world.engines.values(), LAGS, strict=True)),
            *(world.trainer() for _ in range(3)),
            world.operator(),
            world.changes(),
        ]
        tasks = asyncio.gather(*work)
        await asyncio.sleep(0.3)
        assert world.secret == old

        world.ask("november")
        await world.until("Introducing")
        await world.until("Overlapping")
        # The old one is taken all along, the new one from now on, by every engine.
        kept, new = world.secret, TOKENS.derive(UID, world.token["rotation"])
        assert sorted(kept.split()) == sorted([old, new])
        assert [await world.told(port, token) for port in world.engines for token in (old, new)] == [""] * 6
        await world.until("Current")
        assert [await world.told(port, old) for port in world.engines] == ["Http401"] * 3
        assert [await world.told(port, new) for port in world.engines] == [""] * 3
        assert world.secret == new

        world.ask("december")
        await world.until("Introducing")
        await world.until("Current")
        assert [await world.told(port, new) for port in world.engines] == ["Http401"] * 3
        world.over = True
        await asyncio.wait_for(tasks, 60)
        assert world.events == ["TokenRotating", "TokenRotated"] * 2
        assert (world.failures, world.answered > 100) == ([], True)
        # The changes of policy went on, too: none waits for an engine that takes no command.
        assert world.version > 5
        await policyversion.reconcile(world.ctx, "rl", "policy")
        assert world.kube.status("PolicyVersion", "rl", "policy")["version"] == str(world.version)
        assert {engine.state[0] for engine in world.engines.values()} == {"open"}
